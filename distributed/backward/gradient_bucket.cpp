#include <tessera/distributed/backward/gradient_bucket.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>

namespace tessera::distributed {
namespace {

FlatLayout layout_of(const std::vector<size_t>& members, const std::vector<ManagedParam>& params,
                     DType dtype) {
  std::vector<Shape> shapes;
  shapes.reserve(members.size());
  for (const size_t member : members) shapes.push_back(params[member].tensor.shape());
  return FlatLayout::even_chunk(shapes, 1, alignment_of({dtype}));
}

}  // namespace

GradientBucket::GradientBucket(int index, std::vector<size_t> members,
                               std::vector<ManagedParam>& params, Group& ranks,
                               bool gradients_are_views, std::optional<DType> gradient_dtype)
    : index_(index),
      members_(std::move(members)),
      params_(&params),
      ranks_(&ranks),
      tag_("bucket " + std::to_string(index)),
      gradients_are_views_(gradients_are_views) {
  const Tensor& first = param(0).tensor;
  const DType dtype = gradient_dtype_of(first, gradient_dtype);
  gradients_ = FlatBuffer(layout_of(members_, params, dtype), 0, dtype, first.device(),
                          MemoryCategory::kGradient);
  views_.reserve(size());
  for (size_t slot = 0; slot < size(); ++slot) {
    const Tensor& tensor = param(slot).tensor;
    numel_ += tensor.numel();
    const bool dense = is_dense(tensor.shape(), tensor.strides());
    views_.push_back(
        dense && !tensor.is_contiguous()
            ? raw::as_parameter(raw::as_strided(gradients_.flat(), tensor.shape(), tensor.strides(),
                                                gradients_.layout().local_slice(slot, 0).offset))
            : gradients_.view(slot));
  }
}

void GradientBucket::collect(size_t slot) {
  const NoGradGuard no_grad;
  ManagedParam& param = own(slot);
  const Tensor& part = views_[slot];
  const Tensor grad = param.tensor.grad();
  if (!grad.defined()) {
    if (!TS_MUTANT(kStaleBucket)) zero_(part);
  } else if (!grad.is(part)) {
    copy_(part, grad);
    if (gradients_are_views_) param.tensor.set_grad(part);
  }
  --pending_;
}

void GradientBucket::collect_zeros(size_t slot) {
  const NoGradGuard no_grad;
  zero_(views_[slot]);
  --pending_;
}

void GradientBucket::hand_out(size_t slot) {
  const NoGradGuard no_grad;
  const Tensor& tensor = own(slot).tensor;
  if (gradients_are_views_) {
    tensor.set_grad(views_[slot]);
  } else if (const Tensor grad = tensor.grad(); grad.defined()) {
    copy_(grad, views_[slot]);
  } else {
    tensor.set_grad(views_[slot].clone());
  }
}

void GradientBucket::adopt(size_t slot, const Tensor& from) {
  const NoGradGuard no_grad;
  const Tensor& tensor = own(slot).tensor;
  if (!tensor.grad().is(from)) return;
  copy_(views_[slot], from);
  tensor.set_grad(views_[slot]);
}

void GradientBucket::install_homes() {
  if (!gradients_are_views_) return;
  for (size_t slot = 0; slot < size(); ++slot) set_main_grad(own(slot).tensor, views_[slot]);
}

void GradientBucket::remove_homes() {
  if (!gradients_are_views_) return;
  for (size_t slot = 0; slot < size(); ++slot) set_main_grad(own(slot).tensor, Tensor());
}

}  // namespace tessera::distributed
