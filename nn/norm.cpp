#include <tessera/nn/norm.h>

#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>

namespace tessera::nn {

// ---- LayerNorm ---------------------------------------------------------------------------------

LayerNorm::LayerNorm(const Shape& normalized_shape, const LayerNormOptions& options)
    : normalized_shape(normalized_shape),
      options(options),
      weight(options.elementwise_affine ? parameter("weight", normalized_shape)
                                        : parameter("weight", Tensor())),
      bias(options.elementwise_affine && options.bias ? parameter("bias", normalized_shape)
                                                      : parameter("bias", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}
void LayerNorm::reset_parameters() {
  if (weight.defined()) init::ones(weight);
  if (bias.defined()) init::zeros(bias);
}
Tensor LayerNorm::forward(const Tensor& x) {
  return layer_norm(x, normalized_shape, weight, bias, options.eps);
}
std::string LayerNorm::extra_repr() const {
  return detail::describe_shape(normalized_shape) + ", " +
         detail::describe("eps", options.eps, "elementwise_affine", options.elementwise_affine);
}

// ---- RMSNorm -----------------------------------------------------------------------------------

RMSNorm::RMSNorm(const Shape& normalized_shape, const RmsNormOptions& options)
    : normalized_shape(normalized_shape),
      options(options),
      weight(options.elementwise_affine ? parameter("weight", normalized_shape)
                                        : parameter("weight", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}
void RMSNorm::reset_parameters() {
  if (weight.defined()) init::constant(weight, options.plus_one ? 0 : 1);
}
Tensor RMSNorm::factor() const {
  if (!options.plus_one || !weight.defined()) return weight;
  return (weight.dtype() == kF64 ? weight : weight.to(kF32)) + 1;
}
Tensor RMSNorm::forward(const Tensor& x) {
  return rms_norm(x, normalized_shape, factor(), options.eps);
}
std::string RMSNorm::extra_repr() const {
  return detail::describe_shape(normalized_shape) + ", " +
         detail::describe("eps", options.eps, "elementwise_affine", options.elementwise_affine) +
         (options.plus_one ? ", plus_one=true" : "");
}

// ---- GroupNorm ---------------------------------------------------------------------------------

GroupNorm::GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& options)
    : num_groups(num_groups),
      num_channels(num_channels),
      options(options),
      weight(options.affine ? parameter("weight", Shape{num_channels})
                            : parameter("weight", Tensor())),
      bias(options.affine ? parameter("bias", Shape{num_channels}) : parameter("bias", Tensor())) {
  TS_CHECK(num_groups > 0 && num_channels % num_groups == 0, "GroupNorm", num_groups,
           " groups do not divide ", num_channels, " channels");
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}
void GroupNorm::reset_parameters() {
  if (weight.defined()) init::ones(weight);
  if (bias.defined()) init::zeros(bias);
}
Tensor GroupNorm::forward(const Tensor& x) {
  return group_norm(x, num_groups, weight, bias, options.eps);
}
std::string GroupNorm::extra_repr() const {
  return std::to_string(num_groups) + ", " + std::to_string(num_channels) + ", " +
         detail::describe("eps", options.eps, "affine", options.affine);
}

// ---- BatchNorm ---------------------------------------------------------------------------------

// The weight of this batch in the running statistics; counts the batch, once.
double BatchNormBase::average_factor(const BatchNormOptions& options, const Tensor& batches) {
  if (!batches.defined() || is_recomputing()) return options.momentum.value_or(0);
  const NoGradGuard no_grad;
  add_(batches, Scalar(1));
  if (options.momentum || batches.is_meta()) return options.momentum.value_or(0);
  return 1 / batches.item<double>();
}

void BatchNormBase::check_input(std::string_view name, const Tensor& x, int64_t num_features,
                                int min_dims, int max_dims) {
  TS_CHECK_SHAPE(x.dim() >= min_dims && x.dim() <= max_dims, name, "needs ", min_dims,
                 min_dims == max_dims ? "" : " or 3", " dimensions; got ", x);
  TS_CHECK_SHAPE(x.size(1) == num_features, name, "was made for ", num_features,
                 " channels in dimension 1; got ", x);
}

Tensor BatchNormBase::normalise(const BatchNormCall& call) const {
  if (function_) return function_(call);
  return batch_norm(call.x, call.running_mean, call.running_var, call.weight, call.bias,
                    call.training, call.momentum, call.eps);
}

template <class Derived>
BatchNormModule<Derived>::BatchNormModule(int64_t num_features, const BatchNormOptions& options)
    : num_features(num_features),
      options(options),
      weight(options.affine ? this->parameter("weight", Shape{num_features})
                            : this->parameter("weight", Tensor())),
      bias(options.affine ? this->parameter("bias", Shape{num_features})
                          : this->parameter("bias", Tensor())),
      running_mean(this->buffer("running_mean", options.track_running_stats
                                                    ? detail::make_buffer({num_features})
                                                    : Tensor())),
      running_var(this->buffer("running_var", options.track_running_stats
                                                  ? detail::make_buffer({num_features})
                                                  : Tensor())),
      num_batches_tracked(this->buffer("num_batches_tracked", options.track_running_stats
                                                                  ? detail::make_buffer({}, kI64)
                                                                  : Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

namespace {

// Of norms that may have weights and running statistics.
template <class Norm>
void reset_tracked(const Norm& norm) {
  if (norm.weight.defined()) init::ones(norm.weight);
  if (norm.bias.defined()) init::zeros(norm.bias);
  if (!norm.running_mean.defined()) return;
  init::zeros(norm.running_mean);
  init::ones(norm.running_var);
  init::zeros(norm.num_batches_tracked);
}

}  // namespace

template <class Derived>
void BatchNormModule<Derived>::reset_parameters() {
  reset_tracked(*this);
}

template <class Derived>
Tensor BatchNormModule<Derived>::forward(const Tensor& x) {
  check_input(this->type_name(), x, num_features, Derived::kMinDims, Derived::kMaxDims);
  const bool training = this->is_training();
  const double factor =
      training ? average_factor(options, num_batches_tracked) : options.momentum.value_or(0);
  return normalise({x, running_mean, running_var, weight, bias, training || !running_mean.defined(),
                    factor, options.eps});
}

template <class Derived>
std::string BatchNormModule<Derived>::extra_repr() const {
  return std::to_string(num_features) + ", " +
         detail::describe("eps", options.eps, "momentum", options.momentum, "affine",
                          options.affine, "track_running_stats", options.track_running_stats);
}

template class BatchNormModule<BatchNorm1d>;
template class BatchNormModule<BatchNorm2d>;

// ---- InstanceNorm ------------------------------------------------------------------------------

namespace {

Tensor tracked(const InstanceNormOptions& options, const Shape& shape,
               std::optional<DType> dtype = {}) {
  return options.track_running_stats ? detail::make_buffer(shape, dtype) : Tensor();
}

}  // namespace

template <class Derived>
InstanceNormModule<Derived>::InstanceNormModule(int64_t num_features,
                                                const InstanceNormOptions& options)
    : num_features(num_features),
      options(options),
      weight(options.affine ? this->parameter("weight", Shape{num_features})
                            : this->parameter("weight", Tensor())),
      bias(options.affine ? this->parameter("bias", Shape{num_features})
                          : this->parameter("bias", Tensor())),
      running_mean(this->buffer("running_mean", tracked(options, {num_features}))),
      running_var(this->buffer("running_var", tracked(options, {num_features}))),
      num_batches_tracked(this->buffer("num_batches_tracked", tracked(options, {}, kI64))) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

template <class Derived>
void InstanceNormModule<Derived>::reset_parameters() {
  reset_tracked(*this);
}

template <class Derived>
Tensor InstanceNormModule<Derived>::forward(const Tensor& x) {
  constexpr int kDims = Derived::kDims;
  TS_CHECK_SHAPE(x.dim() == kDims + 1 || x.dim() == kDims + 2, this->type_name(), "needs ",
                 kDims + 1, " or ", kDims + 2, " dimensions; got ", x);
  TS_CHECK_SHAPE(x.size(-1 - kDims) == num_features, this->type_name(), "was made for ",
                 num_features, " channels in dimension ", x.dim() - 1 - kDims, "; got ", x);
  const bool batched = x.dim() == kDims + 2;
  const Tensor y =
      instance_norm(batched ? x : unsqueeze(x, 0), running_mean, running_var, weight, bias,
                    this->is_training() || !running_mean.defined(), options.momentum, options.eps);
  return batched ? y : squeeze(y, 0);
}

template <class Derived>
std::string InstanceNormModule<Derived>::extra_repr() const {
  return std::to_string(num_features) + ", " +
         detail::describe("eps", options.eps, "momentum", options.momentum, "affine",
                          options.affine, "track_running_stats", options.track_running_stats);
}

template class InstanceNormModule<InstanceNorm1d>;
template class InstanceNormModule<InstanceNorm2d>;

}  // namespace tessera::nn
