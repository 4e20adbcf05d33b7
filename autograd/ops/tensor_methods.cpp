// The methods that core/tensor/tensor.h declares: thin forwards to ops.h and autograd.h.
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

bool Tensor::requires_grad() const { return tessera::requires_grad(*this); }

const Tensor& Tensor::set_requires_grad(bool value) const {
  TS_CHECK_DTYPE(!value || is_floating(dtype()), "set_requires_grad",
                 "only floating tensors can require grad; got ", *this);
  if (!value && autograd_slot(*this) == nullptr) return *this;
  AutogradSlot& slot = ensure_autograd_slot(*this);
  TS_CHECK_AS(AutogradError, value || !slot.grad_fn, "set_requires_grad",
              "only a leaf can stop requiring grad; use detach() on ", *this);
  if (!slot.grad_fn) slot.requires_grad = value;
  return *this;
}

bool Tensor::is_leaf() const {
  gradient_edge(*this);  // makes the history of a view whose base was written
  const AutogradSlot* slot = autograd_slot(*this);
  return slot == nullptr || !slot->grad_fn;
}

Tensor Tensor::grad() const {
  const AutogradSlot* slot = autograd_slot(*this);
  if (slot == nullptr) return {};
  return slot->retained_grad ? *slot->retained_grad : slot->grad;
}

void Tensor::set_grad(const Tensor& grad) const {
  TS_CHECK_SHAPE(!grad.defined() || grad.shape() == shape(), "set_grad", "the gradient ", grad,
                 " must have the shape of ", *this);
  AutogradSlot& slot = ensure_autograd_slot(*this);
  if (slot.retained_grad) {
    *slot.retained_grad = grad;
  } else {
    slot.grad = grad;
  }
}

namespace {

using HooksOfLeaves = std::unordered_map<const TensorImpl*, std::map<int, std::function<void()>>>;
struct ZeroGradHooks {
  std::shared_ptr<HooksOfLeaves> leaves = std::make_shared<HooksOfLeaves>();
  int next = 0;
};

void call_zero_grad_hooks(const TensorImpl* leaf) {
  const HooksOfLeaves& leaves = *Context::current().slot<ZeroGradHooks>().leaves;
  if (leaves.empty()) return;
  if (const auto hooks = leaves.find(leaf); hooks != leaves.end()) {
    for (const auto& [id, hook] : hooks->second) hook();
  }
}

}  // namespace

HookHandle register_zero_grad_hook(const Tensor& leaf, std::function<void()> hook) {
  auto& known = Context::current().slot<ZeroGradHooks>();
  const int id = known.next++;
  const TensorImpl* const key = leaf.impl();
  (*known.leaves)[key][id] = std::move(hook);
  return HookHandle([weak = std::weak_ptr(known.leaves), key, id] {
    const auto leaves = weak.lock();
    if (!leaves) return;
    const auto hooks = leaves->find(key);
    if (hooks == leaves->end()) return;
    hooks->second.erase(id);
    if (hooks->second.empty()) leaves->erase(hooks);
  });
}

void Tensor::zero_grad(bool set_to_none) const {
  call_zero_grad_hooks(impl());
  AutogradSlot* slot = autograd_slot(*this);
  if (slot == nullptr || !slot->grad.defined()) return;
  if (set_to_none) {
    slot->grad = Tensor();
  } else {
    NoGradGuard no_grad;
    slot->grad = tessera::detach(slot->grad);
    tessera::zero_(raw::alias(slot->grad));  // also where it is a part
  }
}

// For ops that have no kernel in place. Backward reads a copy of what is overwritten.
static Tensor kept(const Tensor& x) {
  return grad_enabled() && x.requires_grad() ? tessera::clone(x) : x;
}
static const Tensor& written(const char* name, const Tensor& x, const Tensor& result) {
  const bool kept = is_floating(x.dtype()) || (!is_floating(result.dtype()) &&
                                               (x.dtype() != kBool || result.dtype() == kBool));
  TS_CHECK_DTYPE(kept, name, "the result is ", result.dtype(), " and cannot be written into ", x,
                 "; convert it with to(dtype) first");
  TS_CHECK_SHAPE(result.shape() == x.shape(), name, "the result has shape ", result.shape(),
                 " and cannot be written into ", x);
  return tessera::copy_(x, result);
}

void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  tessera::backward(*this, gradient, {.retain_graph = retain_graph, .create_graph = create_graph});
}

// clang-format off
const Tensor& Tensor::requires_grad_(bool value) const { return set_requires_grad(value); }
void Tensor::retain_grad() const { tessera::retain_grad(*this); }
Tensor Tensor::type_as(const Tensor& other) const { return to(other.device()).to(other.dtype()); }
Tensor Tensor::cpu() const { return to(kCpu); }
Tensor Tensor::cuda(int index) const { return to(tessera::cuda(index)); }
Tensor Tensor::half() const { return to(kF16); }
Tensor Tensor::bfloat16() const { return to(kBF16); }
Tensor Tensor::new_empty(const Shape& shape) const { return tessera::empty(shape, {dtype(), device()}); }
Tensor Tensor::new_zeros(const Shape& shape) const { return tessera::zeros(shape, {dtype(), device()}); }
Tensor Tensor::new_ones(const Shape& shape) const { return tessera::ones(shape, {dtype(), device()}); }
Tensor Tensor::new_full(const Shape& shape, const Scalar& value) const { return tessera::full(shape, value, {dtype(), device()}); }
Tensor Tensor::view_as(const Tensor& other) const { return tessera::view(*this, other.shape()); }
Tensor Tensor::reshape_as(const Tensor& other) const { return tessera::reshape(*this, other.shape()); }
Tensor Tensor::expand_as(const Tensor& other) const { return tessera::expand(*this, other.shape()); }
Tensor Tensor::t() const {
  TS_CHECK_SHAPE(dim() <= 2, "t", "expects at most 2 dimensions; got ", *this, "; use transpose");
  return dim() < 2 ? *this : tessera::transpose(*this, 0, 1);
}
Tensor Tensor::mT() const { return tessera::transpose(*this, -2, -1); }
Tensor Tensor::unfold(int64_t dim, int64_t size, int64_t step) const { return tessera::unfold_dim(*this, dim, size, step); }
Tensor Tensor::polygamma(int64_t n) const { return tessera::polygamma(n, *this); }
Tensor Tensor::where(const Tensor& condition, const Tensor& other) const { return tessera::where(condition, *this, other); }
Tensor Tensor::where(const Tensor& condition, const Scalar& other) const { return tessera::where(condition, *this, other); }
Tensor Tensor::mm(const Tensor& other) const {
  TS_CHECK_SHAPE(dim() == 2 && other.dim() == 2, "mm", "takes two matrices; got ", *this, " and ", other, "; use matmul");
  return tessera::matmul(*this, other);
}
Tensor Tensor::mv(const Tensor& other) const {
  TS_CHECK_SHAPE(dim() == 2 && other.dim() == 1, "mv", "takes a matrix and a vector; got ", *this, " and ", other, "; use matmul");
  return tessera::matmul(*this, other);
}
Tensor::operator bool() const {
  TS_CHECK_SHAPE(numel() == 1, "bool", "one element is true or false; got ", *this, "; use any() or all()");
  return item<double>() != 0;
}

Tensor Tensor::detach() const { return tessera::detach(*this); }
Tensor Tensor::clone() const { return tessera::clone(*this); }
Tensor Tensor::contiguous() const { return tessera::contiguous(*this); }
Tensor Tensor::to(DType dtype) const { return tessera::to(*this, dtype); }
Tensor Tensor::to(const Device& device) const { return tessera::to(*this, device); }

Tensor Tensor::view(const Shape& shape) const { return tessera::view(*this, shape); }
Tensor Tensor::reshape(const Shape& shape) const { return tessera::reshape(*this, shape); }
Tensor Tensor::permute(const Shape& dims) const { return tessera::permute(*this, dims); }
Tensor Tensor::expand(const Shape& shape) const { return tessera::expand(*this, shape); }
Tensor Tensor::repeat(const Shape& repeats) const { return tessera::repeat(*this, repeats); }
Tensor Tensor::flatten(int64_t start, int64_t end) const { return tessera::flatten(*this, start, end); }
Tensor Tensor::transpose(int64_t dim0, int64_t dim1) const { return tessera::transpose(*this, dim0, dim1); }
Tensor Tensor::movedim(const Shape& source, const Shape& destination) const { return tessera::movedim(*this, source, destination); }
Tensor Tensor::squeeze() const { return tessera::squeeze(*this); }
Tensor Tensor::squeeze(int64_t dim) const { return tessera::squeeze(*this, dim); }
Tensor Tensor::unsqueeze(int64_t dim) const { return tessera::unsqueeze(*this, dim); }
Tensor Tensor::narrow(int64_t dim, int64_t start, int64_t length) const { return tessera::narrow(*this, dim, start, length); }
Tensor Tensor::select(int64_t dim, int64_t index) const { return tessera::select(*this, dim, index); }
Tensor Tensor::slice(int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end, int64_t step) const { return tessera::slice(*this, dim, start, end, step); }
Tensor Tensor::as_strided(const Shape& shape, const Shape& strides, int64_t offset) const { return tessera::as_strided(*this, shape, strides, offset); }
std::vector<Tensor> Tensor::split(int64_t size, int64_t dim) const { return tessera::split(*this, size, dim); }
std::vector<Tensor> Tensor::split(const Shape& sizes, int64_t dim) const { return tessera::split(*this, sizes, dim); }
std::vector<Tensor> Tensor::chunk(int64_t chunks, int64_t dim) const { return tessera::chunk(*this, chunks, dim); }
std::vector<Tensor> Tensor::unbind(int64_t dim) const { return tessera::unbind(*this, dim); }
Tensor Tensor::repeat_interleave(int64_t repeats, std::optional<int64_t> dim) const { return tessera::repeat_interleave(*this, repeats, dim); }
Tensor Tensor::repeat_interleave(const Tensor& repeats, std::optional<int64_t> dim) const { return tessera::repeat_interleave(*this, repeats, dim); }
Tensor Tensor::diagonal(int64_t offset, int64_t dim1, int64_t dim2) const { return tessera::diagonal(*this, offset, dim1, dim2); }
Tensor Tensor::diag_embed(int64_t offset, int64_t dim1, int64_t dim2) const { return tessera::diag_embed(*this, offset, dim1, dim2); }
Tensor Tensor::flip(const Shape& dims) const { return tessera::flip(*this, dims); }
Tensor Tensor::roll(const Shape& shifts, const Shape& dims) const { return tessera::roll(*this, shifts, dims); }
Tensor Tensor::tril(int64_t diagonal) const { return tessera::tril(*this, diagonal); }
Tensor Tensor::triu(int64_t diagonal) const { return tessera::triu(*this, diagonal); }

Tensor Tensor::sum(const Shape& dims, bool keepdim, std::optional<DType> dtype) const { return tessera::sum(*this, dims, keepdim, dtype); }
Tensor Tensor::mean(const Shape& dims, bool keepdim) const { return tessera::mean(*this, dims, keepdim); }
Tensor Tensor::var(const Shape& dims, double correction, bool keepdim) const { return tessera::var(*this, dims, correction, keepdim); }
Tensor Tensor::std(const Shape& dims, double correction, bool keepdim) const { return tessera::std(*this, dims, correction, keepdim); }
Tensor Tensor::prod() const { return tessera::prod(*this); }
Tensor Tensor::prod(int64_t dim, bool keepdim) const { return tessera::prod(*this, dim, keepdim); }
Tensor Tensor::amax(const Shape& dims, bool keepdim) const { return tessera::amax(*this, dims, keepdim); }
Tensor Tensor::amin(const Shape& dims, bool keepdim) const { return tessera::amin(*this, dims, keepdim); }
Tensor Tensor::max() const { return tessera::max(*this); }
Tensor Tensor::min() const { return tessera::min(*this); }
ValuesIndices Tensor::max(int64_t dim, bool keepdim) const { return tessera::max(*this, dim, keepdim); }
ValuesIndices Tensor::min(int64_t dim, bool keepdim) const { return tessera::min(*this, dim, keepdim); }
Tensor Tensor::argmax(std::optional<int64_t> dim, bool keepdim) const { return tessera::argmax(*this, dim, keepdim); }
Tensor Tensor::argmin(std::optional<int64_t> dim, bool keepdim) const { return tessera::argmin(*this, dim, keepdim); }
Tensor Tensor::median() const { return tessera::median(*this); }
ValuesIndices Tensor::median(int64_t dim, bool keepdim) const { return tessera::median(*this, dim, keepdim); }
Tensor Tensor::quantile(double q, std::optional<int64_t> dim, bool keepdim) const { return tessera::quantile(*this, q, dim, keepdim); }
Tensor Tensor::quantile(const Tensor& q, std::optional<int64_t> dim, bool keepdim) const { return tessera::quantile(*this, q, dim, keepdim); }
Tensor Tensor::any(const Shape& dims, bool keepdim) const { return tessera::any(*this, dims, keepdim); }
Tensor Tensor::all(const Shape& dims, bool keepdim) const { return tessera::all(*this, dims, keepdim); }
Tensor Tensor::norm(double p, const Shape& dims, bool keepdim) const { return tessera::norm(*this, p, dims, keepdim); }
Tensor Tensor::count_nonzero(const Shape& dims) const { return tessera::count_nonzero(*this, dims); }
Tensor Tensor::logsumexp(const Shape& dims, bool keepdim) const { return tessera::logsumexp(*this, dims, keepdim); }
Tensor Tensor::cumsum(int64_t dim) const { return tessera::cumsum(*this, dim); }
Tensor Tensor::cumprod(int64_t dim) const { return tessera::cumprod(*this, dim); }
ValuesIndices Tensor::cummax(int64_t dim) const { return tessera::cummax(*this, dim); }
ValuesIndices Tensor::cummin(int64_t dim) const { return tessera::cummin(*this, dim); }
Tensor Tensor::softmax(int64_t dim) const { return tessera::softmax(*this, dim); }
Tensor Tensor::log_softmax(int64_t dim) const { return tessera::log_softmax(*this, dim); }

Tensor Tensor::neg() const { return tessera::neg(*this); }
Tensor Tensor::abs() const { return tessera::abs(*this); }
Tensor Tensor::exp() const { return tessera::exp(*this); }
Tensor Tensor::expm1() const { return tessera::expm1(*this); }
Tensor Tensor::log() const { return tessera::log(*this); }
Tensor Tensor::log1p() const { return tessera::log1p(*this); }
Tensor Tensor::log2() const { return tessera::log2(*this); }
Tensor Tensor::log10() const { return tessera::log10(*this); }
Tensor Tensor::sqrt() const { return tessera::sqrt(*this); }
Tensor Tensor::rsqrt() const { return tessera::rsqrt(*this); }
Tensor Tensor::reciprocal() const { return tessera::reciprocal(*this); }
Tensor Tensor::square() const { return tessera::square(*this); }
Tensor Tensor::sin() const { return tessera::sin(*this); }
Tensor Tensor::cos() const { return tessera::cos(*this); }
Tensor Tensor::tan() const { return tessera::tan(*this); }
Tensor Tensor::tanh() const { return tessera::tanh(*this); }
Tensor Tensor::sigmoid() const { return tessera::sigmoid(*this); }
Tensor Tensor::relu() const { return tessera::relu(*this); }
Tensor Tensor::prelu(const Tensor& weight) const { return tessera::prelu(*this, weight); }
Tensor Tensor::erf() const { return tessera::erf(*this); }
Tensor Tensor::erfinv() const { return tessera::erfinv(*this); }
Tensor Tensor::lgamma() const { return tessera::lgamma(*this); }
Tensor Tensor::digamma() const { return tessera::digamma(*this); }
Tensor Tensor::sign() const { return tessera::sign(*this); }
Tensor Tensor::floor() const { return tessera::floor(*this); }
Tensor Tensor::ceil() const { return tessera::ceil(*this); }
Tensor Tensor::trunc() const { return tessera::trunc(*this); }
Tensor Tensor::round() const { return tessera::round(*this); }
Tensor Tensor::clamp(std::optional<Scalar> min, std::optional<Scalar> max) const { return tessera::clamp(*this, min, max); }
Tensor Tensor::clamp(const Tensor& min, const Tensor& max) const { return tessera::clamp(*this, min, max); }
Tensor Tensor::nan_to_num(double nan, std::optional<double> posinf, std::optional<double> neginf) const { return tessera::nan_to_num(*this, nan, posinf, neginf); }
Tensor Tensor::isnan() const { return tessera::isnan(*this); }
Tensor Tensor::isinf() const { return tessera::isinf(*this); }
Tensor Tensor::isfinite() const { return tessera::isfinite(*this); }
Tensor Tensor::logical_not() const { return tessera::logical_not(*this); }
Tensor Tensor::bitwise_not() const { return tessera::bitwise_not(*this); }

Tensor Tensor::add(const Tensor& other, const Scalar& alpha) const { return tessera::add(*this, other, alpha); }
Tensor Tensor::sub(const Tensor& other, const Scalar& alpha) const { return tessera::sub(*this, other, alpha); }
Tensor Tensor::mul(const Tensor& other) const { return tessera::mul(*this, other); }
Tensor Tensor::div(const Tensor& other) const { return tessera::div(*this, other); }
Tensor Tensor::floor_divide(const Tensor& other) const { return tessera::floor_divide(*this, other); }
Tensor Tensor::remainder(const Tensor& other) const { return tessera::remainder(*this, other); }
Tensor Tensor::fmod(const Tensor& other) const { return tessera::fmod(*this, other); }
Tensor Tensor::atan2(const Tensor& other) const { return tessera::atan2(*this, other); }
Tensor Tensor::pow(const Tensor& exponent) const { return tessera::pow(*this, exponent); }
Tensor Tensor::maximum(const Tensor& other) const { return tessera::maximum(*this, other); }
Tensor Tensor::minimum(const Tensor& other) const { return tessera::minimum(*this, other); }
Tensor Tensor::eq(const Tensor& other) const { return tessera::eq(*this, other); }
Tensor Tensor::ne(const Tensor& other) const { return tessera::ne(*this, other); }
Tensor Tensor::lt(const Tensor& other) const { return tessera::lt(*this, other); }
Tensor Tensor::le(const Tensor& other) const { return tessera::le(*this, other); }
Tensor Tensor::gt(const Tensor& other) const { return tessera::gt(*this, other); }
Tensor Tensor::ge(const Tensor& other) const { return tessera::ge(*this, other); }
Tensor Tensor::logical_and(const Tensor& other) const { return tessera::logical_and(*this, other); }
Tensor Tensor::logical_or(const Tensor& other) const { return tessera::logical_or(*this, other); }
Tensor Tensor::logical_xor(const Tensor& other) const { return tessera::logical_xor(*this, other); }
Tensor Tensor::bitwise_and(const Tensor& other) const { return tessera::bitwise_and(*this, other); }
Tensor Tensor::bitwise_or(const Tensor& other) const { return tessera::bitwise_or(*this, other); }
Tensor Tensor::bitwise_xor(const Tensor& other) const { return tessera::bitwise_xor(*this, other); }
Tensor Tensor::add(const Scalar& other, const Scalar& alpha) const { return tessera::add(*this, other, alpha); }
Tensor Tensor::sub(const Scalar& other, const Scalar& alpha) const { return tessera::sub(*this, other, alpha); }
Tensor Tensor::mul(const Scalar& other) const { return tessera::mul(*this, other); }
Tensor Tensor::div(const Scalar& other) const { return tessera::div(*this, other); }
Tensor Tensor::floor_divide(const Scalar& other) const { return tessera::floor_divide(*this, other); }
Tensor Tensor::remainder(const Scalar& other) const { return tessera::remainder(*this, other); }
Tensor Tensor::fmod(const Scalar& other) const { return tessera::fmod(*this, other); }
Tensor Tensor::pow(const Scalar& exponent) const { return tessera::pow(*this, exponent); }
Tensor Tensor::eq(const Scalar& other) const { return tessera::eq(*this, other); }
Tensor Tensor::ne(const Scalar& other) const { return tessera::ne(*this, other); }
Tensor Tensor::lt(const Scalar& other) const { return tessera::lt(*this, other); }
Tensor Tensor::le(const Scalar& other) const { return tessera::le(*this, other); }
Tensor Tensor::gt(const Scalar& other) const { return tessera::gt(*this, other); }
Tensor Tensor::ge(const Scalar& other) const { return tessera::ge(*this, other); }
Tensor Tensor::bitwise_and(const Scalar& other) const { return tessera::bitwise_and(*this, other); }
Tensor Tensor::bitwise_or(const Scalar& other) const { return tessera::bitwise_or(*this, other); }
Tensor Tensor::bitwise_xor(const Scalar& other) const { return tessera::bitwise_xor(*this, other); }
Tensor Tensor::isclose(const Tensor& other, double rtol, double atol, bool equal_nan) const { return tessera::isclose(*this, other, rtol, atol, equal_nan); }
bool Tensor::allclose(const Tensor& other, double rtol, double atol, bool equal_nan) const { return tessera::allclose(*this, other, rtol, atol, equal_nan); }
Tensor Tensor::addcmul(const Tensor& a, const Tensor& b, const Scalar& value) const { return tessera::addcmul(*this, a, b, value); }
Tensor Tensor::addcdiv(const Tensor& a, const Tensor& b, const Scalar& value) const { return tessera::addcdiv(*this, a, b, value); }
Tensor Tensor::lerp(const Tensor& end, const Tensor& weight) const { return tessera::lerp(*this, end, weight); }
Tensor Tensor::lerp(const Tensor& end, double weight) const { return tessera::lerp(*this, end, weight); }
Tensor Tensor::masked_fill(const Tensor& mask, const Scalar& value) const { return tessera::masked_fill(*this, mask, value); }

Tensor Tensor::matmul(const Tensor& other) const { return tessera::matmul(*this, other); }
Tensor Tensor::bmm(const Tensor& other) const { return tessera::bmm(*this, other); }
Tensor Tensor::dot(const Tensor& other) const { return tessera::dot(*this, other); }
Tensor Tensor::outer(const Tensor& other) const { return tessera::outer(*this, other); }
Tensor Tensor::addmm(const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) const { return tessera::addmm(*this, a, b, beta, alpha); }

Tensor Tensor::index_select(int64_t dim, const Tensor& index) const { return tessera::index_select(*this, dim, index); }
Tensor Tensor::index_add(int64_t dim, const Tensor& index, const Tensor& source) const { return tessera::index_add(*this, dim, index, source); }
Tensor Tensor::index_fill(int64_t dim, const Tensor& index, const Scalar& value) const { return tessera::index_fill(*this, dim, index, value); }
Tensor Tensor::gather(int64_t dim, const Tensor& index) const { return tessera::gather(*this, dim, index); }
Tensor Tensor::scatter(int64_t dim, const Tensor& index, const Tensor& source) const { return tessera::scatter(*this, dim, index, source); }
Tensor Tensor::scatter(int64_t dim, const Tensor& index, const Scalar& value) const { return tessera::scatter(*this, dim, index, value); }
Tensor Tensor::scatter_add(int64_t dim, const Tensor& index, const Tensor& source) const { return tessera::scatter_add(*this, dim, index, source); }
Tensor Tensor::scatter_reduce(int64_t dim, const Tensor& index, const Tensor& source, ScatterReduce reduce, bool include_self) const { return tessera::scatter_reduce(*this, dim, index, source, reduce, include_self); }
Tensor Tensor::masked_select(const Tensor& mask) const { return tessera::masked_select(*this, mask); }
Tensor Tensor::nonzero() const { return tessera::nonzero(*this); }
ValuesIndices Tensor::sort(int64_t dim, bool descending) const { return tessera::sort(*this, dim, descending); }
Tensor Tensor::argsort(int64_t dim, bool descending) const { return tessera::argsort(*this, dim, descending); }
ValuesIndices Tensor::topk(int64_t k, int64_t dim, bool largest) const { return tessera::topk(*this, k, dim, largest); }
UniqueResult Tensor::unique(bool sorted, bool return_inverse, bool return_counts, std::optional<int64_t> dim) const { return tessera::unique(*this, sorted, return_inverse, return_counts, dim); }
Tensor Tensor::bincount(const Tensor& weights, int64_t minlength) const { return tessera::bincount(*this, weights, minlength); }
Tensor Tensor::multinomial(int64_t count, bool replacement) const { return tessera::multinomial(*this, count, replacement); }

const Tensor& Tensor::copy_(const Tensor& source) const { return tessera::copy_(*this, source); }
const Tensor& Tensor::fill_(const Scalar& value) const { return tessera::fill_(*this, value); }
const Tensor& Tensor::zero_() const { return tessera::zero_(*this); }
const Tensor& Tensor::uniform_(double low, double high) const { return tessera::uniform_(*this, low, high); }
const Tensor& Tensor::normal_(double mean, double std) const { return tessera::normal_(*this, mean, std); }
const Tensor& Tensor::bernoulli_(double p) const { return tessera::bernoulli_(*this, p); }
const Tensor& Tensor::add_(const Tensor& other, const Scalar& alpha) const { return tessera::add_(*this, other, alpha); }
const Tensor& Tensor::sub_(const Tensor& other, const Scalar& alpha) const { return tessera::sub_(*this, other, alpha); }
const Tensor& Tensor::mul_(const Tensor& other) const { return tessera::mul_(*this, other); }
const Tensor& Tensor::div_(const Tensor& other) const { return tessera::div_(*this, other); }
const Tensor& Tensor::add_(const Scalar& other) const { return tessera::add_(*this, other); }
const Tensor& Tensor::sub_(const Scalar& other) const { return tessera::sub_(*this, other); }
const Tensor& Tensor::mul_(const Scalar& other) const { return tessera::mul_(*this, other); }
const Tensor& Tensor::div_(const Scalar& other) const { return tessera::div_(*this, other); }
const Tensor& Tensor::pow_(const Scalar& exponent) const { return tessera::pow_(*this, exponent); }
const Tensor& Tensor::neg_() const { return tessera::neg_(*this); }
const Tensor& Tensor::exp_() const { return tessera::exp_(*this); }
const Tensor& Tensor::sqrt_() const { return tessera::sqrt_(*this); }
const Tensor& Tensor::tanh_() const { return tessera::tanh_(*this); }
const Tensor& Tensor::sigmoid_() const { return tessera::sigmoid_(*this); }
const Tensor& Tensor::relu_() const { return tessera::relu_(*this); }
const Tensor& Tensor::clamp_(std::optional<Scalar> min, std::optional<Scalar> max) const { return tessera::clamp_(*this, min, max); }
const Tensor& Tensor::lerp_(const Tensor& end, double weight) const { return tessera::lerp_(*this, end, weight); }
const Tensor& Tensor::addcmul_(const Tensor& a, const Tensor& b, const Scalar& value) const { return tessera::addcmul_(*this, a, b, value); }
const Tensor& Tensor::addcdiv_(const Tensor& a, const Tensor& b, const Scalar& value) const { return tessera::addcdiv_(*this, a, b, value); }
const Tensor& Tensor::masked_fill_(const Tensor& mask, const Scalar& value) const { return tessera::masked_fill_(*this, mask, value); }

const Tensor& Tensor::abs_() const { return written("abs_", *this, tessera::abs(kept(*this))); }
const Tensor& Tensor::ceil_() const { return written("ceil_", *this, tessera::ceil(kept(*this))); }
const Tensor& Tensor::cos_() const { return written("cos_", *this, tessera::cos(kept(*this))); }
const Tensor& Tensor::digamma_() const { return written("digamma_", *this, tessera::digamma(kept(*this))); }
const Tensor& Tensor::erf_() const { return written("erf_", *this, tessera::erf(kept(*this))); }
const Tensor& Tensor::erfinv_() const { return written("erfinv_", *this, tessera::erfinv(kept(*this))); }
const Tensor& Tensor::expm1_() const { return written("expm1_", *this, tessera::expm1(kept(*this))); }
const Tensor& Tensor::floor_() const { return written("floor_", *this, tessera::floor(kept(*this))); }
const Tensor& Tensor::lgamma_() const { return written("lgamma_", *this, tessera::lgamma(kept(*this))); }
const Tensor& Tensor::log_() const { return written("log_", *this, tessera::log(kept(*this))); }
const Tensor& Tensor::log10_() const { return written("log10_", *this, tessera::log10(kept(*this))); }
const Tensor& Tensor::log1p_() const { return written("log1p_", *this, tessera::log1p(kept(*this))); }
const Tensor& Tensor::log2_() const { return written("log2_", *this, tessera::log2(kept(*this))); }
const Tensor& Tensor::logical_not_() const { return written("logical_not_", *this, tessera::logical_not(kept(*this))); }
const Tensor& Tensor::bitwise_not_() const { return written("bitwise_not_", *this, tessera::bitwise_not(kept(*this))); }
const Tensor& Tensor::reciprocal_() const { return written("reciprocal_", *this, tessera::reciprocal(kept(*this))); }
const Tensor& Tensor::round_() const { return written("round_", *this, tessera::round(kept(*this))); }
const Tensor& Tensor::rsqrt_() const { return written("rsqrt_", *this, tessera::rsqrt(kept(*this))); }
const Tensor& Tensor::sign_() const { return written("sign_", *this, tessera::sign(kept(*this))); }
const Tensor& Tensor::sin_() const { return written("sin_", *this, tessera::sin(kept(*this))); }
const Tensor& Tensor::square_() const { return written("square_", *this, tessera::square(kept(*this))); }
const Tensor& Tensor::tan_() const { return written("tan_", *this, tessera::tan(kept(*this))); }
const Tensor& Tensor::trunc_() const { return written("trunc_", *this, tessera::trunc(kept(*this))); }
const Tensor& Tensor::nan_to_num_(double nan, std::optional<double> posinf, std::optional<double> neginf) const { return written("nan_to_num_", *this, tessera::nan_to_num(kept(*this), nan, posinf, neginf)); }
const Tensor& Tensor::polygamma_(int64_t n) const { return written("polygamma_", *this, tessera::polygamma(n, kept(*this))); }
const Tensor& Tensor::atan2_(const Tensor& other) const { return written("atan2_", *this, tessera::atan2(kept(*this), other)); }
const Tensor& Tensor::logical_and_(const Tensor& other) const { return written("logical_and_", *this, tessera::logical_and(kept(*this), other)); }
const Tensor& Tensor::logical_or_(const Tensor& other) const { return written("logical_or_", *this, tessera::logical_or(kept(*this), other)); }
const Tensor& Tensor::logical_xor_(const Tensor& other) const { return written("logical_xor_", *this, tessera::logical_xor(kept(*this), other)); }
const Tensor& Tensor::pow_(const Tensor& other) const { return written("pow_", *this, tessera::pow(kept(*this), other)); }
const Tensor& Tensor::bitwise_and_(const Tensor& other) const { return written("bitwise_and_", *this, tessera::bitwise_and(kept(*this), other)); }
const Tensor& Tensor::bitwise_and_(const Scalar& other) const { return written("bitwise_and_", *this, tessera::bitwise_and(kept(*this), other)); }
const Tensor& Tensor::bitwise_or_(const Tensor& other) const { return written("bitwise_or_", *this, tessera::bitwise_or(kept(*this), other)); }
const Tensor& Tensor::bitwise_or_(const Scalar& other) const { return written("bitwise_or_", *this, tessera::bitwise_or(kept(*this), other)); }
const Tensor& Tensor::bitwise_xor_(const Tensor& other) const { return written("bitwise_xor_", *this, tessera::bitwise_xor(kept(*this), other)); }
const Tensor& Tensor::bitwise_xor_(const Scalar& other) const { return written("bitwise_xor_", *this, tessera::bitwise_xor(kept(*this), other)); }
const Tensor& Tensor::eq_(const Tensor& other) const { return written("eq_", *this, tessera::eq(kept(*this), other)); }
const Tensor& Tensor::eq_(const Scalar& other) const { return written("eq_", *this, tessera::eq(kept(*this), other)); }
const Tensor& Tensor::ne_(const Tensor& other) const { return written("ne_", *this, tessera::ne(kept(*this), other)); }
const Tensor& Tensor::ne_(const Scalar& other) const { return written("ne_", *this, tessera::ne(kept(*this), other)); }
const Tensor& Tensor::lt_(const Tensor& other) const { return written("lt_", *this, tessera::lt(kept(*this), other)); }
const Tensor& Tensor::lt_(const Scalar& other) const { return written("lt_", *this, tessera::lt(kept(*this), other)); }
const Tensor& Tensor::le_(const Tensor& other) const { return written("le_", *this, tessera::le(kept(*this), other)); }
const Tensor& Tensor::le_(const Scalar& other) const { return written("le_", *this, tessera::le(kept(*this), other)); }
const Tensor& Tensor::gt_(const Tensor& other) const { return written("gt_", *this, tessera::gt(kept(*this), other)); }
const Tensor& Tensor::gt_(const Scalar& other) const { return written("gt_", *this, tessera::gt(kept(*this), other)); }
const Tensor& Tensor::ge_(const Tensor& other) const { return written("ge_", *this, tessera::ge(kept(*this), other)); }
const Tensor& Tensor::ge_(const Scalar& other) const { return written("ge_", *this, tessera::ge(kept(*this), other)); }
const Tensor& Tensor::floor_divide_(const Tensor& other) const { return written("floor_divide_", *this, tessera::floor_divide(kept(*this), other)); }
const Tensor& Tensor::floor_divide_(const Scalar& other) const { return written("floor_divide_", *this, tessera::floor_divide(kept(*this), other)); }
const Tensor& Tensor::fmod_(const Tensor& other) const { return written("fmod_", *this, tessera::fmod(kept(*this), other)); }
const Tensor& Tensor::fmod_(const Scalar& other) const { return written("fmod_", *this, tessera::fmod(kept(*this), other)); }
const Tensor& Tensor::remainder_(const Tensor& other) const { return written("remainder_", *this, tessera::remainder(kept(*this), other)); }
const Tensor& Tensor::remainder_(const Scalar& other) const { return written("remainder_", *this, tessera::remainder(kept(*this), other)); }
const Tensor& Tensor::tril_(int64_t diagonal) const { return written("tril_", *this, tessera::tril(kept(*this), diagonal)); }
const Tensor& Tensor::triu_(int64_t diagonal) const { return written("triu_", *this, tessera::triu(kept(*this), diagonal)); }
const Tensor& Tensor::cumsum_(int64_t dim) const { return written("cumsum_", *this, tessera::cumsum(kept(*this), dim)); }
const Tensor& Tensor::cumprod_(int64_t dim) const { return written("cumprod_", *this, tessera::cumprod(kept(*this), dim)); }
const Tensor& Tensor::addmm_(const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) const { return written("addmm_", *this, tessera::addmm(kept(*this), a, b, beta, alpha)); }
const Tensor& Tensor::index_add_(int64_t dim, const Tensor& index, const Tensor& source) const { return written("index_add_", *this, tessera::index_add(kept(*this), dim, index, source)); }
const Tensor& Tensor::index_fill_(int64_t dim, const Tensor& index, const Scalar& value) const { return written("index_fill_", *this, tessera::index_fill(kept(*this), dim, index, value)); }
const Tensor& Tensor::scatter_(int64_t dim, const Tensor& index, const Tensor& source) const { return written("scatter_", *this, tessera::scatter(kept(*this), dim, index, source)); }
const Tensor& Tensor::scatter_add_(int64_t dim, const Tensor& index, const Tensor& source) const { return written("scatter_add_", *this, tessera::scatter_add(kept(*this), dim, index, source)); }
const Tensor& Tensor::scatter_(int64_t dim, const Tensor& index, const Scalar& value) const { return written("scatter_", *this, tessera::scatter(kept(*this), dim, index, value)); }
const Tensor& Tensor::scatter_reduce_(int64_t dim, const Tensor& index, const Tensor& source, ScatterReduce reduce, bool include_self) const { return written("scatter_reduce_", *this, tessera::scatter_reduce(kept(*this), dim, index, source, reduce, include_self)); }
// clang-format on

}  // namespace tessera
