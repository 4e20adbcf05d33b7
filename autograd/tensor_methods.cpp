// The methods that core/tensor.h declares: thin forwards to ops.h and autograd.h.
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/zero_grad_hook.h>
#include <tessera/core/context.h>
#include <tessera/core/raw_views.h>
#include <tessera/core/tensor.h>

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

void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  tessera::backward(*this, gradient, {.retain_graph = retain_graph, .create_graph = create_graph});
}

// clang-format off
Tensor Tensor::detach() const { return tessera::detach(*this); }
Tensor Tensor::clone() const { return tessera::clone(*this); }
Tensor Tensor::contiguous() const { return tessera::contiguous(*this); }
Tensor Tensor::to(DType dtype) const { return tessera::to(*this, dtype); }
Tensor Tensor::to(const Device& device) const { return tessera::to(*this, device); }
Tensor Tensor::view(const Shape& shape) const { return tessera::view(*this, shape); }
Tensor Tensor::reshape(const Shape& shape) const { return tessera::reshape(*this, shape); }
Tensor Tensor::flatten(int64_t start, int64_t end) const { return tessera::flatten(*this, start, end); }
Tensor Tensor::transpose(int64_t dim0, int64_t dim1) const { return tessera::transpose(*this, dim0, dim1); }
Tensor Tensor::t() const {
  TS_CHECK_SHAPE(dim() <= 2, "t", "expects at most 2 dimensions; got ", *this, "; use transpose");
  return dim() < 2 ? *this : tessera::transpose(*this, 0, 1);
}
Tensor Tensor::permute(const Shape& dims) const { return tessera::permute(*this, dims); }
Tensor Tensor::movedim(const Shape& source, const Shape& destination) const { return tessera::movedim(*this, source, destination); }
Tensor Tensor::unfold(int64_t dim, int64_t size, int64_t step) const { return tessera::unfold_dim(*this, dim, size, step); }
Tensor Tensor::expand(const Shape& shape) const { return tessera::expand(*this, shape); }
Tensor Tensor::squeeze(int64_t dim) const { return tessera::squeeze(*this, dim); }
Tensor Tensor::unsqueeze(int64_t dim) const { return tessera::unsqueeze(*this, dim); }
Tensor Tensor::narrow(int64_t dim, int64_t start, int64_t length) const { return tessera::narrow(*this, dim, start, length); }
Tensor Tensor::select(int64_t dim, int64_t index) const { return tessera::select(*this, dim, index); }
Tensor Tensor::slice(int64_t dim, std::optional<int64_t> start, std::optional<int64_t> end, int64_t step) const {
  return tessera::slice(*this, dim, start, end, step);
}
Tensor Tensor::operator[](int64_t index) const { return tessera::select(*this, 0, index); }
std::vector<Tensor> Tensor::split(int64_t size, int64_t dim) const { return tessera::split(*this, size, dim); }
std::vector<Tensor> Tensor::chunk(int64_t chunks, int64_t dim) const { return tessera::chunk(*this, chunks, dim); }
std::vector<Tensor> Tensor::unbind(int64_t dim) const { return tessera::unbind(*this, dim); }
Tensor Tensor::sum(const Shape& dims, bool keepdim) const { return tessera::sum(*this, dims, keepdim); }
Tensor Tensor::mean(const Shape& dims, bool keepdim) const { return tessera::mean(*this, dims, keepdim); }
Tensor Tensor::max() const { return tessera::max(*this); }
Tensor Tensor::min() const { return tessera::min(*this); }
Tensor Tensor::abs() const { return tessera::abs(*this); }
Tensor Tensor::exp() const { return tessera::exp(*this); }
Tensor Tensor::log() const { return tessera::log(*this); }
Tensor Tensor::log2() const { return tessera::log2(*this); }
Tensor Tensor::log10() const { return tessera::log10(*this); }
Tensor Tensor::sqrt() const { return tessera::sqrt(*this); }
Tensor Tensor::tan() const { return tessera::tan(*this); }
Tensor Tensor::atan2(const Tensor& other) const { return tessera::atan2(*this, other); }
Tensor Tensor::erfinv() const { return tessera::erfinv(*this); }
Tensor Tensor::lgamma() const { return tessera::lgamma(*this); }
Tensor Tensor::digamma() const { return tessera::digamma(*this); }
Tensor Tensor::trunc() const { return tessera::trunc(*this); }
Tensor Tensor::fmod(const Tensor& other) const { return tessera::fmod(*this, other); }
Tensor Tensor::fmod(const Scalar& other) const { return tessera::fmod(*this, other); }
Tensor Tensor::tanh() const { return tessera::tanh(*this); }
Tensor Tensor::sigmoid() const { return tessera::sigmoid(*this); }
Tensor Tensor::relu() const { return tessera::relu(*this); }
Tensor Tensor::pow(const Scalar& exponent) const { return tessera::pow(*this, exponent); }
Tensor Tensor::argmax(int64_t dim, bool keepdim) const { return tessera::argmax(*this, dim, keepdim); }
Tensor Tensor::isclose(const Tensor& other, double rtol, double atol, bool equal_nan) const { return tessera::isclose(*this, other, rtol, atol, equal_nan); }
bool Tensor::allclose(const Tensor& other, double rtol, double atol, bool equal_nan) const { return tessera::allclose(*this, other, rtol, atol, equal_nan); }
Tensor Tensor::median() const { return tessera::median(*this); }
ValuesIndices Tensor::median(int64_t dim, bool keepdim) const { return tessera::median(*this, dim, keepdim); }
Tensor Tensor::quantile(double q, std::optional<int64_t> dim, bool keepdim) const { return tessera::quantile(*this, q, dim, keepdim); }
ValuesIndices Tensor::cummax(int64_t dim) const { return tessera::cummax(*this, dim); }
ValuesIndices Tensor::cummin(int64_t dim) const { return tessera::cummin(*this, dim); }
Tensor Tensor::softmax(int64_t dim) const { return tessera::softmax(*this, dim); }
Tensor Tensor::matmul(const Tensor& other) const { return tessera::matmul(*this, other); }
Tensor Tensor::masked_fill(const Tensor& mask, const Scalar& value) const { return tessera::masked_fill(*this, mask, value); }
Tensor Tensor::eq(const Tensor& other) const { return tessera::eq(*this, other); }
const Tensor& Tensor::copy_(const Tensor& source) const { return tessera::copy_(*this, source); }
const Tensor& Tensor::fill_(const Scalar& value) const { return tessera::fill_(*this, value); }
const Tensor& Tensor::zero_() const { return tessera::zero_(*this); }
const Tensor& Tensor::add_(const Tensor& other, const Scalar& alpha) const { return tessera::add_(*this, other, alpha); }
const Tensor& Tensor::sub_(const Tensor& other, const Scalar& alpha) const { return tessera::sub_(*this, other, alpha); }
const Tensor& Tensor::mul_(const Tensor& other) const { return tessera::mul_(*this, other); }
const Tensor& Tensor::div_(const Tensor& other) const { return tessera::div_(*this, other); }
const Tensor& Tensor::add_(const Scalar& other) const { return tessera::add_(*this, other); }
const Tensor& Tensor::sub_(const Scalar& other) const { return tessera::sub_(*this, other); }
const Tensor& Tensor::mul_(const Scalar& other) const { return tessera::mul_(*this, other); }
const Tensor& Tensor::div_(const Scalar& other) const { return tessera::div_(*this, other); }
// clang-format on

}  // namespace tessera
