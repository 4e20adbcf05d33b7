// Bytes that launches move: what host code says and what the emulation counts, for shapes, views
// and dtypes of all kinds.
#include <gtest/gtest.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/embedding/embedding.h>
#include <tessera/core/kernels/fp8/logits_gradient.h>
#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/loss/cross_entropy.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/random.h>
#include <tessera/optim/optimizers.h>

namespace tessera::test_cuda_traffic {
namespace {

using gpu::emulation::CountedTraffic;

class CudaTraffic : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu::emulation::race::tracked()) GTEST_SKIP() << "this build does not see accesses";
  }
};

Tensor on_gpu(const Shape& shape, DType dtype = kF32) {
  return randn(shape, {}, RandomStream{1, 2}).to(dtype).to(cuda(0));
}

// The launches of `work` have these names, and say what they do.
void expect_declared(const std::function<void()>& work, const std::vector<std::string>& names) {
  const NoGradGuard no_grad;
  const std::vector<CountedTraffic> launches = gpu::emulation::count_traffic(work);
  std::vector<std::string> found;
  for (const CountedTraffic& launch : launches) {
    found.push_back(launch.name);
    ASSERT_TRUE(launch.declared.is_known()) << launch.name;
    EXPECT_EQ(launch.declared.reads, launch.counted.reads) << launch.name;
    EXPECT_EQ(launch.declared.writes, launch.counted.writes) << launch.name;
    EXPECT_GE(launch.accessed, launch.counted.reads + launch.counted.writes) << launch.name;
  }
  EXPECT_EQ(found, names);
}

// Warps use what they ask for: a sector of which an access takes a half costs as much as a whole
// one, and the other half once more. (Statistics of rows are a few bytes of a sector each.)
void expect_whole_sectors(const char* what, const std::function<void()>& work) {
  constexpr int64_t kSmall = 64 << 10;
  const NoGradGuard no_grad;
  for (const CountedTraffic& launch : gpu::emulation::count_traffic(work)) {
    if (launch.accessed < kSmall) continue;
    EXPECT_GE(static_cast<double>(launch.accessed), 0.85 * static_cast<double>(32 * launch.sectors))
        << what << ": " << launch.name;
  }
}

TEST_F(CudaTraffic, WarpsAskForWholeSectors) {
  const Tensor scale = on_gpu({1});
  const kernels::QuantizeWants both{.by_columns = true}, sums{.by_columns = true, .sums = true};
  for (const DType dtype : {kF32, kBF16}) {
    const Tensor x = on_gpu({256, 512}, dtype), y = on_gpu({256, 512}, dtype);
    const Tensor w = on_gpu({512}), b = on_gpu({512});
    expect_whole_sectors("add", [&] { x + y; });
    expect_whole_sectors("transposed copy", [&] { x.t().clone(); });
    expect_whole_sectors("sum of columns", [&] { sum(x, 0); });
    expect_whole_sectors("sum of rows", [&] { sum(x, 1); });
    expect_whole_sectors("layer_norm", [&] { layer_norm(x, {512}, w, b, 1e-5); });
    expect_whole_sectors("quantize", [&] { kernels::quantize(x, {}, scale, both); });
    expect_whole_sectors("quantize, sums", [&] { kernels::quantize(x, {}, scale, sums); });
    expect_whole_sectors("quantize by tiles", [&] {
      kernels::quantize_both(x, {.tile = {1, 128}}, {.tile = {128, 1}}, {.sums = true});
    });
    expect_whole_sectors("quantize by lines", [&] {
      kernels::quantize_both(x, {.tile = {1, 0}}, {.tile = {0, 1}}, {});
    });
    expect_whole_sectors("norm that quantises", [&] {
      kernels::row_norm_quantized(x, y, 512, w, b, 1e-5, true, {}, scale, both);
    });
  }
  const Tensor x = on_gpu({256, 512}, kBF16), y = on_gpu({256, 512}, kBF16);
  expect_whole_sectors("quantize_gelu", [&] { kernels::quantize_gelu(x, true, {}, scale, both); });
  expect_whole_sectors("quantize_gelu_grad",
                       [&] { kernels::quantize_gelu_grad(x, y, true, {}, scale, both); });
  const Tensor targets = zeros({256}, {.dtype = kI64, .device = cuda(0)});
  const auto rows = kernels::cross_entropy_forward(x, targets, {});
  expect_whole_sectors("cross_entropy", [&] { kernels::cross_entropy_forward(x, targets, {}); });
  const kernels::LogitsGradient of{.logits = x,
                                   .targets = targets,
                                   .statistics = rows.statistics,
                                   .gradient = scale,
                                   .divisor = rows.total_weight};
  expect_whole_sectors("quantized gradient of logits",
                       [&] { kernels::quantize_logits_gradient(of, {}, scale, both); });
}

TEST_F(CudaTraffic, OfElementwiseOps) {
  for (const DType dtype : {kF32, kBF16, kF64}) {
    for (const Shape& shape : {Shape{1}, Shape{7}, Shape{33, 65}, Shape{3, 128, 17}}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << shape);
      const Tensor x = on_gpu(shape, dtype), y = on_gpu(shape, dtype);
      expect_declared([&] { exp(x); }, {"elementwise"});
      expect_declared([&] { x + y; }, {"elementwise"});
      expect_declared([&] { x * 2; }, {"elementwise"});
      expect_declared([&] { x* x; }, {"elementwise"});
      expect_declared([&] { where(lt(x, y), x, y); }, {"elementwise", "elementwise"});
    }
  }
  const Tensor x = on_gpu({33, 65}), row = on_gpu({65}), column = on_gpu({33, 1});
  expect_declared([&] { x + row; }, {"elementwise"});
  expect_declared([&] { x + column; }, {"elementwise"});
  expect_declared([&] { column + row; }, {"elementwise"});
  expect_declared([&] { x.t() + column.t(); }, {"elementwise"});
  const Tensor other = on_gpu({33, 65});
  expect_declared([&] { x.slice(1, 3, 60) * other.slice(1, 0, 57); }, {"elementwise"});
}

TEST_F(CudaTraffic, OfCopiesConversionsAndFills) {
  for (const DType dtype : {kF32, kBF16, kU8, kI64}) {
    SCOPED_TRACE(name_of(dtype));
    const Tensor x = zeros({70, 41}, {.dtype = dtype, .device = cuda(0)});
    const Tensor y = zeros({70, 41}, {.dtype = dtype, .device = cuda(0)});
    const Tensor row = zeros({41}, {.dtype = dtype, .device = cuda(0)});
    expect_declared([&] { copy_(y, x); }, {"copy"});
    expect_declared([&] { copy_(y, row); }, {"copy"});
    expect_declared([&] { x.t().clone(); }, {"copy"});
    expect_declared([&] { copy_(y.slice(1, 1, 40), x.slice(1, 2, 41)); }, {"copy"});
    expect_declared([&] { x.to(dtype == kF32 ? kBF16 : kF32); }, {"convert"});
    expect_declared([&] { copy_(zeros_like(y), x.slice(0, 0, 1)); }, {"fill_", "copy"});
    expect_declared([&] { fill_(y, 1); }, {"fill_"});
    expect_declared([&] { fill_(y.slice(1, 3, 7), 1); }, {"fill_"});
  }
}

TEST_F(CudaTraffic, OfTensorsPutTogether) {
  for (const DType dtype : {kF64, kF32, kBF16, kU8}) {
    SCOPED_TRACE(name_of(dtype));
    const auto zeros_of = [&](const Shape& shape) {
      return zeros(shape, {.dtype = dtype, .device = cuda(0)});
    };
    const Tensor x = zeros_of({48, 16}), y = zeros_of({48, 32}), z = zeros_of({48, 5});
    expect_declared([&] { cat({x, y}, 1); }, {"cat"});
    expect_declared([&] { cat({x, z, y}, 1); }, {"cat"});
    expect_declared([&] { cat({x, x, x.narrow(0, 1, 5), x.narrow(0, 0, 3)}, 0); }, {"cat"});
    expect_declared([&] { cat({x.t(), y.t()}, 0); }, {"copy", "copy"});
    expect_declared([&] { cat({y.view({-1}), z.view({-1})}, 0); }, {"cat"});
  }
}

TEST_F(CudaTraffic, OfNorms) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const int64_t width : {5, 96, 768, 2100}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << width);
      const Tensor x = on_gpu({5, width}, dtype), w = on_gpu({width}), b = on_gpu({width});
      expect_declared([&] { layer_norm(x, {width}, w, b, 1e-5); }, {"layer_norm"});
      expect_declared([&] { rms_norm(x, {width}, w, 1e-5); }, {"rms_norm"});
    }
  }
}

TEST_F(CudaTraffic, OfQuantisations) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const Shape& shape : {Shape{16, 16}, Shape{272, 160}, Shape{150, 133}}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << shape);
      const Tensor x = on_gpu(shape, dtype), factor = on_gpu({1});
      const kernels::QuantizeOptions row{.tile = {1, 0}}, column{.tile = {0, 1}};
      const kernels::QuantizeWants columns{.by_rows = false, .by_columns = true};
      const auto sum_of = [&](std::vector<std::string> names) {
        names.push_back("sum");
        if (dtype != kF32) names.push_back("convert");
        return names;
      };
      const std::vector<std::string> lines{"fill_", "largest_of_lines", "cast_tiles"};
      expect_declared([&] { kernels::quantize(x, {}, {}, {.by_columns = true}); },
                      {"fill_", "largest_magnitude", "cast_transpose"});
      expect_declared([&] { kernels::quantize(x, row); }, lines);
      expect_declared([&] { kernels::quantize(x, column, {}, columns); }, lines);
      expect_declared([&] { kernels::quantize_both(x, row, column, {.factor = factor}); }, lines);
      expect_declared([&] { kernels::quantize_both(x, row, column, {.sums = true}); },
                      sum_of(lines));
      const kernels::QuantizeOptions along{.tile = {1, 128}}, down{.tile = {128, 1}};
      expect_declared([&] { kernels::quantize(x, along); }, {"cast_tiles"});
      expect_declared([&] { kernels::quantize_both(x, along, down, {.sums = true}); },
                      sum_of({"cast_tiles"}));
      for (const bool by_columns : {false, true}) {
        expect_declared(
            [&] {
              kernels::quantize(x, {.tile = {128, 128}}, {}, {.by_columns = by_columns});
            },
            {"cast_tiles"});
      }
    }
  }
}

TEST_F(CudaTraffic, OfTheQuantisedGradientOfLogits) {
  for (const Shape& shape : {Shape{272, 160}, Shape{48, 33}}) {
    SCOPED_TRACE(testing::Message() << shape);
    const Tensor logits = on_gpu(shape, kBF16), up = on_gpu({1});
    const Tensor targets = zeros({shape[0]}, {.dtype = kI64, .device = cuda(0)});
    const auto rows = kernels::cross_entropy_forward(logits, targets, {});
    const kernels::LogitsGradient of{.logits = logits,
                                     .targets = targets,
                                     .statistics = rows.statistics,
                                     .gradient = up,
                                     .divisor = rows.total_weight};
    const kernels::QuantizeWants both{.by_columns = true};
    expect_declared([&] { kernels::quantize_logits_gradient(of, {}, {}, both); },
                    {"fill_", "largest_magnitude", "cast_transpose"});
    const Tensor scale = on_gpu({1});
    expect_declared([&] { kernels::quantize_logits_gradient(of, {}, scale, both); },
                    {"cast_transpose"});
  }
}

TEST_F(CudaTraffic, OfNormsThatWriteFp8) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const Shape& shape : {Shape{48, 160}, Shape{16, 768}, Shape{96, 1024}}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << shape);
      const int64_t width = shape[1];
      const Tensor x = on_gpu(shape, dtype), residual = on_gpu(shape, dtype);
      const Tensor w = on_gpu({width}), b = on_gpu({width}), scale = on_gpu({1});
      for (const bool by_columns : {false, true}) {
        const kernels::QuantizeWants wants{.by_columns = by_columns};
        expect_declared(
            [&] {
              kernels::row_norm_quantized(x, residual, width, w, b, 1e-5, true, {}, scale, wants);
            },
            {"layer_norm_cast"});
        expect_declared(
            [&] {
              kernels::row_norm_quantized(x, {}, width, w, {}, 1e-5, false, {}, scale, wants);
            },
            {"rms_norm_cast"});
      }
    }
  }
}

TEST_F(CudaTraffic, OfSums) {
  for (const DType dtype : {kF32, kBF16, kI64}) {
    SCOPED_TRACE(name_of(dtype));
    // Rows and columns, in one pass and in two, of matrices and of what is none.
    const auto zeros_of = [&](const Shape& shape) {
      return zeros(shape, {.dtype = dtype, .device = cuda(0)});
    };
    const Tensor x = zeros_of({40, 70}), cube = zeros_of({6, 7, 40});
    expect_declared([&] { sum(x, {1}); }, {"sum"});
    expect_declared([&] { sum(x, {0}); }, {"sum"});
    expect_declared([&] { sum(x.t(), {0}); }, {"sum"});
    expect_declared([&] { sum(cube, {0, 2}); }, {"sum"});
    expect_declared([&] { sum(cube, {1}); }, {"sum"});
    expect_declared([&] { sum(x.slice(0, 0, 1).expand({9, 70}), {1}); }, {"sum"});
    expect_declared([&] { sum(zeros_of({2, 70000}), {1}); }, {"fill_", "sum", "sum"});
    expect_declared([&] { sum(zeros_of({3000, 40}), {0}); }, {"fill_", "sum", "sum"});
    expect_declared([&] { amax(x, {1}); }, {"amax"});
  }
}

TEST_F(CudaTraffic, OfGradientsOfNorms) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const int64_t width : {5, 96, 768, 2100}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << width);
      const Tensor x = on_gpu({37, width}, dtype), dy = on_gpu({37, width}, dtype);
      const Tensor w = on_gpu({width});
      const kernels::RowNorm forward = kernels::row_norm_forward(x, {}, width, w, w, 1e-5, true);
      for (const int way : {0, 1, 2, 3}) {
        const bool all = way > 0;
        kernels::RowNormBackwardOptions options{.column_sums = way == 2};
        if (way == 3) options.dropout = kernels::ResidualDropout{0.5, RandomStream{1, 2}};
        const std::vector<CountedTraffic> launches = gpu::emulation::count_traffic([&] {
          kernels::row_norm_backward(dy, {}, x, width, w, forward.mean, forward.rstd,
                                     {true, all, all}, options);
        });
        EXPECT_GE(launches.size(), all ? 2u : 1u);
        for (const CountedTraffic& launch : launches) {
          EXPECT_EQ(launch.declared.reads, launch.counted.reads) << launch.name;
          EXPECT_EQ(launch.declared.writes, launch.counted.writes) << launch.name;
        }
      }
    }
  }
}

TEST_F(CudaTraffic, OfGradientsOfGelu) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const int64_t width : {8, 264, 2100}) {
      const Tensor dy = on_gpu({130, width}, dtype), x = on_gpu({130, width}, dtype);
      for (const bool tanh_form : {true, false}) {
        const std::vector<std::string> names =
            width * size_of(dtype) % 16 == 0
                ? std::vector<std::string>{"gelu_gradient", "gelu_fold"}
                : std::vector<std::string>{"elementwise"};
        expect_declared([&] { kernels::gelu_gradients(dy, x, tanh_form, true); }, names);
      }
    }
  }
}

TEST_F(CudaTraffic, OfCrossEntropy) {
  for (const DType dtype : {kF32, kBF16}) {
    for (const int64_t classes : {3, 50, 1000}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << classes);
      const Tensor logits = on_gpu({11, classes}, dtype);
      const Tensor targets = zeros({11}, {.dtype = kI64, .device = cuda(0)});
      kernels::CrossEntropyRows rows;
      expect_declared([&] { rows = kernels::cross_entropy_forward(logits, targets, {}); },
                      {"cross_entropy", "sum"});
      const Tensor one = full({1}, 1.0).to(cuda(0));
      expect_declared(
          [&] {
            kernels::cross_entropy_backward(logits, targets, {}, rows.statistics, one,
                                            rows.total_weight);
          },
          {"cross_entropy"});
      const Tensor losses = zeros({11}, {.dtype = kF64, .device = cuda(0)});
      expect_declared(
          [&] {
            kernels::cross_entropy_in_place(logits.clone(), targets, -100, rows.total_weight,
                                            losses);
          },
          {"copy", "cross_entropy"});
    }
  }
}

// Every block reads of the table what it needs.
TEST_F(CudaTraffic, OfUpdates) {
  constexpr int64_t kRow = 128;
  const TensorList params = {on_gpu({33, 65}), on_gpu({7}), on_gpu({70000})};
  for (const Tensor& param : params) {
    param.set_requires_grad();
    param.set_grad(on_gpu(param.shape()));
  }
  optim::AdamW adam({{"a", params[0]}, {"b", params[1]}, {"c", params[2]}}, {.lr = 1e-3});
  optim::SGD sgd({{"a", params[0]}, {"b", params[1]}, {"c", params[2]}}, {.lr = 1e-3});
  adam.step();
  for (const bool with_states : {true, false}) {
    const std::vector<CountedTraffic> launches = gpu::emulation::count_traffic([&] {
      if (with_states) {
        adam.step();
      } else {
        sgd.step();
      }
    });
    ASSERT_EQ(launches.size(), 1u);
    const CountedTraffic& update = launches[0];
    EXPECT_EQ(update.counted.writes, (33 * 65 + 7 + 70000) * (with_states ? 12 : 4));
    EXPECT_EQ(update.declared.writes, update.counted.writes);
    EXPECT_LE(update.counted.reads, update.declared.reads);
    EXPECT_GT(update.counted.reads, update.declared.reads - 3 * kRow);
  }
}

Tensor places(const std::vector<int64_t>& list) {
  return tensor(std::span<const int64_t>(list), {static_cast<int64_t>(list.size())}).to(cuda(0));
}

// Where all of them differ, what is said is what is moved, and otherwise it is the most.
TEST_F(CudaTraffic, OfIndices) {
  std::vector<int64_t> list(90), same(90, 7);
  for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int64_t>((i * 37) % 90);
  for (const DType dtype : {kF32, kBF16}) {
    for (const int64_t width : {1, 40, 768}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << width);
      const Tensor x = on_gpu({90, width}, dtype), rows = on_gpu({90, width}, dtype);
      const Tensor index = places(list), equal = places(same);
      const std::vector<std::string> sorts = {"check_index", "sort_places", "sort_places"};
      expect_declared([&] { index_select(x, 0, index); }, {"check_index", "index_select"});
      std::vector<std::string> names = {"copy"};
      names.insert(names.end(), sorts.begin(), sorts.end());
      names.push_back("index_add");
      expect_declared([&] { index_add(x, 0, index, rows); }, names);
      const std::vector<CountedTraffic> launches =
          gpu::emulation::count_traffic([&] { index_select(x, 0, equal); });
      ASSERT_EQ(launches.size(), 2u);
      EXPECT_TRUE(launches[1].declared.at_most);
      EXPECT_EQ(launches[1].counted.writes, launches[1].declared.writes);
      EXPECT_EQ(launches[1].declared.reads - launches[1].counted.reads,
                89 * width * size_of(dtype));
    }
  }
}

// Gradients of tables, of rows that differ, that are equal, and that a block's segment ends in.
TEST_F(CudaTraffic, OfEmbeddings) {
  constexpr int64_t kRows = 300;
  for (const int64_t width : {5, 64, 768}) {
    for (const int64_t repeat : {1, 2, 100}) {
      SCOPED_TRACE(testing::Message() << width << " " << repeat);
      std::vector<int64_t> list(kRows);
      for (size_t i = 0; i < list.size(); ++i) list[i] = static_cast<int64_t>(i) / repeat;
      const Tensor index = places(list), dy = on_gpu({kRows, width});
      int64_t writes = 0, said = 0, parts = 0;
      for (const CountedTraffic& launch : gpu::emulation::count_traffic(
               [&] { kernels::embedding_backward(dy, index, kRows, -1); })) {
        if (launch.name != "embedding_backward") {
          EXPECT_EQ(launch.counted.reads, launch.declared.reads) << launch.name;
          EXPECT_EQ(launch.counted.writes, launch.declared.writes) << launch.name;
          continue;
        }
        EXPECT_LE(launch.counted.reads, launch.declared.reads);
        EXPECT_LE(launch.counted.writes, launch.declared.writes);
        if (++parts > 1) continue;
        EXPECT_EQ(launch.counted.reads, launch.declared.reads);
        writes = launch.counted.writes;
        said = launch.declared.writes;
      }
      // A row of the table for each that differs, but for the parts that segments leave.
      const int64_t segments = (kRows + 63) / 64, row = width * 4;
      EXPECT_EQ(said, (kRows + 2 * segments) * row);
      if (repeat == 1) {
        EXPECT_EQ(writes, kRows * row);
      }
    }
  }
}

TEST_F(CudaTraffic, OfSortsAndScans) {
  for (const int64_t n : {1, 2, 700, 2048}) {
    const Tensor x = on_gpu({3, n});
    std::vector<std::string> names = {"sort", "sort"};
    if (n > 1) names.push_back("sort");
    expect_declared([&] { sort(x, 1); }, names);
    expect_declared([&] { cumsum(x, 1); }, {"cumsum"});
    expect_declared([&] { cumsum(x, 0); }, {"cumsum"});
  }
  const Tensor line = on_gpu({70000});
  expect_declared([&] { cumsum(line, 0); }, {"cumsum", "cumsum", "cumsum"});
  std::vector<std::string> passes = {"sort"};
  for (int pass = 0; pass < 4; ++pass) {
    for (const char* name : {"sort", "cumsum", "sort"}) passes.emplace_back(name);
  }
  passes.emplace_back("sort");
  const Tensor long_row = on_gpu({5000});
  expect_declared([&] { sort(long_row, 0); }, passes);
}

// Of the table what blocks look for, and limbs that are not zero.
TEST_F(CudaTraffic, OfTheExactNorm) {
  constexpr int64_t kRow = 128, kLimbs = 8 * 64;
  const TensorList tensors = {on_gpu({33, 65}), on_gpu({7}, kBF16), on_gpu({70000})};
  const int64_t elements = (33 * 65 + 70000) * 4 + 7 * 2;
  const std::vector<CountedTraffic> launches =
      gpu::emulation::count_traffic([&] { kernels::multi_tensor_square_sum(tensors, cuda(0)); });
  ASSERT_EQ(launches.size(), 3u);  // zeros, the sum and its carries
  const CountedTraffic& sum = launches[1];
  EXPECT_TRUE(sum.declared.at_most);
  EXPECT_GE(sum.counted.reads, elements);
  EXPECT_LE(sum.counted.reads, sum.declared.reads);
  EXPECT_LE(sum.declared.reads, elements + 3 * 3 * kRow + 2 * kLimbs);
  EXPECT_LE(sum.counted.writes, sum.declared.writes);
  EXPECT_EQ(launches[2].counted.reads, launches[2].declared.reads);
  EXPECT_EQ(launches[2].counted.writes, launches[2].declared.writes);
}

TEST_F(CudaTraffic, OfDropoutAndSoftmax) {
  for (const DType dtype : {kF32, kBF16}) {
    const Tensor x = on_gpu({33, 65}, dtype), wide = on_gpu({3, 9000}, dtype);
    expect_declared([&] { dropout(x, 0.1); }, {"dropout"});
    expect_declared([&] { softmax(x, 1); }, {"softmax"});
    expect_declared([&] { softmax(x, 0); }, {"softmax"});
    expect_declared([&] { softmax(wide, 1); }, {"softmax"});
    expect_declared([&] { tril(x, -3); }, {"tril"});
    expect_declared([&] { triu(x, 40); }, {"triu"});
  }
}

}  // namespace
}  // namespace tessera::test_cuda_traffic
