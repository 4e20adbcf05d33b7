#include <algorithm>
#include <cmath>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>

namespace tessera {

const Op kCdist{.name = "cdist",
                .marks = MarkRule::kAlongDims,
                .autocast = Autocast::kFloat32,
                .reads = {inputs(0, 1), inputs(0, 1)},
                .reads_outputs = outputs(0),
                .flops_per_element = 100};

namespace {

// Sums are f32 for 16-bit numbers.
Tensor widened(const Tensor& x) { return x.dtype() == kF64 ? x : to(x, kF32); }

constexpr int64_t kPiece = 4 << 20;  // differences at once: 16 MiB of f32

// Calls piece(first, count) for rows of a, whose differences from all of b fit into a piece.
template <class Piece>
void for_pieces(const Tensor& a, const Tensor& b, bool whole, Piece piece) {
  const int64_t rows = a.size(1);
  const int64_t each = std::max<int64_t>(a.size(0) * b.size(1) * a.size(2), 1);
  const int64_t step = whole ? rows : std::clamp<int64_t>(kPiece / each, 1, rows);
  for (int64_t first = 0; first < rows; first += step) piece(first, std::min(step, rows - first));
}

Tensor differences(const Tensor& a, const Tensor& b, int64_t first, int64_t count) {
  return sub(unsqueeze(narrow(a, 1, first, count), 2), unsqueeze(b, 1));  // [B, count, R, M]
}

// The root of |a|^2 + |b|^2 - 2 a b.
Tensor distances_by_product(const Tensor& a, const Tensor& b) {
  const Tensor squares = add(sum(square(a), {2}, true), transpose(sum(square(b), {2}, true), 1, 2));
  return sqrt(clamp(add(squares, bmm(a, transpose(b, 1, 2)), -2), 0));
}

Tensor distances(const Tensor& a, const Tensor& b, double p) {
  TensorList pieces;
  for_pieces(a, b, false, [&](int64_t first, int64_t count) {
    pieces.push_back(norm(differences(a, b, first, count), p, {3}));
  });
  return pieces.size() == 1 ? pieces[0] : cat(pieces, 1);
}

// The gradient of the differences; dy and dist: [B, count, R, 1]. torch's, 0 where a distance is.
Tensor difference_gradient(const Tensor& dy, const Tensor& difference, const Tensor& dist,
                           double p) {
  if (p == 1) return mul(dy, sign(difference));
  if (std::isinf(p)) {  // beside a distance that was rounded to 16 bits nothing would be equal
    const Tensor size = abs(difference);
    return mul(mul(dy, sign(difference)), eq(size, amax(size, {3}, true)));
  }
  const Tensor is_zero = eq(dist, 0);
  const Tensor unit = masked_fill(div(difference, masked_fill(dist, is_zero, 1)), is_zero, 0);
  if (p == 2) return mul(dy, unit);
  if (p > 2) return mul(dy, mul(unit, pow(abs(unit), p - 2)));
  const Tensor is_flat = eq(unit, 0);
  const Tensor slope = mul(sign(unit), pow(masked_fill(abs(unit), is_flat, 1), p - 1));
  return mul(dy, slope);
}

TensorList cdist_gradient(const Tensor& dy, const Tensor& a, const Tensor& b, const Tensor& dist,
                          double p, bool product) {
  if (p == 0) return {zeros_like(a), zeros_like(b)};
  if (product) {
    const Tensor is_zero = eq(dist, 0);
    const Tensor w = masked_fill(div(dy, masked_fill(dist, is_zero, 1)), is_zero, 0);
    const Tensor turned = transpose(w, 1, 2);
    return {sub(mul(a, sum(w, {2}, true)), bmm(w, b)),
            sub(mul(b, sum(turned, {2}, true)), bmm(turned, a))};
  }
  TensorList da;
  Tensor db;
  for_pieces(a, b, grad_enabled(), [&](int64_t first, int64_t count) {
    const Tensor gradient = difference_gradient(unsqueeze(narrow(dy, 1, first, count), 3),
                                                differences(a, b, first, count),
                                                unsqueeze(narrow(dist, 1, first, count), 3), p);
    da.push_back(sum(gradient, {2}));
    const Tensor part = sum(gradient, {1});
    db = db.defined() ? add(db, part) : part;
  });
  return {da.size() == 1 ? da[0] : cat(da, 1), neg(db)};
}

}  // namespace

Tensor cdist(const Tensor& given_a, const Tensor& given_b, double p, EuclideanProduct product) {
  check_defined(kCdist, "a", given_a);
  check_defined(kCdist, "b", given_b);
  const Tensor a = detail::autocast_float32(given_a), b = detail::autocast_float32(given_b);
  TS_CHECK_SHAPE(a.dim() >= 2 && b.dim() >= 2 && a.size(-1) == b.size(-1), kCdist,
                 "expects [..., P, M] and [..., R, M]; got ", a, " and ", b);
  TS_CHECK_DTYPE(is_floating(a.dtype()) && !is_fp8(a.dtype()) && a.dtype() == b.dtype(), kCdist,
                 "expects one dtype of f64, f32, f16 and bf16; got ", a, " and ", b);
  TS_CHECK(p >= 0, kCdist, "p must not be negative; got ", p);
  const int64_t P = a.size(-2), R = b.size(-2), M = a.size(-1);
  const Shape batch = broadcast_shapes(a.shape().slice(0, a.dim() - 2),
                                       b.shape().slice(0, b.dim() - 2), kCdist.name);
  const auto matrices = [&](const Tensor& x) {
    Shape shape = batch;
    shape.push_back(x.size(-2));
    shape.push_back(M);
    return reshape(expand(x, shape), {numel_of(batch), x.size(-2), M});
  };
  Shape shape = batch;
  shape.push_back(P);
  shape.push_back(R);
  const bool many = P > 25 || R > 25;
  const bool by_product = p == 2 && (product == EuclideanProduct::kAlways ||
                                     (product == EuclideanProduct::kAuto && many));
  const Tensor dist = differentiable(
      kCdist, {matrices(a), matrices(b)},
      [=](Inputs in) {
        const AutocastGuard off(kBF16, false);  // products are f32 here
        const bool empty = in[0].numel() == 0 || in[1].numel() == 0;
        if (empty) {
          return zeros({in[0].size(0), in[0].size(1), in[1].size(1)},
                       {in[0].dtype(), in[0].device()});
        }
        const Tensor a = widened(in[0]), b = widened(in[1]);
        return to(by_product ? distances_by_product(a, b) : distances(a, b, p), in[0].dtype());
      },
      [=](Grads dy, const Saved& s) -> TensorList {
        const AutocastGuard off(kBF16, false);
        const Tensor a = widened(s.input(0)), b = widened(s.input(1));
        if (a.numel() == 0 || b.numel() == 0) return {zeros_like(a), zeros_like(b)};
        return cdist_gradient(dy[0], a, b, widened(s.output()), p, by_product);
      });
  return reshape(dist, shape);
}

}  // namespace tessera
