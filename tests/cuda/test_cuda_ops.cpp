// The table of ops on the device "cuda": values and gradients against the CPU's f64, and on the
// emulation the bytes that launches say they move against those that they do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/embedding/embedding.h>
#include <tessera/core/kernels/loss/linear_cross_entropy.h>

#include "autograd/op_checks.h"
#include "autograd/op_samples.h"
#include "message_of.h"
#include "on_emulation.h"

namespace tessera::tests::test_cuda_ops {
namespace {

class CudaOps : public testing::TestWithParam<std::string_view> {};

// Kernels that do not say what they move, and why. A row that says it leaves this list.
constexpr const char *kTiles = "reads operands once a tile; where it costs time a library stands",
                     *kWindows = "windows overlap or leave gaps",
                     *kPasses = "reads x for the statistics and again for the result",
                     *kDraws = "values decide how much it reads",
                     *kTiny = "a number for each sequence";
const std::map<std::string, const char*, std::less<>> kSilent = {
    {"addmm", kTiles},
    {"linear", kTiles},
    {"matmul", kTiles},
    {"conv1d", kTiles},
    {"conv2d", kTiles},
    {"attention", kTiles},
    {"attention_backward", kTiles},
    {"attention_backward_tensor", kTiles},
    {"attention_tensor", kTiles},
    {"attention_lengths", kTiny},
    {"avg_pool", kWindows},
    {"max_pool", kWindows},
    {"batch_norm", kPasses},
    {"group_norm", kPasses},
    {"multinomial", kDraws}};

void check_traffic(const gpu::emulation::CountedTraffic& launch) {
  const auto& [name, declared, counted, accessed, sectors] = launch;
  EXPECT_NE(declared.is_known(), kSilent.contains(name)) << name << " says what it moves";
  if (!declared.is_known()) {
    EXPECT_TRUE(kSilent.contains(name)) << name << " does not say what it moves";
  } else if (declared.at_most) {
    EXPECT_LE(counted.reads, declared.reads) << name;
    EXPECT_LE(counted.writes, declared.writes) << name;
  } else {
    EXPECT_EQ(counted.reads, declared.reads) << name;
    EXPECT_EQ(counted.writes, declared.writes) << name;
  }
}

TEST_P(CudaOps, GiveTheValuesAndGradientsOfTheCpu) {
  const OpRow& row = *find_op_row(GetParam());
  for (const Sample& sample : row.samples) {
    Complaints complaints;
    std::vector<gpu::emulation::CountedTraffic> launches;
    const auto check = [&] { complaints = check_forward_on(row, sample, cuda(0)); };
    if (gpu::emulation::race::tracked()) {
      launches = gpu::emulation::count_traffic(check);
    } else {
      check();
    }
    for (const std::string& complaint : complaints) ADD_FAILURE() << complaint;
    for (const gpu::emulation::CountedTraffic& launch : launches) check_traffic(launch);
  }
}

TEST_P(CudaOps, RefuseOperandsOfTheCpuAmongOthersAndTheReverse) {
  const OpRow& row = *find_op_row(GetParam());
  for (const Sample& sample : row.samples) {
    for (const std::string& complaint : check_devices(row, sample, cuda(0))) {
      ADD_FAILURE() << complaint;
    }
  }
}

// As in torch: a learned number of the CPU has its gradient there.
TEST(CudaNumbers, OfTheCpuStandBesideTensorsAndHaveTheirGradients) {
  const Tensor x = tensor({1, 2, 3}).to(cuda(0)).set_requires_grad();
  const Tensor factor = full({}, 2).set_requires_grad();
  sum(mul(x, factor)).backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{2, 2, 2}));
  EXPECT_TRUE(factor.grad().device().is_cpu());
  EXPECT_EQ(factor.grad().item(), 6);
}

// Logits in chunks of 3 rows, the last one of 1: the same losses (a library's within the rounding
// of its products), and gradients within the rounding of their sums.
TEST(CudaLinearCrossEntropy, ChunksGiveWhatAllRowsAtOnceDo) {
  constexpr int64_t kRows = 7, kWidth = 16, kWords = 40;
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    manual_seed(3);
    const Tensor x = randn({kRows, kWidth}).to(dtype), weight = randn({kWords, kWidth}).to(dtype);
    const Tensor targets = randint(0, kWords, {kRows});
    const auto results = [&](int64_t rows) {
      auto& options = Context::current().slot<kernels::LinearCrossEntropyOptions>();
      const int64_t held = dtype == kF16 ? 4 : size_of(dtype);
      const ScopedValue<int64_t> most(options.logits_bytes, rows * kWords * held);
      const Tensor a = x.to(cuda(0)).set_requires_grad(),
                   b = weight.to(cuda(0)).set_requires_grad();
      const Tensor loss = linear_cross_entropy(a, b, targets.to(cuda(0)));
      loss.backward();
      return TensorList{loss.detach().to(kCpu), a.grad().to(kCpu), b.grad().to(kCpu)};
    };
    const TensorList whole = results(kRows), chunks = results(3);
    if (gpu::on_emulation()) {
      EXPECT_EQ(chunks[0].item(), whole[0].item()) << dtype;
      EXPECT_EQ(chunks[1].to_vector(), whole[1].to_vector()) << dtype;
    }
    const double eps = dtype == kF64   ? 0x1p-52
                       : dtype == kF32 ? 0x1p-23
                       : dtype == kF16 ? 0x1p-10
                                       : 0x1p-7;
    EXPECT_NEAR(chunks[0].item(), whole[0].item(), 4 * eps * std::abs(whole[0].item())) << dtype;
    for (const size_t result : {1, 2}) {
      const std::vector<double> expected = whole[result].to_vector();
      const std::vector<double> got = chunks[result].to_vector();
      double largest = 0;
      for (const double value : expected) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < got.size(); ++i) {
        const double of = gpu::on_emulation() ? std::max(1e-3, std::abs(expected[i])) : largest;
        EXPECT_NEAR(got[i], expected[i], 8 * eps * of) << dtype << " " << result << " " << i;
      }
    }
  }
}

std::vector<std::string_view> names() {
  std::vector<std::string_view> result;
  for (const OpRow& row : op_rows()) result.push_back(row.name);
  return result;
}

INSTANTIATE_TEST_SUITE_P(Table, CudaOps, testing::ValuesIn(names()), [](const auto& info) {
  std::string name(info.param);
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
});

TEST(CudaViews, MadeBeforeAWriteHaveTheirGradients) {
  for (const Device& device : {cuda(0), kCpu}) {
    const Tensor x = tensor({1, 2, 3}).to(device).set_requires_grad();
    const Tensor base = mul(x, x), rows = expand(base, {2, 3}), part = narrow(base, 0, 1, 2);
    neg_(base);
    const Tensor loss = add(sum(mul(rows, rows)), sum(part));
    const Tensor first = grad(loss, TensorList{x}, {}, {.create_graph = true})[0];
    // 2 x^4 - x for the last two: 8 x^3 - 2 x, 24 x^2 - 2.
    EXPECT_EQ(first.to_vector(), (std::vector<double>{8, 60, 210}));
    EXPECT_EQ(grad(sum(first), TensorList{x})[0].to_vector(), (std::vector<double>{24, 94, 214}));
  }
}

// Pieces of all widths, in vectors and one by one, more than one launch takes, with ones of
// nothing.
TEST(CudaCat, GivesTheValuesOfTheCpu) {
  for (const DType dtype : {kF64, kF32, kBF16, kU8}) {
    for (const int64_t unit : {1, 3, 16}) {
      for (const int pieces : {1, 2, 15, 16, 17, 33, 40}) {
        for (const int64_t dim : {0, 1, 2}) {
          TensorList host, device;
          for (int i = 0; i < pieces; ++i) {
            Shape shape = {3, 2, 16};
            shape[static_cast<int>(dim)] = unit * (i % 4);
            host.push_back(arange(0, numel_of(shape)).add(i).to(dtype).reshape(shape));
            device.push_back(host.back().to(cuda(0)));
          }
          SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << pieces << " pieces of "
                                          << unit << " along " << dim);
          EXPECT_EQ(cat(device, dim).to(kCpu).to_vector(), cat(host, dim).to_vector());
        }
      }
    }
  }
  // A piece that does not begin at a vector, and rows that threads of two blocks have.
  const Tensor x = arange(0, 70 * 16, 1, kF32).to(cuda(0));
  const Tensor shifted = x.slice(0, 1, 1 + 69 * 16).view({69, 16});
  const TensorList both = {shifted, x.slice(0, 0, 69 * 16).view({69, 16})};
  EXPECT_EQ(cat(both, 1).to(kCpu).to_vector(),
            cat({both[0].to(kCpu), both[1].to(kCpu)}, 1).to_vector());
}

// Rows with no term, a few, and so many that segments share them; onto zeros and onto what is
// there.
TEST(CudaEmbedding, SumsRowsAsTheCpuDoes) {
  for (const DType dtype : {kF64, kF32, kBF16}) {
    for (const int64_t C : {3, 16, 520}) {
      for (const int64_t V : {1, 5, 700}) {
        const Tensor index =
            randint(0, std::max<int64_t>(1, V - 2), {500}, kI64, RandomStream{1, 1});
        // Small whole numbers: sums are exact in any order.
        const Tensor grad = randint(-2, 3, {500, C}, kI64, RandomStream{1, 2}).to(dtype);
        const Tensor before = randint(-9, 9, {V, C}, kI64, RandomStream{1, 3}).to(dtype);
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << V << " rows of " << C);
        const Tensor there = grad.to(cuda(0)), index_there = index.to(cuda(0));
        EXPECT_EQ(kernels::embedding_backward(there, index_there, V, 0).to(kCpu).to_vector(),
                  kernels::embedding_backward(grad, index, V, 0).to_vector());
        const Tensor onto = before.clone(), onto_there = before.to(cuda(0));
        kernels::embedding_backward(grad, index, V, 0, onto);
        kernels::embedding_backward(there, index_there, V, 0, onto_there);
        EXPECT_EQ(onto_there.to(kCpu).to_vector(), onto.to_vector());
      }
    }
  }
}

TEST(CudaPrint, AStreamGetsTheValuesAndTheDevice) {
  std::ostringstream out;
  out << tensor({1, 2.5}).to(cuda(0));
  EXPECT_EQ(out.str(), "tensor([1.0000, 2.5000], device='cuda:0')");
}

TEST(CudaDevice, IsTheEmulation) {
  TS_NEEDS_EMULATION("has two devices");
  EXPECT_EQ(gpu::backend_kind(), gpu::BackendKind::kEmulated);
  EXPECT_EQ(gpu::device_count(), 2);
}

}  // namespace
}  // namespace tessera::tests::test_cuda_ops
