// Convolutions.
#pragma once

#include <memory>
#include <optional>

#include <tessera/nn/module.h>

namespace tessera::nn {

// One value serves all spatial dimensions.
struct ConvLayerOptions {
  Shape stride = {1};
  Shape padding = {0};
  Shape dilation = {1};
  int64_t groups = 1;
  bool bias = true;
  // Pads so that the output has the input's size; needs stride 1. Where the total is odd, the end
  // gets one more. torch: padding="same".
  bool same_padding = false;
};

namespace detail {
template <class Derived, int kDims>
class ConvModule : public Module<Derived> {
 public:
  using Options = ConvLayerOptions;
  ConvModule(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
             const ConvLayerOptions& options);
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;

  const int64_t in_channels;
  const int64_t out_channels;
  const Shape kernel_size;
  const ConvLayerOptions options;
  const Tensor& weight;  // [out, in / groups, kernel...], uniform in +-1/sqrt(fan in) at first
  const Tensor& bias;    // [out] or undefined, uniform in the same bounds
};
}  // namespace detail

// x: [N, C, L] or [C, L].
class Conv1d : public detail::ConvModule<Conv1d, 1> {
 public:
  Conv1d(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
         const ConvLayerOptions& options = {})
      : ConvModule(in_channels, out_channels, kernel_size, options) {}
  Conv1d(int64_t in_channels, int64_t out_channels, int64_t kernel_size,
         const ConvLayerOptions& options = {})
      : Conv1d(in_channels, out_channels, Shape{kernel_size}, options) {}
  std::unique_ptr<Conv1d> remake() const {
    return std::make_unique<Conv1d>(in_channels, out_channels, kernel_size, options);
  }
};
// x: [N, C, H, W] or [C, H, W].
class Conv2d : public detail::ConvModule<Conv2d, 2> {
 public:
  Conv2d(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
         const ConvLayerOptions& options = {})
      : ConvModule(in_channels, out_channels, kernel_size, options) {}
  Conv2d(int64_t in_channels, int64_t out_channels, int64_t kernel_size,
         const ConvLayerOptions& options = {})
      : Conv2d(in_channels, out_channels, Shape{kernel_size}, options) {}
  std::unique_ptr<Conv2d> remake() const {
    return std::make_unique<Conv2d>(in_channels, out_channels, kernel_size, options);
  }
};

// x: [N, C, D, H, W] or [C, D, H, W].
class Conv3d : public detail::ConvModule<Conv3d, 3> {
 public:
  Conv3d(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
         const ConvLayerOptions& options = {})
      : ConvModule(in_channels, out_channels, kernel_size, options) {}
  Conv3d(int64_t in_channels, int64_t out_channels, int64_t kernel_size,
         const ConvLayerOptions& options = {})
      : Conv3d(in_channels, out_channels, Shape{kernel_size}, options) {}
  std::unique_ptr<Conv3d> remake() const {
    return std::make_unique<Conv3d>(in_channels, out_channels, kernel_size, options);
  }
};

// ---- Transposed ---------------------------------------------------------------------------------

struct ConvTransposeLayerOptions {
  Shape stride = {1};
  Shape padding = {0};
  Shape output_padding = {0};
  int64_t groups = 1;
  bool bias = true;
  Shape dilation = {1};
};

namespace detail {
template <class Derived, int kDims>
class ConvTransposeModule : public Module<Derived> {
 public:
  using Options = ConvTransposeLayerOptions;
  ConvTransposeModule(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
                      const ConvTransposeLayerOptions& options);
  // output_size: the spatial sizes, where several inputs of a convolution have one output's size;
  // it takes the place of output_padding.
  Tensor forward(const Tensor& x, const Shape& output_size = {});
  void reset_parameters();
  std::string extra_repr() const override;

  const int64_t in_channels;
  const int64_t out_channels;
  const Shape kernel_size;
  const ConvTransposeLayerOptions options;
  // Uniform in +-1/sqrt(fan in) at first, where fan in is that of [in, out / groups, kernel...] as
  // torch counts it: out / groups times the kernel's elements.
  const Tensor& weight;
  const Tensor& bias;  // [out] or undefined, uniform in the same bounds
};
}  // namespace detail

// x: [N, C, L] or [C, L].
class ConvTranspose1d : public detail::ConvTransposeModule<ConvTranspose1d, 1> {
 public:
  ConvTranspose1d(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
                  const ConvTransposeLayerOptions& options = {})
      : ConvTransposeModule(in_channels, out_channels, kernel_size, options) {}
  ConvTranspose1d(int64_t in_channels, int64_t out_channels, int64_t kernel_size,
                  const ConvTransposeLayerOptions& options = {})
      : ConvTranspose1d(in_channels, out_channels, Shape{kernel_size}, options) {}
  std::unique_ptr<ConvTranspose1d> remake() const {
    return std::make_unique<ConvTranspose1d>(in_channels, out_channels, kernel_size, options);
  }
};
// x: [N, C, H, W] or [C, H, W].
class ConvTranspose2d : public detail::ConvTransposeModule<ConvTranspose2d, 2> {
 public:
  ConvTranspose2d(int64_t in_channels, int64_t out_channels, const Shape& kernel_size,
                  const ConvTransposeLayerOptions& options = {})
      : ConvTransposeModule(in_channels, out_channels, kernel_size, options) {}
  ConvTranspose2d(int64_t in_channels, int64_t out_channels, int64_t kernel_size,
                  const ConvTransposeLayerOptions& options = {})
      : ConvTranspose2d(in_channels, out_channels, Shape{kernel_size}, options) {}
  std::unique_ptr<ConvTranspose2d> remake() const {
    return std::make_unique<ConvTranspose2d>(in_channels, out_channels, kernel_size, options);
  }
};

}  // namespace tessera::nn
