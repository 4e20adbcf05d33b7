#include "shapes.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu_shapes {
namespace {

// In pieces that leave room for what they are made of, in f32.
template <class Make>
Tensor filled(const Shape& shape, DType dtype, const Make& make) {
  constexpr int64_t kPiece = int64_t{1} << 28;
  const int64_t count = numel_of(shape);
  if (count <= kPiece) return make(shape).to(dtype);
  const Tensor all = empty({count}, {.dtype = dtype, .device = kGpu});
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t size = std::min(kPiece, count - begin);
    copy_(all.narrow(0, begin, size), make({size}));
  }
  return all.view(shape);
}

}  // namespace

bool small_shapes() {
  static const bool small = gpu::backend_kind() == gpu::BackendKind::kEmulated ||
                            std::getenv("TESSERA_SMALL_SHAPES") != nullptr;
  return small;
}

Tensor normal(const Shape& shape, DType dtype) {
  return filled(shape, dtype, [](const Shape& piece) { return randn(piece, {.device = kGpu}); });
}

Tensor integers(const Shape& shape, DType dtype, int64_t most) {
  return filled(shape, dtype, [&](const Shape& piece) {
    const Tensor x = rand(piece, {.device = kGpu});
    // 24 bits of a number below 1, so that the product may round up to what is not to come
    return clamp(sub(floor(mul(x, 2 * most + 1)), most), -most, most);
  });
}

std::vector<int64_t> sampled_rows(int64_t size) {
  std::set<int64_t> rows;
  for (const int64_t row :
       {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{127}, int64_t{128}, int64_t{129},
        int64_t{255}, int64_t{256}, size - 2, size - 1}) {
    if (row >= 0 && row < size) rows.insert(row);
  }
  uint64_t state = 7;
  for (int64_t tile = 0; tile < size; tile += 128) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const int64_t row = tile + static_cast<int64_t>((state >> 33) % 128);
    if (row < size) rows.insert(row);
  }
  return {rows.begin(), rows.end()};
}

Tensor rounding(const Tensor& y, DType dtype) {
  const double least = dtype == kF16 ? 0x1p-24 : 0;  // others' results are never that small here
  return mul(maximum(mul(abs(y), epsilon_of(dtype)), full({}, least, {y.dtype(), y.device()})),
             0.5 * (1 + 1e-6));
}

Tensor f64_of(const Tensor& x) { return is_fp8(x.dtype()) ? x.to(kF32).to(kF64) : x.to(kF64); }

Tensor rows_of(const Tensor& x, int64_t dim, const std::vector<int64_t>& rows) {
  const Tensor index =
      tensor(std::span<const int64_t>(rows), {static_cast<int64_t>(rows.size())}).to(kGpu);
  if (!is_fp8(x.dtype())) return f64_of(index_select(x, dim, index));
  const Tensor bytes = index_select(raw::reinterpret(x, kU8), dim, index);
  return f64_of(raw::reinterpret(bytes, x.dtype()));
}

void expect_within(const Tensor& got, const Tensor& expected, const Tensor& bound,
                   const std::string& what) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  ASSERT_TRUE(got.device().is_cuda()) << what;
  if (got.numel() == 0) return;
  const Tensor y = f64_of(got);
  // What is not a number is further off than all others.
  const Tensor beyond =
      nan_to_num(sub(abs(sub(y, expected)), bound), std::numeric_limits<double>::infinity());
  const Tensor flat = beyond.reshape({-1});
  const double worst = max(flat).item();
  if (worst <= 0) return;
  const auto at = static_cast<int64_t>(argmax(flat).item<int64_t>());
  const auto number = [&](const Tensor& x) {
    return expand(x, expected.shape()).reshape({-1}).narrow(0, at, 1).item();
  };
  const auto wrong = static_cast<int64_t>(sum(gt(flat, 0)).item<int64_t>());
  ADD_FAILURE() << what << ": " << wrong << " of " << flat.numel()
                << " elements are off; of those compared, of shape " << got.shape() << ", number "
                << at << " is " << number(y) << ", not " << number(expected) << " within "
                << number(bound);
}

void expect_same(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  ASSERT_EQ(got.dtype(), expected.dtype()) << what;
  if (got.numel() == 0) return;
  const auto different = static_cast<int64_t>(sum(ne(got, expected)).item<int64_t>());
  EXPECT_EQ(different, 0) << what << ": elements that differ";
}

}  // namespace tessera::gpu_shapes
