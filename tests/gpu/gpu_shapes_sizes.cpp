// Tensors of more elements than 32 bits count, ones that begin at odd addresses, and ones of none
// or one.
#include "shapes.h"

#include <functional>
#include <utility>

#include <tessera/core/error.h>

namespace tessera::gpu_shapes {
namespace {

// ---- 2^31 elements and more --------------------------------------------------------------------

int64_t many() { return (int64_t{1} << (small_shapes() ? 14 : 31)) + 70001; }

// Windows of it: the ends, and about each multiple of 2^30 (small: 2^13).
std::vector<int64_t> windows() {
  constexpr int64_t kWindow = 64;
  const int64_t step = many() / 2 - 35000;
  std::vector<int64_t> begins = {0, many() - kWindow};
  for (int64_t middle = step; middle < many(); middle += step) {
    begins.push_back(std::min(middle - kWindow / 2, many() - kWindow));
  }
  begins.push_back(many() / 3);
  return begins;
}

// Element i of x is of(i), in the windows.
void expect_windows(const Tensor& x, const std::function<double(int64_t)>& of,
                    const std::string& what) {
  ASSERT_EQ(x.numel(), many()) << what;
  for (const int64_t begin : windows()) {
    const std::vector<double> got = x.narrow(0, begin, 64).to(kCpu).to_vector();
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(got[static_cast<size_t>(i)], of(begin + i)) << what << ": element " << begin + i;
    }
  }
}

double pattern(int64_t i) { return static_cast<double>(i % 251); }
// Made in pieces whose indices 32 bits do count.
Tensor patterned(DType dtype) {
  const Tensor x = empty({many()}, {.dtype = dtype, .device = kGpu});
  constexpr int64_t kPiece = int64_t{251} << 20;
  for (int64_t begin = 0; begin < many(); begin += kPiece) {
    const int64_t size = std::min(kPiece, many() - begin);
    copy_(x.narrow(0, begin, size), remainder(arange(0, size, 1, kI32, kGpu), 251));
  }
  return x;
}

// Where the device has no room for it, the test says so and is skipped.
template <class Body>
void where_it_fits(const Body& body) {
  std::string reason;
  try {
    body();
  } catch (const OutOfMemory& error) {
    reason = error.what();
  }
  if (!reason.empty()) GTEST_SKIP() << reason;
}

TEST(ShapesBeyond32Bits, FillsCopiesAndConversions) {
  where_it_fits([] {
    const Tensor filled = full({many()}, 7, {.dtype = kU8, .device = kGpu});
    expect_windows(
        filled, [](int64_t) { return 7; }, "full");
    const Tensor x = patterned(kU8);
    expect_windows(x, pattern, "the pattern");
    copy_(filled, x);
    expect_windows(filled, pattern, "copy_");
    expect_windows(x.to(kBF16), pattern, "to bf16");  // whole numbers up to 256 are all there
    const Tensor part = filled.narrow(0, many() - 100, 50);
    fill_(part, 3);
    EXPECT_EQ(sum(part).item(), 150);
    EXPECT_EQ(filled.narrow(0, many() - 101, 1).item(), pattern(many() - 101));
    EXPECT_EQ(filled.narrow(0, many() - 50, 1).item(), pattern(many() - 50));
  });
}

TEST(ShapesBeyond32Bits, ArithmeticAndSums) {
  where_it_fits([] {
    const Tensor x = patterned(kBF16);
    expect_windows(
        add(x, x), [](int64_t i) { return 2 * pattern(i); }, "add");  // even, below 512
    expect_windows(
        mul(x, 0.5), [](int64_t i) { return pattern(i) / 2; }, "mul");
    double expected = static_cast<double>(many() / 251) * (251 * 250 / 2);
    for (int64_t i = many() / 251 * 251; i < many(); ++i) expected += pattern(i);
    EXPECT_EQ(sum(x, {}, false, kF64).item(), expected);
    const Tensor bytes = patterned(kU8);
    EXPECT_EQ(sum(bytes).item(), expected);
    fill_(bytes.narrow(0, many() - 7, 1), 255);
    EXPECT_EQ(argmax(bytes).item<int64_t>(), many() - 7);
    EXPECT_EQ(max(bytes).item(), 255);
  });
}

TEST(ShapesBeyond32Bits, ConcatenationsAndRows) {
  where_it_fits([] {
    const Tensor x = patterned(kU8);
    const int64_t cut = many() / 3 + 1;
    const Tensor turned = cat(TensorList{x.narrow(0, cut, many() - cut), x.narrow(0, 0, cut)});
    expect_windows(
        turned, [&](int64_t i) { return pattern((i + cut) % many()); }, "cat");
    // Rows of which the last ones lie beyond 2^31.
    constexpr int64_t kColumns = 251 * 8;
    const int64_t rows = many() / kColumns;
    const Tensor table = x.narrow(0, 0, rows * kColumns).view({rows, kColumns});
    const std::vector<int64_t> wanted = {0, rows / 2, rows - 2, rows - 1};
    const Tensor index = tensor(std::span<const int64_t>(wanted), {4}).to(kGpu);
    fill_(table.narrow(0, rows - 1, 1), 9);
    const Tensor taken = index_select(table, 0, index).to(kCpu);
    for (int64_t row = 0; row < 4; ++row) {
      EXPECT_EQ(sum(taken.select(0, row)).item(), row < 3 ? 8 * 251 * 125 : 9 * kColumns) << row;
    }
    // Every row has the same numbers, but for the last one; the sums along both dimensions.
    const Tensor down = sum(table, {0}).to(kCpu), across = sum(table, {1}).to(kCpu);
    EXPECT_EQ(down.select(0, 250).item(), static_cast<double>(250 * (rows - 1) + 9));
    EXPECT_EQ(across.select(0, rows - 1).item(), 9 * kColumns);
    EXPECT_EQ(across.select(0, rows - 2).item(), 8 * 251 * 125);
  });
}

// ---- Odd addresses -----------------------------------------------------------------------------

// Each op of what begins `offset` elements into a buffer gives what it does for aligned copies.
TEST(ShapesAlignment, OpsOfTensorsThatBeginAnywhere) {
  manual_seed(31);
  const int64_t rows = size_or(1025, 19), columns = size_or(768, 32);
  using Op = std::function<TensorList(const Tensor& x, const Tensor& y, const Tensor& row)>;
  const auto backward_of = [](const auto& call) {
    return [call](const Tensor& x, const Tensor& y, const Tensor& row) {
      // Leaves that lie where the arguments do.
      const Tensor in = x.detach().set_requires_grad(), weight = row.detach().set_requires_grad();
      const Tensor result = call(in, weight);
      result.backward(y);
      return TensorList{result.detach(), in.grad(), weight.grad()};
    };
  };
  const std::pair<const char*, Op> ops[] = {
      {"exp", [](const Tensor& x, const Tensor&, const Tensor&) { return TensorList{exp(x)}; }},
      {"add",
       [](const Tensor& x, const Tensor& y, const Tensor&) { return TensorList{add(x, y)}; }},
      {"add a row",
       [](const Tensor& x, const Tensor&, const Tensor& row) { return TensorList{add(x, row)}; }},
      {"sums",
       [](const Tensor& x, const Tensor&, const Tensor&) {
         return TensorList{sum(x, {0}), sum(x, {1}), sum(x), amax(x, {1})};
       }},
      {"copies",
       [](const Tensor& x, const Tensor& y, const Tensor&) {
         return TensorList{x.clone(), cat(TensorList{x, y}, 1), x.t().contiguous(), x.to(kF32)};
       }},
      {"softmax",
       [](const Tensor& x, const Tensor&, const Tensor&) {
         return TensorList{softmax(x, 1), log_softmax(x, 0)};
       }},
      {"gelu", backward_of([](const Tensor& x, const Tensor& row) { return mul(gelu(x), row); })},
      {"layer_norm", backward_of([&](const Tensor& x, const Tensor& row) {
         return layer_norm(x, {columns}, row, Tensor());
       })},
      {"rms_norm", backward_of([&](const Tensor& x, const Tensor& row) {
         return rms_norm(x, {columns}, row, 1e-5);
       })},
      {"cross_entropy",
       [&](const Tensor& x, const Tensor&, const Tensor&) {
         const Tensor in = x.detach().set_requires_grad();
         const Tensor target = remainder(arange(0, rows, 1, kI64, kGpu), columns);
         const Tensor loss = cross_entropy(in, target);
         loss.backward();
         return TensorList{loss.detach(), in.grad()};
       }},
      {"embedding",
       [&](const Tensor& x, const Tensor& y, const Tensor&) {
         const Tensor table = x.detach().set_requires_grad();
         const Tensor index = remainder(mul(arange(0, rows, 1, kI64, kGpu), 3), rows);
         const Tensor taken = embedding(index, table);
         taken.backward(y);
         return TensorList{taken.detach(), table.grad()};
       }},
  };
  for (const DType dtype : {kBF16, kF16, kF32}) {
    const Tensor x = integers({rows, columns}, dtype, 3), y = integers({rows, columns}, dtype, 3),
                 row = integers({columns}, dtype, 3);
    for (const int64_t offset : {int64_t{1}, int64_t{2}, int64_t{5}}) {
      const auto moved = [&](const Tensor& source) {
        const Tensor buffer = empty({source.numel() + offset}, {.dtype = dtype, .device = kGpu});
        const Tensor at = buffer.narrow(0, offset, source.numel()).view(source.shape());
        copy_(at, source);
        return at;
      };
      for (const auto& [name, op] : ops) {
        const std::string what = std::string(name) + " of " + std::string(name_of(dtype)) +
                                 " from element " + std::to_string(offset);
        SCOPED_TRACE(what);
        const TensorList expected = op(x, y, row), got = op(moved(x), moved(y), moved(row));
        for (size_t i = 0; i < got.size(); ++i) {
          // Sums may be added up in another order there.
          const Tensor value = f64_of(expected[i]);
          const Tensor bound = add(mul(abs(value), epsilon_of(got[i].dtype())),
                                   full({1}, 0x1p-18 * std::sqrt(static_cast<double>(rows)),
                                        {.dtype = kF64, .device = kGpu}));
          expect_within(got[i], value, bound, what + ", result " + std::to_string(i));
        }
      }
    }
  }
}

// ---- None and one ------------------------------------------------------------------------------

// On the GPU what it is on the CPU, in f64, so that no sum differs.
TEST(ShapesNoneAndOne, AreThoseOfTheCpu) {
  using Call = std::function<Tensor(const Device& device)>;
  const auto on = [](const Shape& shape, const Device& device) {
    return full(shape, 0.5, {.dtype = kF64, .device = device});
  };
  const std::pair<const char*, Call> calls[] = {
      {"matmul of no rows",
       [&](const Device& d) {
         return matmul(on({0, 4}, d), on({4, 3}, d));
       }},
      {"matmul of no depth",
       [&](const Device& d) {
         return matmul(on({2, 0}, d), on({0, 3}, d));
       }},
      {"matmul of ones",
       [&](const Device& d) {
         return matmul(on({1, 1}, d), on({1, 1}, d));
       }},
      {"linear of no rows",
       [&](const Device& d) {
         return linear(on({0, 4}, d), on({3, 4}, d), on({3}, d));
       }},
      {"linear of no depth",
       [&](const Device& d) {
         return linear(on({2, 0}, d), on({3, 0}, d), on({3}, d));
       }},
      {"no batches",
       [&](const Device& d) {
         return bmm(on({0, 2, 3}, d), on({0, 3, 2}, d));
       }},
      {"sum of none",
       [&](const Device& d) {
         return sum(on({0, 3}, d));
       }},
      {"sums of none",
       [&](const Device& d) {
         return sum(on({0, 3}, d), {0});
       }},
      {"no sums",
       [&](const Device& d) {
         return sum(on({0, 3}, d), {1});
       }},
      {"softmax of none",
       [&](const Device& d) {
         return softmax(on({0, 5}, d), 1);
       }},
      {"softmax of one",
       [&](const Device& d) {
         return softmax(on({3, 1}, d), 1);
       }},
      {"layer_norm of no rows",
       [&](const Device& d) {
         return layer_norm(on({0, 4}, d), {4}, on({4}, d), on({4}, d));
       }},
      {"layer_norm of one",
       [&](const Device& d) {
         return layer_norm(on({2, 1}, d), {1}, on({1}, d), on({1}, d));
       }},
      {"cat with none",
       [&](const Device& d) {
         return cat(TensorList{on({0, 2}, d), on({1, 2}, d)});
       }},
      {"add of none", [&](const Device& d) { return add(on({0}, d), on({1}, d)); }},
      {"embedding of none",
       [&](const Device& d) {
         const Tensor table = on({5, 3}, d).detach().set_requires_grad();
         embedding(zeros({0}, {.dtype = kI64, .device = d}), table).sum().backward();
         return table.grad();
       }},
      {"attention of one",
       [&](const Device& d) {
         return scaled_dot_product_attention(on({1, 1, 1, 8}, d), on({1, 1, 1, 8}, d),
                                             on({1, 1, 1, 8}, d));
       }},
      {"cross_entropy of one class",
       [&](const Device& d) {
         return cross_entropy(on({2, 1}, d), zeros({2}, {.dtype = kI64, .device = d}));
       }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    const Tensor got = call(kGpu), expected = call(kCpu);
    ASSERT_TRUE(got.device().is_cuda());
    ASSERT_EQ(got.shape(), expected.shape());
    const std::vector<double> a = got.to_vector(), b = expected.to_vector();
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 0x1p-48) << i;
  }
}

}  // namespace
}  // namespace tessera::gpu_shapes
