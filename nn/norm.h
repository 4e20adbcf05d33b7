// Normalization layers. Statistics are f32 (f64 for f64) whatever the dtype of x.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include <tessera/nn/module.h>

namespace tessera::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;
  bool bias = true;
};
// Ba, Kiros, Hinton 2016. Normalizes the last normalized_shape.size() dimensions; weight (ones at
// first) and bias (zeros) have that shape.
class LayerNorm : public Module<LayerNorm> {
 public:
  using Options = LayerNormOptions;
  explicit LayerNorm(const Shape& normalized_shape, const LayerNormOptions& options = {});
  explicit LayerNorm(int64_t size, const LayerNormOptions& options = {})
      : LayerNorm(Shape{size}, options) {}
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<LayerNorm> remake() const {
    return std::make_unique<LayerNorm>(normalized_shape, options);
  }

  const Shape normalized_shape;
  const LayerNormOptions options;
  const Tensor& weight;
  const Tensor& bias;
};

struct RmsNormOptions {
  std::optional<double> eps = {};  // absent: the epsilon of x's dtype
  bool elementwise_affine = true;
  bool plus_one = false;  // the factor is 1 + weight, as in Gemma; weight is 0 at first
};
// Zhang, Sennrich 2019: no mean, no bias.
class RMSNorm : public Module<RMSNorm> {
 public:
  using Options = RmsNormOptions;
  explicit RMSNorm(const Shape& normalized_shape, const RmsNormOptions& options = {});
  explicit RMSNorm(int64_t size, const RmsNormOptions& options = {})
      : RMSNorm(Shape{size}, options) {}
  Tensor forward(const Tensor& x);
  // What normalized values are multiplied with: weight, or with plus_one 1 + weight in f32, since
  // 16 bits would round small weights away beside the 1. Undefined without a weight.
  Tensor factor() const;
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<RMSNorm> remake() const {
    return std::make_unique<RMSNorm>(normalized_shape, options);
  }

  const Shape normalized_shape;
  const RmsNormOptions options;
  const Tensor& weight;
};

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;
};
// Wu, He 2018. x: [N, num_channels, ...]; each group of channels is normalized by itself.
class GroupNorm : public Module<GroupNorm> {
 public:
  using Options = GroupNormOptions;
  GroupNorm(int64_t num_groups, int64_t num_channels, const GroupNormOptions& options = {});
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<GroupNorm> remake() const {
    return std::make_unique<GroupNorm>(num_groups, num_channels, options);
  }

  const int64_t num_groups;
  const int64_t num_channels;
  const GroupNormOptions options;
  const Tensor& weight;
  const Tensor& bias;
};

struct BatchNormOptions {
  double eps = 1e-5;
  std::optional<double> momentum = 0.1;  // absent: the plain average of all batches
  bool affine = true;
  bool track_running_stats = true;  // false: batch statistics in evaluation, too
};
// The batch_norm call (autograd/ops.h) that a batch norm layer is about to make.
struct BatchNormCall {
  const Tensor &x, &running_mean, &running_var, &weight, &bias;
  bool training;
  double momentum, eps;
};
// Ioffe, Szegedy 2015. Buffers running_mean, running_var (unbiased), num_batches_tracked (i64).
class BatchNormBase {
 public:
  // Calls `function` instead of batch_norm from now on; an empty function restores batch_norm. Used
  // for statistics over several ranks.
  using Function = std::function<Tensor(const BatchNormCall&)>;
  void set_function(Function function) { function_ = std::move(function); }

 protected:
  Tensor normalise(const BatchNormCall& call) const;
  static double average_factor(const BatchNormOptions& options, const Tensor& batches);
  static void check_input(std::string_view name, const Tensor& x, int64_t num_features,
                          int min_dims, int max_dims);

 private:
  Function function_;
};

template <class Derived>
class BatchNormModule : public Module<Derived>, public BatchNormBase {
 public:
  using Options = BatchNormOptions;
  BatchNormModule(int64_t num_features, const BatchNormOptions& options);
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;

  const int64_t num_features;
  const BatchNormOptions options;
  const Tensor& weight;
  const Tensor& bias;
  const Tensor& running_mean;
  const Tensor& running_var;
  const Tensor& num_batches_tracked;
};

// x: [N, C] or [N, C, L].
class BatchNorm1d : public BatchNormModule<BatchNorm1d> {
 public:
  explicit BatchNorm1d(int64_t num_features, const BatchNormOptions& options = {})
      : BatchNormModule(num_features, options) {}
  static constexpr int kMinDims = 2, kMaxDims = 3;
  std::unique_ptr<BatchNorm1d> remake() const {
    return std::make_unique<BatchNorm1d>(num_features, options);
  }
};
// x: [N, C, H, W].
class BatchNorm2d : public BatchNormModule<BatchNorm2d> {
 public:
  explicit BatchNorm2d(int64_t num_features, const BatchNormOptions& options = {})
      : BatchNormModule(num_features, options) {}
  static constexpr int kMinDims = 4, kMaxDims = 4;
  std::unique_ptr<BatchNorm2d> remake() const {
    return std::make_unique<BatchNorm2d>(num_features, options);
  }
};

struct InstanceNormOptions {
  double eps = 1e-5;
  double momentum = 0.1;
  bool affine = false;
  bool track_running_stats = false;  // and uses the tracked ones in evaluation
};
// Ulyanov, Vedaldi, Lempitsky 2016: normalizes each channel of each sample by itself. Tracked
// buffers are BatchNorm's; num_batches_tracked stays 0, as in torch.
template <class Derived>
class InstanceNormModule : public Module<Derived> {
 public:
  using Options = InstanceNormOptions;
  InstanceNormModule(int64_t num_features, const InstanceNormOptions& options);
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;

  const int64_t num_features;
  const InstanceNormOptions options;
  const Tensor& weight;
  const Tensor& bias;
  const Tensor& running_mean;
  const Tensor& running_var;
  const Tensor& num_batches_tracked;
};

// x: [N, C, L] or [C, L].
class InstanceNorm1d : public InstanceNormModule<InstanceNorm1d> {
 public:
  explicit InstanceNorm1d(int64_t num_features, const InstanceNormOptions& options = {})
      : InstanceNormModule(num_features, options) {}
  static constexpr int kDims = 1;
  std::unique_ptr<InstanceNorm1d> remake() const {
    return std::make_unique<InstanceNorm1d>(num_features, options);
  }
};
// x: [N, C, H, W] or [C, H, W].
class InstanceNorm2d : public InstanceNormModule<InstanceNorm2d> {
 public:
  explicit InstanceNorm2d(int64_t num_features, const InstanceNormOptions& options = {})
      : InstanceNormModule(num_features, options) {}
  static constexpr int kDims = 2;
  std::unique_ptr<InstanceNorm2d> remake() const {
    return std::make_unique<InstanceNorm2d>(num_features, options);
  }
};

}  // namespace tessera::nn
