#include <tessera/nn/conv.h>

#include <cmath>

#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>

namespace tessera::nn::detail {
namespace {

Shape for_all_dims(const Shape& sizes, int dims, const char* what) {
  TS_CHECK(sizes.size() == 1 || sizes.size() == dims, "conv", what, " has ", sizes.size(),
           " values; needs 1 or ", dims);
  return sizes.size() == dims ? sizes : Shape::filled(dims, sizes[0]);
}

ConvLayerOptions for_all_dims(ConvLayerOptions options, int dims) {
  options.stride = for_all_dims(options.stride, dims, "stride");
  options.padding = for_all_dims(options.padding, dims, "padding");
  options.dilation = for_all_dims(options.dilation, dims, "dilation");
  return options;
}

Shape weight_shape(int64_t in, int64_t out, const Shape& kernel, int64_t groups) {
  TS_CHECK(groups > 0 && in % groups == 0 && out % groups == 0, "conv", groups,
           " groups do not divide ", in, " input and ", out, " output channels");
  Shape shape = {out, in / groups};
  for (const int64_t size : kernel) shape.push_back(size);
  return shape;
}

// torch's bounds, for convolutions both ways. stream(name): of the parameter's initial values.
template <class Stream>
void reset_uniform(const Tensor& weight, const Tensor& bias, const Stream& stream) {
  const int64_t fan_in = init::calculate_fans(weight).in;
  if (fan_in == 0) return;
  const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
  init::uniform(weight, -bound, bound, stream("weight"));
  if (bias.defined()) init::uniform(bias, -bound, bound, stream("bias"));
}

}  // namespace

template <class Derived, int kDims>
ConvModule<Derived, kDims>::ConvModule(int64_t in_channels, int64_t out_channels,
                                       const Shape& kernel_size, const ConvLayerOptions& options)
    : in_channels(in_channels),
      out_channels(out_channels),
      kernel_size(for_all_dims(kernel_size, kDims, "kernel_size")),
      options(for_all_dims(options, kDims)),
      weight(this->parameter(
          "weight", weight_shape(in_channels, out_channels, this->kernel_size, options.groups))),
      bias(options.bias ? this->parameter("bias", Shape{out_channels})
                        : this->parameter("bias", Tensor())) {
  if (options.same_padding) {
    for (const int64_t stride : this->options.stride) {
      TS_CHECK(stride == 1, "conv", "same_padding needs stride 1; got ", this->options.stride);
    }
  }
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

template <class Derived, int kDims>
void ConvModule<Derived, kDims>::reset_parameters() {
  reset_uniform(weight, bias, [this](const char* name) { return this->initial_stream(name); });
}

template <class Derived, int kDims>
Tensor ConvModule<Derived, kDims>::forward(const Tensor& x) {
  ConvOptions conv{.stride = options.stride,
                   .padding = options.padding,
                   .dilation = options.dilation,
                   .groups = options.groups};
  const bool batched = x.dim() != kDims + 1;
  Tensor padded = batched ? x : unsqueeze(x, 0);
  if (options.same_padding) {
    // Even totals go to the op; an odd one is padded by hand at the end.
    Shape rest;
    bool uneven = false;
    for (int d = kDims - 1; d >= 0; --d) {
      const int64_t total = options.dilation[d] * (kernel_size[d] - 1);
      conv.padding[d] = total / 2;
      rest.push_back(0), rest.push_back(total % 2);
      uneven |= total % 2 != 0;
    }
    if (uneven) padded = pad(padded, rest);
  }
  const auto op = kDims == 1 ? conv1d : kDims == 2 ? conv2d : conv3d;
  const Tensor y = op(padded, weight, bias, conv);
  return batched ? y : squeeze(y, 0);
}

template <class Derived, int kDims>
std::string ConvModule<Derived, kDims>::extra_repr() const {
  std::string text = std::to_string(in_channels) + ", " + std::to_string(out_channels) + ", " +
                     "kernel_size=" + describe_shape(kernel_size) +
                     ", stride=" + describe_shape(options.stride);
  const auto differs = [](const Shape& sizes, int64_t value) {
    return sizes != Shape::filled(sizes.size(), value);
  };
  if (options.same_padding) text += ", padding=same";
  if (differs(options.padding, 0)) text += ", padding=" + describe_shape(options.padding);
  if (differs(options.dilation, 1)) text += ", dilation=" + describe_shape(options.dilation);
  if (options.groups != 1) text += ", groups=" + std::to_string(options.groups);
  if (!options.bias) text += ", bias=False";
  return text;
}

template class ConvModule<Conv1d, 1>;
template class ConvModule<Conv2d, 2>;
template class ConvModule<Conv3d, 3>;

// ---- Transposed
// ----------------------------------------------------------------------------------

namespace {

ConvTransposeLayerOptions for_all_dims(ConvTransposeLayerOptions options, int dims) {
  options.stride = for_all_dims(options.stride, dims, "stride");
  options.padding = for_all_dims(options.padding, dims, "padding");
  options.output_padding = for_all_dims(options.output_padding, dims, "output_padding");
  options.dilation = for_all_dims(options.dilation, dims, "dilation");
  return options;
}

bool differs(const Shape& sizes, int64_t value) {
  return sizes != Shape::filled(sizes.size(), value);
}

}  // namespace

template <class Derived, int kDims>
ConvTransposeModule<Derived, kDims>::ConvTransposeModule(int64_t in_channels, int64_t out_channels,
                                                         const Shape& kernel_size,
                                                         const ConvTransposeLayerOptions& options)
    : in_channels(in_channels),
      out_channels(out_channels),
      kernel_size(for_all_dims(kernel_size, kDims, "kernel_size")),
      options(for_all_dims(options, kDims)),
      // [in, out / groups, kernel...]: that of a convolution from the outputs to the inputs.
      weight(this->parameter(
          "weight", weight_shape(out_channels, in_channels, this->kernel_size, options.groups))),
      bias(options.bias ? this->parameter("bias", Shape{out_channels})
                        : this->parameter("bias", Tensor())) {
  if (ParameterDefaultsGuard::current().initialise) reset_parameters();
}

template <class Derived, int kDims>
void ConvTransposeModule<Derived, kDims>::reset_parameters() {
  reset_uniform(weight, bias, [this](const char* name) { return this->initial_stream(name); });
}

template <class Derived, int kDims>
Tensor ConvTransposeModule<Derived, kDims>::forward(const Tensor& x, const Shape& output_size) {
  const bool batched = x.dim() != kDims + 1;
  const Tensor input = batched ? x : unsqueeze(x, 0);
  Shape output_padding = options.output_padding;
  if (!output_size.empty()) {
    TS_CHECK_SHAPE(output_size.size() == kDims && input.dim() == kDims + 2, this->type_name(),
                   "needs an output_size of ", kDims, " values; got ", output_size, " for ", x);
    for (int d = 0; d < kDims; ++d) {
      const int64_t least = (input.size(2 + d) - 1) * options.stride[d] - 2 * options.padding[d] +
                            options.dilation[d] * (kernel_size[d] - 1) + 1;
      output_padding[d] = output_size[d] - least;
      TS_CHECK_SHAPE(output_padding[d] >= 0 && output_padding[d] < options.stride[d],
                     this->type_name(), "gives ", least, " to ", least + options.stride[d] - 1,
                     " elements in dimension ", 2 + d, " of ", x, "; output_size asks for ",
                     output_size[d]);
    }
  }
  const ConvTransposeOptions conv{.stride = options.stride,
                                  .padding = options.padding,
                                  .output_padding = output_padding,
                                  .groups = options.groups,
                                  .dilation = options.dilation};
  const Tensor y = kDims == 1 ? conv_transpose1d(input, weight, bias, conv)
                              : conv_transpose2d(input, weight, bias, conv);
  return batched ? y : squeeze(y, 0);
}

template <class Derived, int kDims>
std::string ConvTransposeModule<Derived, kDims>::extra_repr() const {
  std::string text = std::to_string(in_channels) + ", " + std::to_string(out_channels) + ", " +
                     "kernel_size=" + describe_shape(kernel_size) +
                     ", stride=" + describe_shape(options.stride);
  if (differs(options.padding, 0)) text += ", padding=" + describe_shape(options.padding);
  if (differs(options.dilation, 1)) text += ", dilation=" + describe_shape(options.dilation);
  if (differs(options.output_padding, 0))
    text += ", output_padding=" + describe_shape(options.output_padding);
  if (options.groups != 1) text += ", groups=" + std::to_string(options.groups);
  if (!options.bias) text += ", bias=False";
  return text;
}

template class ConvTransposeModule<ConvTranspose1d, 1>;
template class ConvTransposeModule<ConvTranspose2d, 2>;

}  // namespace tessera::nn::detail
