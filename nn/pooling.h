// Pooling of images, [N, C, H, W] or [C, H, W], and of rows, [N, C, L] or [C, L].
#pragma once

#include <memory>

#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

struct MaxPoolOptions {
  Shape stride = {};  // empty: the kernel size
  Shape padding = {0};
  Shape dilation = {1};
  bool ceil_mode = false;
};
class MaxPool2d : public Module<MaxPool2d> {
 public:
  using Options = MaxPoolOptions;
  explicit MaxPool2d(const Shape& kernel_size, const MaxPoolOptions& options = {})
      : kernel_size(kernel_size), options(options) {}
  explicit MaxPool2d(int64_t kernel_size, const MaxPoolOptions& options = {})
      : MaxPool2d(Shape{kernel_size}, options) {}
  Tensor forward(const Tensor& x) {
    return max_pool2d(x, kernel_size, options.stride, options.padding, options.dilation,
                      options.ceil_mode);
  }
  std::string extra_repr() const override {
    return detail::describe(
        "kernel_size", kernel_size, "stride", options.stride.empty() ? kernel_size : options.stride,
        "padding", options.padding, "dilation", options.dilation, "ceil_mode", options.ceil_mode);
  }
  std::unique_ptr<MaxPool2d> remake() const {
    return std::make_unique<MaxPool2d>(kernel_size, options);
  }

  const Shape kernel_size;
  const MaxPoolOptions options;
};

class MaxPool1d : public Module<MaxPool1d> {
 public:
  using Options = MaxPoolOptions;
  explicit MaxPool1d(const Shape& kernel_size, const MaxPoolOptions& options = {})
      : kernel_size(kernel_size), options(options) {}
  explicit MaxPool1d(int64_t kernel_size, const MaxPoolOptions& options = {})
      : MaxPool1d(Shape{kernel_size}, options) {}
  Tensor forward(const Tensor& x) {
    return max_pool1d(x, kernel_size, options.stride, options.padding, options.dilation,
                      options.ceil_mode);
  }
  std::string extra_repr() const override {
    return detail::describe(
        "kernel_size", kernel_size, "stride", options.stride.empty() ? kernel_size : options.stride,
        "padding", options.padding, "dilation", options.dilation, "ceil_mode", options.ceil_mode);
  }
  std::unique_ptr<MaxPool1d> remake() const {
    return std::make_unique<MaxPool1d>(kernel_size, options);
  }

  const Shape kernel_size;
  const MaxPoolOptions options;
};

struct AvgPoolOptions {
  Shape stride = {};
  Shape padding = {0};
  bool ceil_mode = false;
  bool count_include_pad = true;
};
class AvgPool2d : public Module<AvgPool2d> {
 public:
  using Options = AvgPoolOptions;
  explicit AvgPool2d(const Shape& kernel_size, const AvgPoolOptions& options = {})
      : kernel_size(kernel_size), options(options) {}
  explicit AvgPool2d(int64_t kernel_size, const AvgPoolOptions& options = {})
      : AvgPool2d(Shape{kernel_size}, options) {}
  Tensor forward(const Tensor& x) {
    return avg_pool2d(x, kernel_size, options.stride, options.padding, options.ceil_mode,
                      options.count_include_pad);
  }
  std::string extra_repr() const override {
    return detail::describe("kernel_size", kernel_size, "stride",
                            options.stride.empty() ? kernel_size : options.stride, "padding",
                            options.padding);
  }
  std::unique_ptr<AvgPool2d> remake() const {
    return std::make_unique<AvgPool2d>(kernel_size, options);
  }

  const Shape kernel_size;
  const AvgPoolOptions options;
};

class AvgPool1d : public Module<AvgPool1d> {
 public:
  using Options = AvgPoolOptions;
  explicit AvgPool1d(const Shape& kernel_size, const AvgPoolOptions& options = {})
      : kernel_size(kernel_size), options(options) {}
  explicit AvgPool1d(int64_t kernel_size, const AvgPoolOptions& options = {})
      : AvgPool1d(Shape{kernel_size}, options) {}
  Tensor forward(const Tensor& x) {
    return avg_pool1d(x, kernel_size, options.stride, options.padding, options.ceil_mode,
                      options.count_include_pad);
  }
  std::string extra_repr() const override {
    return detail::describe(
        "kernel_size", detail::describe_shape(kernel_size), "stride",
        detail::describe_shape(options.stride.empty() ? kernel_size : options.stride), "padding",
        detail::describe_shape(options.padding));
  }
  std::unique_ptr<AvgPool1d> remake() const {
    return std::make_unique<AvgPool1d>(kernel_size, options);
  }

  const Shape kernel_size;
  const AvgPoolOptions options;
};

// Pools to any output size: each cell averages its share of the input.
class AdaptiveAvgPool2d : public Module<AdaptiveAvgPool2d> {
 public:
  explicit AdaptiveAvgPool2d(const Shape& output_size) : output_size(output_size) {}
  explicit AdaptiveAvgPool2d(int64_t output_size) : AdaptiveAvgPool2d(Shape{output_size}) {}
  Tensor forward(const Tensor& x) { return adaptive_avg_pool2d(x, output_size); }
  std::string extra_repr() const override { return detail::describe("output_size", output_size); }
  std::unique_ptr<AdaptiveAvgPool2d> remake() const {
    return std::make_unique<AdaptiveAvgPool2d>(output_size);
  }

  const Shape output_size;
};

}  // namespace tessera::nn
