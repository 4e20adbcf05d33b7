// Every public op. Names, argument order, defaults and values are those of torch and
// torch.nn.functional; each block in ops/*.cpp holds record, forward and backward.
//
// Conventions. x: any shape unless said. Shapes in comments: [..., C]. `dims` empty means all
// dimensions. Optional tensors are passed as Tensor() when absent. Binary ops broadcast and promote
// as torch does (a Scalar is weak). An op with a trailing underscore writes its first argument and
// returns it. Errors: ShapeError, DTypeError, DeviceError, IndexError, ValueError, before any work.
// Accumulation is f32 for f16 and bf16, f64 for f64; reductions have a fixed order.
#pragma once

#include <concepts>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// ---- Creation (ops/creation.cpp) ---------------------------------------------------------------
// Random ones draw the next stream of the context unless one is given (see core/random.h).

[[nodiscard]] Tensor empty(const Shape& shape, const TensorOptions& options = {});
[[nodiscard]] Tensor zeros(const Shape& shape, const TensorOptions& options = {});
[[nodiscard]] Tensor ones(const Shape& shape, const TensorOptions& options = {});
[[nodiscard]] Tensor full(const Shape& shape, const Scalar& value,
                          const TensorOptions& options = {});
[[nodiscard]] Tensor empty_like(const Tensor& x);
[[nodiscard]] Tensor zeros_like(const Tensor& x);
[[nodiscard]] Tensor ones_like(const Tensor& x);
[[nodiscard]] Tensor full_like(const Tensor& x, const Scalar& value);
[[nodiscard]] Tensor rand_like(const Tensor& x);
[[nodiscard]] Tensor randn_like(const Tensor& x);
[[nodiscard]] Tensor empty_like(const Tensor& x, DType dtype);
[[nodiscard]] Tensor zeros_like(const Tensor& x, DType dtype);
[[nodiscard]] Tensor ones_like(const Tensor& x, DType dtype);
[[nodiscard]] Tensor full_like(const Tensor& x, const Scalar& value, DType dtype);
[[nodiscard]] Tensor rand_like(const Tensor& x, DType dtype);
[[nodiscard]] Tensor randn_like(const Tensor& x, DType dtype);
// [start, end) in steps; i64 unless a bound is floating or options say otherwise.
[[nodiscard]] Tensor arange(const Scalar& start, const Scalar& end, const Scalar& step = 1,
                            std::optional<DType> dtype = {}, const Device& device = kCpu);
[[nodiscard]] Tensor arange(const Scalar& end);
[[nodiscard]] Tensor linspace(double start, double end, int64_t steps,
                              const TensorOptions& options = {});
[[nodiscard]] Tensor eye(int64_t rows, std::optional<int64_t> columns = {},
                         const TensorOptions& options = {});
[[nodiscard]] Tensor rand(const Shape& shape, const TensorOptions& options = {},
                          std::optional<RandomStream> stream = {});  // [0, 1)
[[nodiscard]] Tensor randn(const Shape& shape, const TensorOptions& options = {},
                           std::optional<RandomStream> stream = {});
[[nodiscard]] Tensor randint(int64_t low, int64_t high, const Shape& shape, DType dtype = kI64,
                             std::optional<RandomStream> stream = {});  // [low, high)
[[nodiscard]] Tensor randperm(int64_t size, std::optional<RandomStream> stream = {});
// Short options: zeros({2, 3}, kF64), ones({2, 3}, cuda()).
template <class T>
concept DTypeOrDevice = std::same_as<T, DType> || std::same_as<T, Device>;
inline TensorOptions options_of(DType dtype) { return {.dtype = dtype}; }
inline TensorOptions options_of(const Device& device) { return {.device = device}; }
// clang-format off
[[nodiscard]] Tensor empty(const Shape& shape, DTypeOrDevice auto option) { return empty(shape, options_of(option)); }
[[nodiscard]] Tensor zeros(const Shape& shape, DTypeOrDevice auto option) { return zeros(shape, options_of(option)); }
[[nodiscard]] Tensor ones(const Shape& shape, DTypeOrDevice auto option) { return ones(shape, options_of(option)); }
[[nodiscard]] Tensor full(const Shape& shape, const Scalar& value, DTypeOrDevice auto option) { return full(shape, value, options_of(option)); }
[[nodiscard]] Tensor rand(const Shape& shape, DTypeOrDevice auto option, std::optional<RandomStream> stream = {}) { return rand(shape, options_of(option), stream); }
[[nodiscard]] Tensor randn(const Shape& shape, DTypeOrDevice auto option, std::optional<RandomStream> stream = {}) { return randn(shape, options_of(option), stream); }
[[nodiscard]] Tensor linspace(double start, double end, int64_t steps, DTypeOrDevice auto option) { return linspace(start, end, steps, options_of(option)); }
[[nodiscard]] Tensor eye(int64_t rows, DTypeOrDevice auto option) { return eye(rows, std::nullopt, options_of(option)); }
// clang-format on
// In place, for initialization.
const Tensor& uniform_(const Tensor& x, double low, double high,
                       std::optional<RandomStream> stream = {});
const Tensor& normal_(const Tensor& x, double mean, double std,
                      std::optional<RandomStream> stream = {});
const Tensor& bernoulli_(const Tensor& x, double p, std::optional<RandomStream> stream = {});
// x: probabilities >= 0, [rows, n] or [n]. Returns i64 indices [rows, count] or [count].
[[nodiscard]] Tensor multinomial(const Tensor& x, int64_t count, bool replacement = false,
                                 std::optional<RandomStream> stream = {});

// ---- Elementwise, one input (ops/elementwise.cpp) ----------------------------------------------
// Transcendental ops of integers and bool return f32; others keep the dtype, or refuse it.

[[nodiscard]] Tensor to(const Tensor& x, DType dtype);  // the same tensor if nothing changes
[[nodiscard]] Tensor to(const Tensor& x, const Device& device);
[[nodiscard]] Tensor clone(const Tensor& x);       // keeps the order of dimensions
[[nodiscard]] Tensor contiguous(const Tensor& x);  // the same tensor where it already is
const Tensor& copy_(const Tensor& target, const Tensor& source);  // broadcasts, converts
const Tensor& fill_(const Tensor& x, const Scalar& value);
const Tensor& zero_(const Tensor& x);

[[nodiscard]] Tensor neg(const Tensor& x);
[[nodiscard]] Tensor abs(const Tensor& x);
[[nodiscard]] Tensor exp(const Tensor& x);
[[nodiscard]] Tensor expm1(const Tensor& x);
[[nodiscard]] Tensor log(const Tensor& x);
[[nodiscard]] Tensor log1p(const Tensor& x);
[[nodiscard]] Tensor log2(const Tensor& x);
[[nodiscard]] Tensor log10(const Tensor& x);
[[nodiscard]] Tensor sqrt(const Tensor& x);
[[nodiscard]] Tensor rsqrt(const Tensor& x);
[[nodiscard]] Tensor reciprocal(const Tensor& x);
[[nodiscard]] Tensor square(const Tensor& x);
[[nodiscard]] Tensor sin(const Tensor& x);
[[nodiscard]] Tensor cos(const Tensor& x);
[[nodiscard]] Tensor tan(const Tensor& x);
[[nodiscard]] Tensor tanh(const Tensor& x);
[[nodiscard]] Tensor sigmoid(const Tensor& x);
[[nodiscard]] Tensor erf(const Tensor& x);
[[nodiscard]] Tensor erfinv(const Tensor& x);
[[nodiscard]] Tensor lgamma(const Tensor& x);                // log |gamma(x)|
[[nodiscard]] Tensor digamma(const Tensor& x);               // its derivative
[[nodiscard]] Tensor polygamma(int64_t n, const Tensor& x);  // digamma's derivative of order n >= 0
[[nodiscard]] Tensor sign(const Tensor& x);
[[nodiscard]] Tensor floor(const Tensor& x);
[[nodiscard]] Tensor ceil(const Tensor& x);
[[nodiscard]] Tensor trunc(const Tensor& x);
[[nodiscard]] Tensor round(const Tensor& x);  // half to even
[[nodiscard]] Tensor clamp(const Tensor& x, std::optional<Scalar> min,
                           std::optional<Scalar> max = {});
// Limits as tensors (either may be absent); where x meets a limit, both get half the gradient.
[[nodiscard]] Tensor clamp(const Tensor& x, const Tensor& min, const Tensor& max);
[[nodiscard]] Tensor nan_to_num(const Tensor& x, double nan = 0, std::optional<double> posinf = {},
                                std::optional<double> neginf = {});
[[nodiscard]] Tensor isnan(const Tensor& x);     // bool
[[nodiscard]] Tensor isinf(const Tensor& x);     // bool
[[nodiscard]] Tensor isfinite(const Tensor& x);  // bool
[[nodiscard]] Tensor logical_not(const Tensor& x);
[[nodiscard]] Tensor bitwise_not(const Tensor& x);  // integers; logical not for bool

// ---- Elementwise, two and three inputs (ops/elementwise.cpp) -----------------------------------
// Integers divided by zero (floor_divide, remainder, fmod) are a ValueError.

[[nodiscard]] Tensor add(const Tensor& a, const Tensor& b,
                         const Scalar& alpha = 1);  // a + alpha * b
[[nodiscard]] Tensor sub(const Tensor& a, const Tensor& b, const Scalar& alpha = 1);
[[nodiscard]] Tensor mul(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor div(const Tensor& a, const Tensor& b);  // integers give f32
[[nodiscard]] Tensor floor_divide(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor remainder(const Tensor& a, const Tensor& b);  // Python's %, sign of b
[[nodiscard]] Tensor fmod(const Tensor& a, const Tensor& b);       // C's %, sign of a
[[nodiscard]] Tensor atan2(const Tensor& a, const Tensor& b);      // the angle of (b, a)
[[nodiscard]] Tensor pow(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor maximum(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor minimum(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor eq(const Tensor& a, const Tensor& b);  // comparisons give bool
[[nodiscard]] Tensor ne(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor lt(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor le(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor gt(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor ge(const Tensor& a, const Tensor& b);
// a == b, or finite and |a - b| <= atol + rtol |b|; NaN is close to NaN where equal_nan. One dtype.
[[nodiscard]] Tensor isclose(const Tensor& a, const Tensor& b, double rtol = 1e-5,
                             double atol = 1e-8, bool equal_nan = false);
bool allclose(const Tensor& a, const Tensor& b, double rtol = 1e-5, double atol = 1e-8,
              bool equal_nan = false);
[[nodiscard]] Tensor logical_and(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor logical_or(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor logical_xor(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor bitwise_and(const Tensor& a, const Tensor& b);  // bitwise: integers and bool
[[nodiscard]] Tensor bitwise_or(const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor bitwise_xor(const Tensor& a, const Tensor& b);

[[nodiscard]] Tensor add(const Tensor& a, const Scalar& b, const Scalar& alpha = 1);
[[nodiscard]] Tensor sub(const Tensor& a, const Scalar& b, const Scalar& alpha = 1);
[[nodiscard]] Tensor mul(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor div(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor rsub(const Scalar& a, const Tensor& b);  // a - b
[[nodiscard]] Tensor rdiv(const Scalar& a, const Tensor& b);  // a / b
[[nodiscard]] Tensor floor_divide(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor remainder(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor fmod(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor pow(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor pow(const Scalar& a, const Tensor& b);
[[nodiscard]] Tensor eq(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor ne(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor lt(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor le(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor gt(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor ge(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor bitwise_and(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor bitwise_or(const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor bitwise_xor(const Tensor& a, const Scalar& b);

// x + value * a * b and x + value * a / b.
[[nodiscard]] Tensor addcmul(const Tensor& x, const Tensor& a, const Tensor& b,
                             const Scalar& value = 1);
[[nodiscard]] Tensor addcdiv(const Tensor& x, const Tensor& a, const Tensor& b,
                             const Scalar& value = 1);
[[nodiscard]] Tensor lerp(const Tensor& start, const Tensor& end, const Tensor& weight);
[[nodiscard]] Tensor lerp(const Tensor& start, const Tensor& end, double weight);
// condition: bool.
[[nodiscard]] Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
[[nodiscard]] Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b);
[[nodiscard]] Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b);
[[nodiscard]] Tensor masked_fill(const Tensor& x, const Tensor& mask, const Scalar& value);

const Tensor& add_(const Tensor& a, const Tensor& b, const Scalar& alpha = 1);
const Tensor& sub_(const Tensor& a, const Tensor& b, const Scalar& alpha = 1);
const Tensor& mul_(const Tensor& a, const Tensor& b);
const Tensor& div_(const Tensor& a, const Tensor& b);
const Tensor& add_(const Tensor& a, const Scalar& b);
const Tensor& sub_(const Tensor& a, const Scalar& b);
const Tensor& mul_(const Tensor& a, const Scalar& b);
const Tensor& div_(const Tensor& a, const Scalar& b);
const Tensor& pow_(const Tensor& a, const Scalar& b);
const Tensor& neg_(const Tensor& x);
const Tensor& exp_(const Tensor& x);
const Tensor& sqrt_(const Tensor& x);
const Tensor& tanh_(const Tensor& x);
const Tensor& sigmoid_(const Tensor& x);
const Tensor& relu_(const Tensor& x);
const Tensor& clamp_(const Tensor& x, std::optional<Scalar> min, std::optional<Scalar> max = {});
const Tensor& lerp_(const Tensor& start, const Tensor& end, double weight);
const Tensor& addcmul_(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value = 1);
const Tensor& addcdiv_(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& value = 1);
const Tensor& masked_fill_(const Tensor& x, const Tensor& mask, const Scalar& value);

// clang-format off
[[nodiscard]] inline Tensor operator-(const Tensor& x) { return neg(x); }
[[nodiscard]] inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
[[nodiscard]] inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
[[nodiscard]] inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
[[nodiscard]] inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
[[nodiscard]] inline Tensor operator&(const Tensor& a, const Tensor& b) { return bitwise_and(a, b); }
[[nodiscard]] inline Tensor operator|(const Tensor& a, const Tensor& b) { return bitwise_or(a, b); }
[[nodiscard]] inline Tensor operator^(const Tensor& a, const Tensor& b) { return bitwise_xor(a, b); }
[[nodiscard]] inline Tensor operator~(const Tensor& x) { return bitwise_not(x); }
[[nodiscard]] inline Tensor operator!(const Tensor& x) { return logical_not(x); }
[[nodiscard]] inline Tensor operator&(const Tensor& a, const Scalar& b) { return bitwise_and(a, b); }
[[nodiscard]] inline Tensor operator|(const Tensor& a, const Scalar& b) { return bitwise_or(a, b); }
[[nodiscard]] inline Tensor operator^(const Tensor& a, const Scalar& b) { return bitwise_xor(a, b); }
[[nodiscard]] inline Tensor operator&(const Scalar& a, const Tensor& b) { return bitwise_and(b, a); }
[[nodiscard]] inline Tensor operator|(const Scalar& a, const Tensor& b) { return bitwise_or(b, a); }
[[nodiscard]] inline Tensor operator^(const Scalar& a, const Tensor& b) { return bitwise_xor(b, a); }
[[nodiscard]] inline Tensor operator+(const Tensor& a, const Scalar& b) { return add(a, b); }
[[nodiscard]] inline Tensor operator-(const Tensor& a, const Scalar& b) { return sub(a, b); }
[[nodiscard]] inline Tensor operator*(const Tensor& a, const Scalar& b) { return mul(a, b); }
[[nodiscard]] inline Tensor operator/(const Tensor& a, const Scalar& b) { return div(a, b); }
[[nodiscard]] inline Tensor operator+(const Scalar& a, const Tensor& b) { return add(b, a); }
[[nodiscard]] inline Tensor operator-(const Scalar& a, const Tensor& b) { return rsub(a, b); }
[[nodiscard]] inline Tensor operator*(const Scalar& a, const Tensor& b) { return mul(b, a); }
[[nodiscard]] inline Tensor operator/(const Scalar& a, const Tensor& b) { return rdiv(a, b); }
// Python's %: the remainder has the divisor's sign.
[[nodiscard]] inline Tensor operator%(const Tensor& a, const Tensor& b) { return remainder(a, b); }
[[nodiscard]] inline Tensor operator%(const Tensor& a, const Scalar& b) { return remainder(a, b); }
inline const Tensor& operator%=(const Tensor& a, const Tensor& b) { return a.remainder_(b); }
inline const Tensor& operator%=(const Tensor& a, const Scalar& b) { return a.remainder_(b); }
inline const Tensor& operator+=(const Tensor& a, const Tensor& b) { return add_(a, b); }
inline const Tensor& operator-=(const Tensor& a, const Tensor& b) { return sub_(a, b); }
inline const Tensor& operator*=(const Tensor& a, const Tensor& b) { return mul_(a, b); }
inline const Tensor& operator/=(const Tensor& a, const Tensor& b) { return div_(a, b); }
inline const Tensor& operator+=(const Tensor& a, const Scalar& b) { return add_(a, b); }
inline const Tensor& operator-=(const Tensor& a, const Scalar& b) { return sub_(a, b); }
inline const Tensor& operator*=(const Tensor& a, const Scalar& b) { return mul_(a, b); }
inline const Tensor& operator/=(const Tensor& a, const Scalar& b) { return div_(a, b); }
inline const Tensor& operator&=(const Tensor& a, const Tensor& b) { return a.bitwise_and_(b); }
inline const Tensor& operator|=(const Tensor& a, const Tensor& b) { return a.bitwise_or_(b); }
inline const Tensor& operator^=(const Tensor& a, const Tensor& b) { return a.bitwise_xor_(b); }
inline const Tensor& operator&=(const Tensor& a, const Scalar& b) { return a.bitwise_and_(b); }
inline const Tensor& operator|=(const Tensor& a, const Scalar& b) { return a.bitwise_or_(b); }
inline const Tensor& operator^=(const Tensor& a, const Scalar& b) { return a.bitwise_xor_(b); }
// Elementwise, as the functions: x == y is a bool tensor, x.is(y) whether both are the same tensor.
[[nodiscard]] inline Tensor operator==(const Tensor& a, const Tensor& b) { return eq(a, b); }
[[nodiscard]] inline Tensor operator==(const Tensor& a, const Scalar& b) { return eq(a, b); }
[[nodiscard]] inline Tensor operator==(const Scalar& a, const Tensor& b) { return eq(b, a); }
[[nodiscard]] inline Tensor operator!=(const Tensor& a, const Tensor& b) { return ne(a, b); }
[[nodiscard]] inline Tensor operator!=(const Tensor& a, const Scalar& b) { return ne(a, b); }
[[nodiscard]] inline Tensor operator!=(const Scalar& a, const Tensor& b) { return ne(b, a); }
[[nodiscard]] inline Tensor operator<(const Tensor& a, const Tensor& b) { return lt(a, b); }
[[nodiscard]] inline Tensor operator<(const Tensor& a, const Scalar& b) { return lt(a, b); }
[[nodiscard]] inline Tensor operator<(const Scalar& a, const Tensor& b) { return gt(b, a); }
[[nodiscard]] inline Tensor operator<=(const Tensor& a, const Tensor& b) { return le(a, b); }
[[nodiscard]] inline Tensor operator<=(const Tensor& a, const Scalar& b) { return le(a, b); }
[[nodiscard]] inline Tensor operator<=(const Scalar& a, const Tensor& b) { return ge(b, a); }
[[nodiscard]] inline Tensor operator>(const Tensor& a, const Tensor& b) { return gt(a, b); }
[[nodiscard]] inline Tensor operator>(const Tensor& a, const Scalar& b) { return gt(a, b); }
[[nodiscard]] inline Tensor operator>(const Scalar& a, const Tensor& b) { return lt(b, a); }
[[nodiscard]] inline Tensor operator>=(const Tensor& a, const Tensor& b) { return ge(a, b); }
[[nodiscard]] inline Tensor operator>=(const Tensor& a, const Scalar& b) { return ge(a, b); }
[[nodiscard]] inline Tensor operator>=(const Scalar& a, const Tensor& b) { return le(b, a); }
// clang-format on

// ---- Activations (ops/activation.cpp) ----------------------------------------------------------
// Floating dtypes; relu takes integers, too.

enum class Gelu { kNone, kTanh };  // erf, or the tanh approximation that GPT-2 uses
[[nodiscard]] Tensor relu(const Tensor& x);
[[nodiscard]] Tensor gelu(const Tensor& x, Gelu approximate = Gelu::kNone);
[[nodiscard]] Tensor silu(const Tensor& x);
[[nodiscard]] Tensor elu(const Tensor& x, double alpha = 1);
[[nodiscard]] Tensor softplus(const Tensor& x, double beta = 1, double threshold = 20);
[[nodiscard]] Tensor leaky_relu(const Tensor& x, double negative_slope = 0.01);
[[nodiscard]] Tensor glu(const Tensor& x, int64_t dim = -1);  // a * sigmoid(b) of the two halves
[[nodiscard]] Tensor selu(const Tensor& x);                   // Klambauer et al. 2017
[[nodiscard]] Tensor mish(const Tensor& x);                   // x tanh(softplus(x)), Misra 2019
[[nodiscard]] Tensor hardswish(const Tensor& x);              // x clamp(x + 3, 0, 6) / 6
// x if it is positive, else weight * x. weight: [1], or [C] for x of [N, C, ...] or [C].
[[nodiscard]] Tensor prelu(const Tensor& x, const Tensor& weight);

// ---- Reductions (ops/reduce.cpp) ---------------------------------------------------------------
// Without elements: sum 0, prod 1, mean NaN, any false, all true; an extremum is an error.

[[nodiscard]] Tensor sum(const Tensor& x, const Shape& dims = {}, bool keepdim = false,
                         std::optional<DType> dtype = {});  // integers and bool give i64
[[nodiscard]] Tensor mean(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
[[nodiscard]] Tensor var(const Tensor& x, const Shape& dims = {}, double correction = 1,
                         bool keepdim = false);
[[nodiscard]] Tensor std(const Tensor& x, const Shape& dims = {}, double correction = 1,
                         bool keepdim = false);
[[nodiscard]] Tensor prod(const Tensor& x);
[[nodiscard]] Tensor prod(const Tensor& x, int64_t dim, bool keepdim = false);
[[nodiscard]] Tensor amax(const Tensor& x, const Shape& dims = {},
                          bool keepdim = false);  // ties share
[[nodiscard]] Tensor amin(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
[[nodiscard]] Tensor max(const Tensor& x);
[[nodiscard]] Tensor min(const Tensor& x);
struct ValuesIndices {
  Tensor values;
  Tensor indices;  // i64
};
[[nodiscard]] ValuesIndices max(const Tensor& x, int64_t dim,
                                bool keepdim = false);  // the first of equals
[[nodiscard]] ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim = false);
[[nodiscard]] Tensor argmax(const Tensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);
[[nodiscard]] Tensor argmin(const Tensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);
// The lower of the two middle elements; NaN if x has one. The gradient goes to all elements that
// equal it, along a dimension to the one at the index.
[[nodiscard]] Tensor median(const Tensor& x);
[[nodiscard]] ValuesIndices median(const Tensor& x, int64_t dim, bool keepdim = false);
// The value below which a fraction q in [0, 1] of the elements lies, between neighbors as
// `interpolation` says; for q [Q] the result is [Q, ...]. q has x's dtype, a floating one; NaN if x
// has one.
enum class Quantile { kLinear, kLower, kHigher, kMidpoint, kNearest };
[[nodiscard]] Tensor quantile(const Tensor& x, double q, std::optional<int64_t> dim = {},
                              bool keepdim = false, Quantile interpolation = Quantile::kLinear);
[[nodiscard]] Tensor quantile(const Tensor& x, const Tensor& q, std::optional<int64_t> dim = {},
                              bool keepdim = false, Quantile interpolation = Quantile::kLinear);
[[nodiscard]] Tensor any(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
[[nodiscard]] Tensor all(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
// How many elements are not 0, i64; NaN counts.
[[nodiscard]] Tensor count_nonzero(const Tensor& x, const Shape& dims = {});
// (sum |x|^p)^(1/p); p may be infinity and 0.
[[nodiscard]] Tensor norm(const Tensor& x, double p = 2, const Shape& dims = {},
                          bool keepdim = false);
[[nodiscard]] Tensor logsumexp(const Tensor& x, const Shape& dims, bool keepdim = false);
[[nodiscard]] Tensor cumsum(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor cumprod(const Tensor& x, int64_t dim);
// Running extrema and their indices: the last of equals.
[[nodiscard]] ValuesIndices cummax(const Tensor& x, int64_t dim);
[[nodiscard]] ValuesIndices cummin(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor softmax(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor log_softmax(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor normalize(const Tensor& x, double p = 2, int64_t dim = 1, double eps = 1e-12);
[[nodiscard]] Tensor cosine_similarity(const Tensor& a, const Tensor& b, int64_t dim = 1,
                                       double eps = 1e-8);
// Sums to `shape`, from which x's was broadcast.
[[nodiscard]] Tensor sum_to(const Tensor& x, const Shape& shape);

// ---- Matrix products (ops/matmul.cpp) ----------------------------------------------------------
// Operands have one dtype, which autocast ensures; f16 and bf16 are accumulated in f32.

[[nodiscard]] Tensor matmul(const Tensor& a,
                            const Tensor& b);  // torch's rules for 1-D, 2-D and batches
[[nodiscard]] Tensor bmm(const Tensor& a, const Tensor& b);    // [B, M, K] x [B, K, N]
[[nodiscard]] Tensor dot(const Tensor& a, const Tensor& b);    // [N], [N]
[[nodiscard]] Tensor outer(const Tensor& a, const Tensor& b);  // [M], [N] -> [M, N]
// x: [..., in]; weight: [out, in]; bias: [out] or absent. x W^T + bias.
[[nodiscard]] Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
// residual + x W^T + bias: on a GPU the product adds the residual and rounds once. residual has the
// result's shape and dtype.
[[nodiscard]] Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const Tensor& residual);
// beta * x + alpha * a b
[[nodiscard]] Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b,
                           const Scalar& beta = 1, const Scalar& alpha = 1);
[[nodiscard]] Tensor einsum(std::string_view equation, const TensorList& operands);
// Sums over the last `dims` dimensions of a and the first of b, or over the listed ones.
[[nodiscard]] Tensor tensordot(const Tensor& a, const Tensor& b, int64_t dims = 2);
[[nodiscard]] Tensor tensordot(const Tensor& a, const Tensor& b, const Shape& dims_a,
                               const Shape& dims_b);
// Distances (sum |a_i - b_j|^p)^(1/p) of rows. a: [..., P, M]; b: [..., R, M]; result [..., P, R].
// p may be 0 and infinity. kAuto: for p = 2 and more than 25 rows it is |a|^2 + |b|^2 - 2 a b, a
// matrix product, which loses digits if rows are close; else differences, in pieces of 4M numbers.
enum class EuclideanProduct { kAuto, kAlways, kNever };
[[nodiscard]] Tensor cdist(const Tensor& a, const Tensor& b, double p = 2,
                           EuclideanProduct product = EuclideanProduct::kAuto);

// ---- Shape (ops/shape.cpp) ---------------------------------------------------------------------
// Views share memory with x; reshape and flatten copy if no view is possible.

[[nodiscard]] Tensor detach(const Tensor& x);
[[nodiscard]] Tensor view(const Tensor& x, const Shape& shape);
[[nodiscard]] Tensor reshape(const Tensor& x, const Shape& shape);  // a view if possible
[[nodiscard]] Tensor flatten(const Tensor& x, int64_t start = 0, int64_t end = -1);
[[nodiscard]] Tensor permute(const Tensor& x, const Shape& dims);
[[nodiscard]] Tensor transpose(const Tensor& x, int64_t dim0, int64_t dim1);
[[nodiscard]] Tensor movedim(const Tensor& x, const Shape& source, const Shape& destination);
[[nodiscard]] Tensor expand(const Tensor& x, const Shape& shape);  // -1 keeps a size
[[nodiscard]] Tensor squeeze(const Tensor& x);
[[nodiscard]] Tensor squeeze(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor unsqueeze(const Tensor& x, int64_t dim);
[[nodiscard]] Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length);
[[nodiscard]] Tensor select(const Tensor& x, int64_t dim, int64_t index);
[[nodiscard]] Tensor slice(const Tensor& x, int64_t dim, std::optional<int64_t> start = {},
                           std::optional<int64_t> end = {},
                           int64_t step = 1);  // Python's x[start:end:step]
[[nodiscard]] Tensor as_strided(const Tensor& x, const Shape& shape, const Shape& strides,
                                int64_t offset);
// torch.Tensor.unfold: all windows x[i * step : i * step + size] of a dimension, with the positions
// inside a window as a new last dimension; a copy. (`unfold` is torch.nn.functional's, below.)
[[nodiscard]] Tensor unfold_dim(const Tensor& x, int64_t dim, int64_t size, int64_t step);
// Coordinates of a grid, one axis for each tensor of 0 or 1 dimensions and one dtype: views. kXy:
// the first two dimensions of the results are exchanged.
enum class Indexing { kIj, kXy };
[[nodiscard]] TensorList meshgrid(const TensorList& tensors, Indexing indexing = Indexing::kIj);
[[nodiscard]] TensorList split(const Tensor& x, int64_t size, int64_t dim = 0);
[[nodiscard]] TensorList split(const Tensor& x, const Shape& sizes, int64_t dim);
[[nodiscard]] TensorList chunk(const Tensor& x, int64_t chunks, int64_t dim = 0);
[[nodiscard]] TensorList unbind(const Tensor& x, int64_t dim = 0);
// Copies.
[[nodiscard]] Tensor cat(const TensorList& tensors, int64_t dim = 0);
[[nodiscard]] Tensor stack(const TensorList& tensors, int64_t dim = 0);
[[nodiscard]] Tensor repeat(const Tensor& x, const Shape& repeats);
[[nodiscard]] Tensor repeat_interleave(const Tensor& x, int64_t repeats,
                                       std::optional<int64_t> dim = {});
[[nodiscard]] Tensor repeat_interleave(const Tensor& x, const Tensor& repeats,
                                       std::optional<int64_t> dim = {});
// A diagonal of dimensions dim1 and dim2 as the last dimension: a view.
[[nodiscard]] Tensor diagonal(const Tensor& x, int64_t offset = 0, int64_t dim1 = 0,
                              int64_t dim2 = 1);
// x's last dimension on a diagonal of new dimensions dim1 and dim2, zeros elsewhere.
[[nodiscard]] Tensor diag_embed(const Tensor& x, int64_t offset = 0, int64_t dim1 = -2,
                                int64_t dim2 = -1);
[[nodiscard]] Tensor flip(const Tensor& x, const Shape& dims);
[[nodiscard]] Tensor roll(const Tensor& x, const Shape& shifts, const Shape& dims = {});
enum class Pad { kConstant, kReflect, kReplicate, kCircular };
// sizes: (left, right) of the last dimension first, as torch.nn.functional.pad. Negative crops.
[[nodiscard]] Tensor pad(const Tensor& x, const Shape& sizes, Pad mode = Pad::kConstant,
                         double value = 0);

// ---- Index (ops/index.cpp) and sort (ops/sort.cpp) ---------------------------------------------
// index: i64 or i32. One outside of its dimension is an IndexError.

[[nodiscard]] Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);
[[nodiscard]] Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
[[nodiscard]] Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index,
                             const Tensor& source);
[[nodiscard]] Tensor scatter(const Tensor& x, int64_t dim, const Tensor& index,
                             const Scalar& value);
[[nodiscard]] Tensor scatter_add(const Tensor& x, int64_t dim, const Tensor& index,
                                 const Tensor& source);
// x[indices...]: one index tensor (i64, or bool mask) a leading dimension, undefined keeps it.
[[nodiscard]] Tensor index(const Tensor& x, const TensorList& indices);
[[nodiscard]] Tensor index_put(const Tensor& x, const TensorList& indices, const Tensor& values,
                               bool accumulate = false);
const Tensor& index_put_(const Tensor& x, const TensorList& indices, const Tensor& values,
                         bool accumulate = false);
// Each element of x that the index names becomes the sum (product...) of the sources assigned to
// it, and of its old value with include_self. Integer means are rounded down. amax and amin: equals
// share the gradient. Cost beyond a scatter_add: prod, amax and amin sort the index.
enum class ScatterReduce : int { kSum, kProd, kMean, kAmax, kAmin };
[[nodiscard]] Tensor scatter_reduce(const Tensor& x, int64_t dim, const Tensor& index,
                                    const Tensor& source, ScatterReduce reduce,
                                    bool include_self = true);
[[nodiscard]] Tensor index_add(const Tensor& x, int64_t dim, const Tensor& index,
                               const Tensor& source);
// x with `value` in the slices that the 1-D index names.
[[nodiscard]] Tensor index_fill(const Tensor& x, int64_t dim, const Tensor& index,
                                const Scalar& value);
[[nodiscard]] Tensor masked_select(const Tensor& x, const Tensor& mask);  // 1-D
[[nodiscard]] Tensor nonzero(const Tensor& x);                            // [count, dims] i64
[[nodiscard]] Tensor tril(const Tensor& x, int64_t diagonal = 0);
[[nodiscard]] Tensor triu(const Tensor& x, int64_t diagonal = 0);
[[nodiscard]] ValuesIndices sort(const Tensor& x, int64_t dim = -1,
                                 bool descending = false);  // stable, NaN last
[[nodiscard]] Tensor argsort(const Tensor& x, int64_t dim = -1, bool descending = false);
// The distinct values in ascending order (whatever `sorted` says), or with `dim` the distinct
// slices along it in lexicographic order, in time of a sort for each of their elements. NaN are
// distinct.
struct UniqueResult {
  Tensor values;
  Tensor inverse;  // i64, index in values of each element of x; undefined by default
  Tensor counts;   // i64, number of occurrences of each value; undefined by default
};
[[nodiscard]] UniqueResult unique(const Tensor& x, bool sorted = true, bool return_inverse = false,
                                  bool return_counts = false, std::optional<int64_t> dim = {});
// The number of elements of the sorted sequence below each value, or not above it with `right`.
// sorted_sequence: [n], or [..., n] for values [..., m]; sorter: its argsort, if it is not sorted
// itself. A NaN comes last. dtype: i64 or i32.
[[nodiscard]] Tensor searchsorted(const Tensor& sorted_sequence, const Tensor& values,
                                  bool right = false, const Tensor& sorter = {},
                                  DType dtype = kI64);
[[nodiscard]] Tensor bucketize(const Tensor& x, const Tensor& boundaries, bool right = false,
                               DType dtype = kI64);  // searchsorted(boundaries, x)
[[nodiscard]] ValuesIndices topk(const Tensor& x, int64_t k, int64_t dim = -1, bool largest = true);
[[nodiscard]] Tensor bincount(const Tensor& x, const Tensor& weights = {}, int64_t minlength = 0);
[[nodiscard]] Tensor one_hot(const Tensor& x, int64_t num_classes = -1);

// ---- Embedding and rotary positions (ops/embedding.cpp) ----------------------------------------
// Rows of a table by index; rotary rotation of pairs of features by position.

// index: any shape, i64 or i32; weight: [V, C]. Result [..., C]. Backward adds rows in index order.
// The row padding_idx gets no gradient.
[[nodiscard]] Tensor embedding(const Tensor& index, const Tensor& weight,
                               std::optional<int64_t> padding_idx = {});
// embedding(index, weight) + other, with weight's dtype and broadcastable to the result: in one
// pass if the rows of `other` repeat, as those of positions do.
[[nodiscard]] Tensor embedding_add(const Tensor& index, const Tensor& weight, const Tensor& other,
                                   std::optional<int64_t> padding_idx = {});
enum class BagMode { kSum, kMean, kMax };
struct EmbeddingBagOptions {
  BagMode mode = BagMode::kMean;
  Tensor per_sample_weights = {};           // in the shape of index, for sums only
  bool include_last_offset = false;         // the last offset is the end of the last bag
  std::optional<int64_t> padding_idx = {};  // this row is in no bag
};
// Sums, means or maxima of rows of weight: [V, C]. index: [bags, n], or [n] with offsets [bags],
// the ascending positions at which bags begin. Result [bags, C]; that of an empty bag is 0. The
// rows are gathered before they are reduced: memory for index.numel() rows. kMax with offsets reads
// these on the host.
[[nodiscard]] Tensor embedding_bag(const Tensor& index, const Tensor& weight,
                                   const Tensor& offsets = {},
                                   const EmbeddingBagOptions& options = {});
// x: [..., T, C], C even; cos, sin: [T, C/2] or broadcastable to [..., T, C/2].
// interleaved false: pairs (i, i + C/2), as GPT-NeoX; true: pairs (2i, 2i + 1).
[[nodiscard]] Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin,
                                      bool interleaved = false);

// ---- Normalization (ops/norm.cpp) --------------------------------------------------------------
// Statistics are f32 (f64 for f64).

// Normalizes the last `normalized_shape.size()` dimensions. weight, bias: normalized_shape or
// absent.
[[nodiscard]] Tensor layer_norm(const Tensor& x, const Shape& normalized_shape,
                                const Tensor& weight = {}, const Tensor& bias = {},
                                double eps = 1e-5);
[[nodiscard]] Tensor rms_norm(const Tensor& x, const Shape& normalized_shape,
                              const Tensor& weight = {}, std::optional<double> eps = {});
[[nodiscard]] Tensor group_norm(const Tensor& x, int64_t num_groups, const Tensor& weight = {},
                                const Tensor& bias = {}, double eps = 1e-5);  // x: [N, C, ...]
// x: [N, C, ...]. Training: batch statistics, and running ones are updated in place where defined.
[[nodiscard]] Tensor batch_norm(const Tensor& x, const Tensor& running_mean,
                                const Tensor& running_var, const Tensor& weight = {},
                                const Tensor& bias = {}, bool training = false,
                                double momentum = 0.1, double eps = 1e-5);
// x: [N, C, ...] with at least one more dimension: normalizes each channel of each sample by
// itself. Running statistics, if defined, are updated in place with use_input_stats and used
// without it.
[[nodiscard]] Tensor instance_norm(const Tensor& x, const Tensor& running_mean = {},
                                   const Tensor& running_var = {}, const Tensor& weight = {},
                                   const Tensor& bias = {}, bool use_input_stats = true,
                                   double momentum = 0.1, double eps = 1e-5);
struct ResidualNorm {
  Tensor residual;    // x + residual
  Tensor normalized;  // layer_norm of it
};
// `s = x + residual; n = layer_norm(s)` in one pass, forward and backward. The result has the wider
// dtype. `drop`: with dropout(x, drop, true, stream) instead of x, in the same pass.
ResidualNorm residual_layer_norm(const Tensor& x, const Tensor& residual,
                                 const Shape& normalized_shape, const Tensor& weight = {},
                                 const Tensor& bias = {}, double eps = 1e-5, double drop = 0,
                                 std::optional<RandomStream> stream = {});
// The same with rms_norm, as in Llama's layers.
ResidualNorm residual_rms_norm(const Tensor& x, const Tensor& residual,
                               const Shape& normalized_shape, const Tensor& weight = {},
                               std::optional<double> eps = {});

// ---- Random masks (ops/random.cpp) -------------------------------------------------------------
// The same random stream gives the same mask.

// Zeroes with probability p and scales the rest by 1 / (1 - p). The mask is not stored: backward
// draws it again.
[[nodiscard]] Tensor dropout(const Tensor& x, double p = 0.5, bool training = true,
                             std::optional<RandomStream> stream = {});

// ---- Losses (ops/loss.cpp) ---------------------------------------------------------------------
// Formulas of f16 and bf16 inputs are calculated in f32.

enum class Reduction { kNone, kMean, kSum };
struct CrossEntropyOptions {
  Tensor weight = {};  // [C]
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::kMean;
  double label_smoothing = 0;
};
// logits: [N, C], [C] or [N, C, d1...]; target: class indices [N], [] or [N, d1...], or
// probabilities in the shape of logits. Statistics and loss are f32 for f16/bf16 inputs, the result
// has the logits' dtype, f32 under autocast. The softmax is not stored.
[[nodiscard]] Tensor cross_entropy(const Tensor& logits, const Tensor& target,
                                   const CrossEntropyOptions& options = {});
// As above for [N, C] and class indices; forward writes the gradient over the logits, unless they
// are needed later. The logits must not be used afterwards.
[[nodiscard]] Tensor cross_entropy_inplace(const Tensor& logits, const Tensor& target,
                                           int64_t ignore_index = -100);
[[nodiscard]] Tensor nll_loss(const Tensor& log_probabilities, const Tensor& target,
                              const CrossEntropyOptions& options = {});
[[nodiscard]] Tensor mse_loss(const Tensor& x, const Tensor& target,
                              Reduction reduction = Reduction::kMean);
[[nodiscard]] Tensor l1_loss(const Tensor& x, const Tensor& target,
                             Reduction reduction = Reduction::kMean);
[[nodiscard]] Tensor smooth_l1_loss(const Tensor& x, const Tensor& target,
                                    Reduction reduction = Reduction::kMean, double beta = 1);
[[nodiscard]] Tensor huber_loss(const Tensor& x, const Tensor& target,
                                Reduction reduction = Reduction::kMean, double delta = 1);
[[nodiscard]] Tensor binary_cross_entropy(const Tensor& x, const Tensor& target,
                                          const Tensor& weight = {},
                                          Reduction reduction = Reduction::kMean);
[[nodiscard]] Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                                      const Tensor& weight = {},
                                                      Reduction reduction = Reduction::kMean,
                                                      const Tensor& pos_weight = {});
enum class KlReduction { kNone, kMean, kSum, kBatchMean };
[[nodiscard]] Tensor kl_div(const Tensor& x, const Tensor& target,
                            KlReduction reduction = KlReduction::kMean, bool log_target = false);
// target: counts. exp(x) - target x, or x - target log(x + eps) if x is the rate instead of its
// logarithm. full: plus Stirling's approximation of log(target!) for target > 1.
[[nodiscard]] Tensor poisson_nll_loss(const Tensor& x, const Tensor& target, bool log_input = true,
                                      bool full = false, double eps = 1e-8,
                                      Reduction reduction = Reduction::kMean);
// (log(v) + (x - target)^2 / v) / 2 with v = max(var, eps), whose gradient is that of var itself,
// as in torch. var: the shape of x, or that without the last dimension, which may also be 1. full:
// plus log(2 pi) / 2. A negative variance is a ValueError, for which the host reads its minimum.
[[nodiscard]] Tensor gaussian_nll_loss(const Tensor& x, const Tensor& target, const Tensor& var,
                                       bool full = false, double eps = 1e-6,
                                       Reduction reduction = Reduction::kMean);
// max(d(anchor, positive) - d(anchor, negative) + margin, 0), where d is the p-norm of the
// difference plus eps over the last dimension. swap: d(positive, negative) if that is smaller
// (Balntas et al. 2016). Inputs broadcast: [..., C].
[[nodiscard]] Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive,
                                         const Tensor& negative, double margin = 1, double p = 2,
                                         double eps = 1e-6, bool swap = false,
                                         Reduction reduction = Reduction::kMean);
// x1, x2: [N, C] or [C]; target: [N] or [] of 1 and -1. 1 - cos for 1, max(cos - margin, 0) for -1.
[[nodiscard]] Tensor cosine_embedding_loss(const Tensor& x1, const Tensor& x2, const Tensor& target,
                                           double margin = 0,
                                           Reduction reduction = Reduction::kMean);
// Connectionist temporal classification (Graves et al. 2006): -log of the probability of the
// targets under all alignments. log_probs: [T, N, C] or [T, C], logarithms of probabilities
// (log_softmax); targets: [N, S], or all targets in a row, [sum of target_lengths]; lengths: i64 or
// i32, [N] or [], read on the host. kMean divides each loss by its target's length first. A target
// without an alignment has an infinite loss; zero_infinity makes loss and gradient 0 then. As in
// torch the gradient is meant for a log_softmax: that of an element is exp(log_prob) minus the
// probability of passing it. Composed of a few ops for each step on [N, 2 S + 1], whose results are
// kept for backward.
[[nodiscard]] Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets,
                              const Tensor& input_lengths, const Tensor& target_lengths,
                              int64_t blank = 0, Reduction reduction = Reduction::kMean,
                              bool zero_infinity = false);

// ---- Convolution and pooling (ops/conv.cpp) ----------------------------------------------------
// For floating dtypes except fp8.

// x: [N, C, L]; weight: [O, C / groups, K]; bias: [O] or absent. One value serves all dimensions.
struct ConvOptions {
  Shape stride = {1};
  Shape padding = {0};
  Shape dilation = {1};
  int64_t groups = 1;
};
[[nodiscard]] Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                            const ConvOptions& options = {});
[[nodiscard]] Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                            const ConvOptions& options = {});
// x: [N, C, D, H, W]. Runs one conv2d of D output planes, whose channels include the kernel's
// depth: x is copied once for each plane of the kernel, and the copy is kept for backward.
[[nodiscard]] Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                            const ConvOptions& options = {});
// Transposed convolution: the gradient of a convolution by its input. weight: [C, O / groups, K];
// the output has (size - 1) stride - 2 padding + dilation (K - 1) + 1 + output_padding elements.
struct ConvTransposeOptions {
  Shape stride = {1};
  Shape padding = {0};
  Shape output_padding = {0};  // less than stride or dilation
  int64_t groups = 1;
  Shape dilation = {1};
};
[[nodiscard]] Tensor conv_transpose1d(const Tensor& x, const Tensor& weight,
                                      const Tensor& bias = {},
                                      const ConvTransposeOptions& options = {});
[[nodiscard]] Tensor conv_transpose2d(const Tensor& x, const Tensor& weight,
                                      const Tensor& bias = {},
                                      const ConvTransposeOptions& options = {});
// x: [N, C, H, W] or [C, H, W] (max_pool1d: [N, C, W] or [C, W]). Empty stride: the kernel size.
// Indices are positions in the plane of H * W; the first of equals, but the last NaN if there is
// one.
[[nodiscard]] Tensor max_pool1d(const Tensor& x, const Shape& kernel_size, const Shape& stride = {},
                                const Shape& padding = {0}, const Shape& dilation = {1},
                                bool ceil_mode = false);
[[nodiscard]] ValuesIndices max_pool1d_with_indices(const Tensor& x, const Shape& kernel_size,
                                                    const Shape& stride = {},
                                                    const Shape& padding = {0},
                                                    const Shape& dilation = {1},
                                                    bool ceil_mode = false);
[[nodiscard]] ValuesIndices max_pool2d_with_indices(const Tensor& x, const Shape& kernel_size,
                                                    const Shape& stride = {},
                                                    const Shape& padding = {0},
                                                    const Shape& dilation = {1},
                                                    bool ceil_mode = false);
[[nodiscard]] Tensor max_pool2d(const Tensor& x, const Shape& kernel_size, const Shape& stride = {},
                                const Shape& padding = {0}, const Shape& dilation = {1},
                                bool ceil_mode = false);
[[nodiscard]] Tensor avg_pool1d(const Tensor& x, const Shape& kernel_size, const Shape& stride = {},
                                const Shape& padding = {0}, bool ceil_mode = false,
                                bool count_include_pad = true);
[[nodiscard]] Tensor avg_pool2d(const Tensor& x, const Shape& kernel_size, const Shape& stride = {},
                                const Shape& padding = {0}, bool ceil_mode = false,
                                bool count_include_pad = true);
[[nodiscard]] Tensor adaptive_avg_pool2d(const Tensor& x, const Shape& output_size);
// Sizes of the spatial dimensions, or factors. kLinear: torch's linear, bilinear and trilinear, by
// the number of those dimensions; with align_corners corners are centers of pixels.
enum class Interpolation { kNearest, kLinear };
[[nodiscard]] Tensor interpolate(const Tensor& x, const Shape& size,
                                 std::span<const double> scale_factor = {},
                                 Interpolation mode = Interpolation::kNearest,
                                 bool align_corners = false);
// Samples x at the points of a grid, whose coordinates range from -1 to 1 over the plane, the last
// dimension's first. x: [N, C, H, W]; grid: [N, OH, OW, 2]; or with a third dimension in both, [N,
// C, D, H, W] and [N, OD, OH, OW, 3]. Returns [N, C, OH, OW].
enum class GridPadding { kZeros, kBorder, kReflection };
[[nodiscard]] Tensor grid_sample(const Tensor& x, const Tensor& grid,
                                 Interpolation mode = Interpolation::kLinear,
                                 GridPadding padding = GridPadding::kZeros,
                                 bool align_corners = false);
// The patches that a convolution reads, as columns. x: [N, C, H, W] or [C, H, W]; result
// [N, C * KH * KW, L]. One value serves both dimensions.
[[nodiscard]] Tensor unfold(const Tensor& x, const Shape& kernel_size, const Shape& dilation = {1},
                            const Shape& padding = {0}, const Shape& stride = {1});
// The transpose of unfold: columns are added up to [N, C, *output_size].
[[nodiscard]] Tensor fold(const Tensor& x, const Shape& output_size, const Shape& kernel_size,
                          const Shape& dilation = {1}, const Shape& padding = {0},
                          const Shape& stride = {1});

// ---- Attention (ops/attention.cpp) -------------------------------------------------------------
// softmax(query key^T * scale + mask) value.

struct AttentionOptions {
  Tensor mask = {};  // bool (true: visible) or additive, broadcastable to [B, H, T, S]
  // i64 or i32 [B], instead of a mask: sample b has keys 0..lengths[b] - 1, at least one; the
  // others are padding, which is hidden and skipped. An IndexError if one is not in [1, S], for
  // lengths on a GPU at its next synchronization.
  Tensor lengths = {};
  // i32 [B, T], instead of a mask, lengths or causal: query t of sample b sees the keys
  // starts[b][t] .. ends[b][t] - 1, and none where these are equal. Without starts keys begin at 0;
  // without ends a query sees no key behind its own place t. What is not seen is skipped, so that
  // packed documents (nn/transformer/documents.h), windows and prefixes cost what their queries
  // see (on a GPU by tiles of 64). An IndexError unless 0 <= start <= end <= S, and start <= t where
  // ends are absent; for bounds on a GPU at its next synchronization.
  Tensor starts = {}, ends = {};
  double dropout = 0;
  bool causal = false;
  std::optional<double> scale = {};  // default 1 / sqrt(E)
  bool enable_gqa = false;           // fewer key and value heads, H a multiple of theirs
  std::optional<RandomStream> stream = {};
};
// query: [B, H, T, E]; key: [B, Hk, S, E]; value: [B, Hk, S, Ev]; any strides. Returns
// [B, H, T, Ev]. Works in tiles: memory beyond inputs and result is [B, H, T] (log of the sums).
[[nodiscard]] Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key,
                                                  const Tensor& value,
                                                  const AttentionOptions& options = {});
// packed: [B, T, 3, H, E], the result of one linear layer. Returns [B, T, H * E].
[[nodiscard]] Tensor packed_attention(const Tensor& packed, const AttentionOptions& options = {});

// ---- Fused (ops/fused.cpp) ---------------------------------------------------------------------
// Values and gradients of the composed form, in fewer passes over memory.

// gelu(linear(x, weight, bias)); keeps the pre-activation for backward.
[[nodiscard]] Tensor linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                 Gelu approximate = Gelu::kTanh);
// linear(linear_gelu(x, weight, bias, approximate), out_weight, out_bias), a transformer's MLP.
// Keeps GELU's input and, on a GPU, its result, which a CPU recomputes in backward. It is one op so
// that a GPU's library can calculate GELU's gradient and that of `bias` within the product that
// goes back through out_weight (core/gemm_options.h). weight: [inner, in]; out_weight: [out,
// inner]; biases may be undefined. A residual of the result's shape and dtype is added, as in
// linear().
[[nodiscard]] Tensor linear_gelu_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                        const Tensor& out_weight, const Tensor& out_bias,
                                        Gelu approximate = Gelu::kTanh,
                                        const Tensor& residual = {});
// cross_entropy(linear(x, weight), target) in chunks of rows: the logits [N, V] are never whole in
// memory, and forward calculates the gradients. x: [N, C]; weight: [V, C]; target: [N]. This form
// has no second derivatives; twice_differentiable takes the composed form, with whole logits.
[[nodiscard]] Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight,
                                          const Tensor& target, int64_t ignore_index = -100,
                                          Reduction reduction = Reduction::kMean,
                                          bool twice_differentiable = false);

}  // namespace tessera
