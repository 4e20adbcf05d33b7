#include <algorithm>
#include <cmath>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/conv/conv.h>
#include <tessera/core/kernels/pool/pool.h>

namespace tessera {

// ---- conv2d, conv1d -----------------------------------------------------------------------------

const Op kConv2d{.name = "conv2d",
                 .marks = MarkRule::kAlongDims,
                 .autocast = Autocast::kLow,
                 .reads = {inputs(1), inputs(0), inputs()}};

namespace {

// One value serves all dimensions; a one-dimensional convolution has height 1.
constexpr int64_t kLargest = (int64_t{1} << 31) - 1;  // products of two are still numbers

void spread(const Op& op, const char* what, const Shape& values, int spatial, int64_t least,
            int64_t (&target)[2]) {
  TS_CHECK(values.size() == 1 || values.size() == spatial, op, what, " must have 1 or ", spatial,
           " values; got ", values);
  for (int64_t value : values) {
    TS_CHECK(value >= least && value <= kLargest, op, what, " must be in [", least, ", ", kLargest,
             "]; got ", values);
  }
  for (int d = 2 - spatial; d < 2; ++d) {
    target[d] = values.size() == 1 ? values[0] : values[d - (2 - spatial)];
  }
}

kernels::ConvGeometry geometry_of(const ConvOptions& options, int spatial) {
  kernels::ConvGeometry geometry;
  spread(kConv2d, "stride", options.stride, spatial, 1, geometry.stride);
  spread(kConv2d, "padding", options.padding, spatial, 0, geometry.padding);
  spread(kConv2d, "dilation", options.dilation, spatial, 1, geometry.dilation);
  geometry.groups = options.groups;
  return geometry;
}

void check_conv(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t groups,
                int spatial) {
  check_defined(kConv2d, "the input", x);
  check_defined(kConv2d, "weight", weight);
  TS_CHECK_SHAPE(x.dim() == spatial + 2 && weight.dim() == spatial + 2, kConv2d,
                 "expects an input [N, C, ...] and a weight [O, C / groups, ...] with ", spatial,
                 " spatial dimensions; got ", x, " and ", weight);
  TS_CHECK(groups >= 1, kConv2d, "groups must be at least 1; got ", groups);
  TS_CHECK_SHAPE(x.size(1) == weight.size(1) * groups && weight.size(0) % groups == 0, kConv2d,
                 "channels do not fit: input ", x, ", weight ", weight, ", groups ", groups,
                 "; the input needs ", weight.size(1) * groups,
                 " and the output's must be a multiple of groups");
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), kConv2d,
                 "expects a bias of [", weight.size(0), "]; got ", bias);
}

void check_conv_dtypes(Inputs in) {
  TS_CHECK_DTYPE(is_floating(in[0].dtype()) && !is_fp8(in[0].dtype()), kConv2d,
                 "expects f64, f32, f16 or bf16; got ", in[0]);
  for (const Tensor& other : in.subspan(1)) {
    TS_CHECK_DTYPE(!other.defined() || other.dtype() == in[0].dtype(), kConv2d,
                   "expects operands of one dtype; got ", in[0], " and ", other,
                   "; convert one with to(dtype)");
  }
}

// Of the convolution and of each of its gradients, which are sums of the same products. y: the
// result or its gradient.
void count_conv(const Tensor& y, const Shape& weight) {
  count_flops(2.0 * static_cast<double>(y.numel()) *
              static_cast<double>(weight[1] * weight[2] * weight[3]));
}

// The convolution and its two gradients are one product of three tensors seen from three sides: the
// gradient of each is made of the other two, so that derivatives of any order exist.
Tensor conv_input_gradient(const Tensor& grad, const Tensor& weight, const Shape& x_shape,
                           const kernels::ConvGeometry& geometry);
Tensor conv_weight_gradient(const Tensor& grad, const Tensor& x, const Shape& weight_shape,
                            const kernels::ConvGeometry& geometry);

Tensor conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
            const kernels::ConvGeometry& geometry) {
  return differentiable(
      kConv2d, {x, weight, bias},
      [&geometry](Inputs in) {
        check_conv_dtypes(in);
        const Tensor result = kernels::conv2d(in[0], in[1], in[2], geometry);
        count_conv(result, in[1].shape());
        return result;
      },
      [geometry](Grads dy, const Saved& s) -> TensorList {
        Tensor grad_x, grad_weight, grad_bias;
        if (s.needs(0)) {
          grad_x = conv_input_gradient(dy[0], s.input(1), s.input_shape(0), geometry);
        }
        if (s.needs(1)) {
          grad_weight =
              weight_gradients({1},
                               [gradient = dy[0], x = s.input(0), shape = s.input_shape(1),
                                geometry]() -> TensorList {
                                 return {conv_weight_gradient(gradient, x, shape, geometry)};
                               })[0];
        }
        if (s.needs(2)) grad_bias = sum(dy[0], {0, 2, 3});
        return {grad_x, grad_weight, grad_bias};
      });
}

Tensor conv_input_gradient(const Tensor& grad, const Tensor& weight, const Shape& x_shape,
                           const kernels::ConvGeometry& geometry) {
  return differentiable(
      kConv2d, {grad, weight},
      [&](Inputs in) {
        count_conv(in[0], in[1].shape());
        return kernels::conv2d_input_gradient(in[0], in[1], x_shape, geometry);
      },
      [geometry](Grads dx, const Saved& s) -> TensorList {
        return {s.needs(0) ? conv(dx[0], s.input(1), {}, geometry) : Tensor(),
                s.needs(1) ? conv_weight_gradient(s.input(0), dx[0], s.input_shape(1), geometry)
                           : Tensor()};
      });
}

Tensor conv_weight_gradient(const Tensor& grad, const Tensor& x, const Shape& weight_shape,
                            const kernels::ConvGeometry& geometry) {
  return differentiable(
      kConv2d, {grad, x},
      [&](Inputs in) {
        count_conv(in[0], weight_shape);
        return kernels::conv2d_weight_gradient(in[0], in[1], weight_shape, geometry);
      },
      [geometry](Grads dw, const Saved& s) -> TensorList {
        return {s.needs(0) ? conv(s.input(1), dw[0], {}, geometry) : Tensor(),
                s.needs(1) ? conv_input_gradient(s.input(0), dw[0], s.input_shape(1), geometry)
                           : Tensor()};
      });
}

void check_output(const kernels::ConvGeometry& geometry, const Tensor& x, const Tensor& weight) {
  TS_CHECK_SHAPE(weight.size(2) > 0 && weight.size(3) > 0 &&
                     geometry.output_size(x.size(2), weight.size(2), 0) > 0 &&
                     geometry.output_size(x.size(3), weight.size(3), 1) > 0,
                 kConv2d, "the kernel of ", weight, " does not fit into the padded input ", x,
                 "; enlarge the padding");
}

}  // namespace

Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvOptions& options) {
  check_conv(x, weight, bias, options.groups, 2);
  const kernels::ConvGeometry geometry = geometry_of(options, 2);
  check_output(geometry, x, weight);
  return conv(x, weight, bias, geometry);
}

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvOptions& options) {
  check_conv(x, weight, bias, options.groups, 1);
  const kernels::ConvGeometry geometry = geometry_of(options, 1);
  const Tensor plane = unsqueeze(x, 2), kernel = unsqueeze(weight, 2);
  check_output(geometry, plane, kernel);
  return squeeze(conv(plane, kernel, bias, geometry), 2);
}

// ---- conv3d -------------------------------------------------------------------------------------

// The planes that meet one output plane are put side by side as channels, and all output planes
// stand as samples.
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias,
              const ConvOptions& options) {
  constexpr const char* kWhere = "conv3d";
  check_conv(x, weight, bias, options.groups, 3);
  const auto three = [&](const char* what, const Shape& values, int64_t least) {
    TS_CHECK(values.size() == 1 || values.size() == 3, kWhere, what,
             " must have 1 or 3 values; got ", values);
    for (const int64_t value : values) {
      TS_CHECK(value >= least && value <= kLargest, kWhere, what, " must be in [", least, ", ",
               kLargest, "]; got ", values);
    }
    return values.size() == 3 ? values : Shape::filled(3, values[0]);
  };
  const Shape stride = three("stride", options.stride, 1);
  const Shape padding = three("padding", options.padding, 0);
  const Shape dilation = three("dilation", options.dilation, 1);
  const int64_t N = x.size(0), C = x.size(1), O = weight.size(0), KD = weight.size(2);
  const int64_t room = x.size(2) + 2 * padding[0] - dilation[0] * (KD - 1) - 1;
  TS_CHECK_SHAPE(KD > 0 && room >= 0, kWhere, "the kernel of ", weight,
                 " does not fit into the padded input ", x, "; enlarge the padding");
  const int64_t OD = room / stride[0] + 1;
  const Tensor padded = padding[0] > 0 ? pad(x, {0, 0, 0, 0, padding[0], padding[0]}) : x;
  TensorList planes;  // [N, OD, C, H, W] of each plane of the kernel
  for (int64_t k = 0; k < KD; ++k) {
    const int64_t first = k * dilation[0];
    planes.push_back(permute(slice(padded, 2, first, first + (OD - 1) * stride[0] + 1, stride[0]),
                             {0, 2, 1, 3, 4}));
  }
  const int64_t H = x.size(3), W = x.size(4);
  const Tensor beside = reshape(stack(planes, 3), {N * OD, C * KD, H, W});
  const Shape kernel = {O, weight.size(1) * KD, weight.size(3), weight.size(4)};
  const Tensor y = conv2d(beside, reshape(weight, kernel), bias,
                          {.stride = {stride[1], stride[2]},
                           .padding = {padding[1], padding[2]},
                           .dilation = {dilation[1], dilation[2]},
                           .groups = options.groups});
  return contiguous(permute(reshape(y, {N, OD, O, y.size(2), y.size(3)}), {0, 2, 1, 3, 4}));
}

// ---- conv_transpose2d, conv_transpose1d ---------------------------------------------------------

const Op kConvTranspose2d{.name = "conv_transpose2d",
                          .marks = MarkRule::kAlongDims,
                          .autocast = Autocast::kLow,
                          .reads = {inputs(1), inputs(0), inputs()}};

namespace {

Tensor conv_transpose(const Tensor& x, const Tensor& weight, const Tensor& bias,
                      const ConvTransposeOptions& options, int spatial) {
  const Op& op = kConvTranspose2d;
  check_defined(op, "the input", x);
  check_defined(op, "weight", weight);
  TS_CHECK_SHAPE(x.dim() == spatial + 2 && weight.dim() == spatial + 2, op,
                 "expects an input [N, C, ...] and a weight [C, O / groups, ...] with ", spatial,
                 " spatial dimensions; got ", x, " and ", weight);
  kernels::ConvGeometry geometry;
  int64_t extra[2] = {0, 0};
  spread(op, "stride", options.stride, spatial, 1, geometry.stride);
  spread(op, "padding", options.padding, spatial, 0, geometry.padding);
  spread(op, "output_padding", options.output_padding, spatial, 0, extra);
  spread(op, "dilation", options.dilation, spatial, 1, geometry.dilation);
  geometry.groups = options.groups;
  TS_CHECK(options.groups >= 1, op, "groups must be at least 1; got ", options.groups);
  TS_CHECK_SHAPE(x.size(1) == weight.size(0) && x.size(1) % options.groups == 0, op,
                 "channels do not fit: input ", x, ", weight ", weight, ", groups ", options.groups,
                 "; the weight's first dimension is the input's channels");
  const int64_t O = weight.size(1) * options.groups;
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == O), op,
                 "expects a bias of [", O, "]; got ", bias);
  const Tensor plane = spatial == 1 ? unsqueeze(x, 2) : x;
  const Tensor kernel = spatial == 1 ? unsqueeze(weight, 2) : weight;
  Shape shape = {x.size(0), O, 0, 0};
  for (int d = 0; d < 2; ++d) {
    TS_CHECK(extra[d] == 0 || extra[d] < std::max(geometry.stride[d], geometry.dilation[d]), op,
             "output_padding must be less than stride or dilation; got ", options.output_padding);
    TS_CHECK_SHAPE(plane.size(2 + d) > 0 && kernel.size(2 + d) > 0, op,
                   "expects an input and a kernel that are not empty; got ", x, " and ", weight);
    shape[2 + d] = (plane.size(2 + d) - 1) * geometry.stride[d] - 2 * geometry.padding[d] +
                   geometry.dilation[d] * (kernel.size(2 + d) - 1) + extra[d] + 1;
    TS_CHECK_SHAPE(shape[2 + d] > 0, op, "the output of ", x, " and the kernel of ", weight,
                   " would be empty; lessen the padding");
    geometry.positions[d] = plane.size(2 + d);
  }
  const Tensor y = differentiable(
      op, {plane, kernel, bias},
      [&](Inputs in) {
        check_conv_dtypes(in);
        count_conv(in[0], in[1].shape());
        const Tensor sums = kernels::conv2d_input_gradient(in[0], in[1], shape, geometry);
        return in[2].defined() ? add(sums, reshape(in[2], {O, 1, 1})) : sums;
      },
      [geometry](Grads dy, const Saved& s) -> TensorList {
        Tensor grad_x, grad_weight, grad_bias;
        if (s.needs(0)) grad_x = conv(dy[0], s.input(1), {}, geometry);
        if (s.needs(1)) {
          grad_weight =
              weight_gradients({1},
                               [gradient = dy[0], x = s.input(0), shape = s.input_shape(1),
                                geometry]() -> TensorList {
                                 return {conv_weight_gradient(x, gradient, shape, geometry)};
                               })[0];
        }
        if (s.needs(2)) grad_bias = sum(dy[0], {0, 2, 3});
        return {grad_x, grad_weight, grad_bias};
      });
  return spatial == 1 ? squeeze(y, 2) : y;
}

}  // namespace

Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose(x, weight, bias, options, 2);
}

Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeOptions& options) {
  return conv_transpose(x, weight, bias, options, 1);
}

// ---- max_pool2d ---------------------------------------------------------------------------------

const Op kMaxPool2d{
    .name = "max_pool2d", .marks = MarkRule::kAlongDims, .reads_outputs = outputs(1)};

namespace {

struct PoolGeometry {
  int64_t kernel[2] = {1, 1};
  kernels::ConvGeometry conv;
  int64_t output[2] = {0, 0};
};

PoolGeometry pool_geometry(const Op& op, const Tensor& x, const Shape& kernel, const Shape& stride,
                           const Shape& padding, const Shape& dilation, bool ceil_mode) {
  TS_CHECK_SHAPE(x.dim() == 3 || x.dim() == 4, op, "expects [N, C, H, W] or [C, H, W]; got ", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), op,
                 "expects f64, f32, f16 or bf16; got ", x);
  PoolGeometry g;
  spread(op, "kernel_size", kernel, 2, 1, g.kernel);
  spread(op, "stride", stride.empty() ? kernel : stride, 2, 1, g.conv.stride);
  spread(op, "padding", padding, 2, 0, g.conv.padding);
  spread(op, "dilation", dilation, 2, 1, g.conv.dilation);
  for (int d = 0; d < 2; ++d) {
    const int64_t input = x.size(-2 + d), step = g.conv.stride[d], pad = g.conv.padding[d];
    TS_CHECK(2 * pad <= g.kernel[d], op, "padding must be at most half of the kernel; got padding ",
             padding, " and kernel ", kernel);
    const int64_t room = input + 2 * pad - g.conv.dilation[d] * (g.kernel[d] - 1) - 1;
    // With ceil_mode a window may stick out, but must begin inside the input or its left padding.
    const int64_t reach = room + (ceil_mode ? step - 1 : 0);
    TS_CHECK_SHAPE(input > 0 && reach >= 0, op, "the kernel ", kernel,
                   " does not fit into the padded input ", x);
    g.output[d] = reach / step + 1;
    if (ceil_mode && (g.output[d] - 1) * step >= input + pad) --g.output[d];
  }
  return g;
}

}  // namespace

ValuesIndices max_pool2d_with_indices(const Tensor& x, const Shape& kernel_size,
                                      const Shape& stride, const Shape& padding,
                                      const Shape& dilation, bool ceil_mode) {
  check_defined(kMaxPool2d, "x", x);
  const PoolGeometry g =
      pool_geometry(kMaxPool2d, x, kernel_size, stride, padding, dilation, ceil_mode);
  const bool dilated = g.conv.dilation[0] > 1 || g.conv.dilation[1] > 1;
  const TensorList result = differentiable(
      kMaxPool2d, {x},
      [&g](Inputs in) {
        const auto [values, indices] =
            kernels::max_pool(in[0], g.kernel, g.conv, g.output[0], g.output[1]);
        return TensorList{values, indices};
      },
      [dilated](Grads dy, const Saved& s) {
        const Shape& shape = s.input_shape(0);
        const int64_t plane = shape[shape.size() - 2] * shape.back();
        const Tensor indices = s.output(1);
        const int64_t window_count = indices.size(-2) * indices.size(-1);
        const int64_t planes = window_count == 0 ? 0 : indices.numel() / window_count;
        const Tensor zero =
            zeros({planes, plane}, {.dtype = dy[0].dtype(), .device = dy[0].device()});
        Tensor places = reshape(indices, {planes, window_count});
        Tensor parts = reshape(dy[0], {planes, window_count});
        if (dilated) {  // windows of padding alone have no place
          const Tensor nowhere = eq(places, plane);
          places = masked_fill(places, nowhere, 0);
          parts = masked_fill(parts, nowhere, 0);
        }
        return reshape(scatter_add(zero, 1, places, parts), shape);
      });
  return {result[0], result[1]};
}

Tensor max_pool2d(const Tensor& x, const Shape& kernel_size, const Shape& stride,
                  const Shape& padding, const Shape& dilation, bool ceil_mode) {
  return max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode).values;
}

// A row is a plane of height 1, in which positions are the same.
ValuesIndices max_pool1d_with_indices(const Tensor& x, const Shape& kernel_size,
                                      const Shape& stride, const Shape& padding,
                                      const Shape& dilation, bool ceil_mode) {
  constexpr const char* kWhere = "max_pool1d";
  TS_CHECK_SHAPE(x.dim() == 2 || x.dim() == 3, kWhere, "expects [N, C, W] or [C, W]; got ", x);
  const auto plane = [&](const char* what, const Shape& values, int64_t rows) {
    TS_CHECK(values.size() == 1, kWhere, what, " must have one value; got ", values);
    return Shape{rows, values[0]};
  };
  const auto [values, indices] = max_pool2d_with_indices(
      unsqueeze(x, -2), plane("kernel_size", kernel_size, 1),
      stride.empty() ? stride : plane("stride", stride, 1), plane("padding", padding, 0),
      plane("dilation", dilation, 1), ceil_mode);
  return {squeeze(values, -2), squeeze(indices, -2)};
}

Tensor max_pool1d(const Tensor& x, const Shape& kernel_size, const Shape& stride,
                  const Shape& padding, const Shape& dilation, bool ceil_mode) {
  return max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode).values;
}

// ---- avg_pool2d, adaptive_avg_pool2d, interpolate: linear maps over windows ---------------------

const Op kAvgPool2d{.name = "avg_pool2d", .marks = MarkRule::kAlongDims};
const Op kAdaptiveAvgPool2d{.name = "adaptive_avg_pool2d", .marks = MarkRule::kAlongDims};
const Op kInterpolate{.name = "interpolate", .marks = MarkRule::kAlongDims};

namespace {

struct WindowMaps {
  kernels::WindowMap rows, columns;
};

Tensor apply_windows_transposed(const Op& op, const Tensor& grad, const WindowMaps& maps);

Tensor apply_windows(const Op& op, const Tensor& x, const WindowMaps& maps) {
  return differentiable(
      op, {x}, [&maps](Inputs in) { return kernels::window_sum(in[0], maps.rows, maps.columns); },
      [&op, maps](Grads dy, const Saved&) { return apply_windows_transposed(op, dy[0], maps); });
}

Tensor apply_windows_transposed(const Op& op, const Tensor& grad, const WindowMaps& maps) {
  return differentiable(
      op, {grad},
      [&maps](Inputs in) { return kernels::window_sum_transposed(in[0], maps.rows, maps.columns); },
      [&op, maps](Grads dx, const Saved&) { return apply_windows(op, dx[0], maps); });
}

kernels::WindowMap average_map(const PoolGeometry& g, int d, int64_t input, bool count_padding) {
  kernels::WindowMap map;
  map.input_size = input;
  for (int64_t i = 0; i < g.output[d]; ++i) {
    const int64_t start = i * g.conv.stride[d] - g.conv.padding[d];
    const int64_t padded_end = std::min(start + g.kernel[d], input + g.conv.padding[d]);
    const int64_t begin = std::max<int64_t>(start, 0), end = std::min(padded_end, input);
    map.begin.push_back(begin);
    map.end.push_back(end);
    map.weight.push_back(1 / static_cast<double>(count_padding ? padded_end - start : end - begin));
  }
  return map;
}

kernels::WindowMap adaptive_map(int64_t input, int64_t output) {
  kernels::WindowMap map;
  map.input_size = input;
  for (int64_t i = 0; i < output; ++i) {
    map.begin.push_back(i * input / output);
    map.end.push_back(((i + 1) * input + output - 1) / output);
    map.weight.push_back(1 / static_cast<double>(map.end.back() - map.begin.back()));
  }
  return map;
}

// torch's index arithmetic, which is in float; factor 0: derived from the sizes. Planes that keep
// their size or double it are read by sizes alone, lines and volumes by the factor as it was given.
kernels::WindowMap nearest_map(int64_t input, int64_t output, double factor, bool plane) {
  kernels::WindowMap map;
  map.input_size = input;
  const float scale = factor > 0 ? static_cast<float>(1 / factor)
                                 : static_cast<float>(input) / static_cast<float>(output);
  for (int64_t i = 0; i < output; ++i) {
    const int64_t nearest = static_cast<int64_t>(std::floor(static_cast<float>(i) * scale));
    int64_t source = std::min(nearest, input - 1);
    if (output == input && (plane || factor == 0)) source = i;
    if (output == 2 * input && plane) source = i / 2;
    map.begin.push_back(source);
    map.end.push_back(source + 1);
    map.weight.push_back(1);
  }
  return map;
}

kernels::WindowMap same_map(int64_t size) { return nearest_map(size, size, 0, false); }

// What one axis is read through: a map, or the lower and the upper neighbours with their shares.
using AxisMaps = std::vector<kernels::WindowMap>;

// torch's places: corners on corners, or pixels as areas. factor 0: derived from the sizes.
AxisMaps linear_maps(int64_t input, int64_t output, double factor, bool align_corners) {
  AxisMaps maps(2);
  const double last = static_cast<double>(input - 1);
  const double step = align_corners ? (output > 1 ? last / static_cast<double>(output - 1) : 0)
                      : factor > 0  ? 1 / factor
                                    : static_cast<double>(input) / static_cast<double>(output);
  for (int64_t i = 0; i < output; ++i) {
    const double at = static_cast<double>(i);
    const double place = std::clamp(align_corners ? at * step : (at + 0.5) * step - 0.5, 0.0, last);
    const int64_t lower = static_cast<int64_t>(place);
    const double share = place - static_cast<double>(lower);
    for (int64_t k = 0; k < 2; ++k) {
      kernels::WindowMap& map = maps[static_cast<size_t>(k)];
      map.input_size = input;
      map.begin.push_back(std::min(lower + k, input - 1));
      map.end.push_back(map.begin.back() + 1);
      map.weight.push_back(k == 0 ? 1 - share : share);
    }
  }
  return maps;
}

// One axis after the other where either has two maps, both at once otherwise.
Tensor apply_axes(const Tensor& x, const AxisMaps& rows, const AxisMaps& columns) {
  if (rows.size() == 1 && columns.size() == 1) {
    return apply_windows(kInterpolate, x, {rows[0], columns[0]});
  }
  const auto both = [](const Tensor& x, const WindowMaps& first, const WindowMaps& second) {
    return add(apply_windows(kInterpolate, x, first), apply_windows(kInterpolate, x, second));
  };
  const kernels::WindowMap same = same_map(x.size(-1));
  const Tensor y = rows.size() == 1 ? x : both(x, {rows[0], same}, {rows[1], same});
  if (columns.size() == 1) return y;
  const kernels::WindowMap lines = same_map(y.size(-2));
  return both(y, {lines, columns[0]}, {lines, columns[1]});
}

}  // namespace

Tensor avg_pool2d(const Tensor& x, const Shape& kernel_size, const Shape& stride,
                  const Shape& padding, bool ceil_mode, bool count_include_pad) {
  check_defined(kAvgPool2d, "x", x);
  const PoolGeometry g = pool_geometry(kAvgPool2d, x, kernel_size, stride, padding, {1}, ceil_mode);
  return apply_windows(kAvgPool2d, x,
                       {average_map(g, 0, x.size(-2), count_include_pad),
                        average_map(g, 1, x.size(-1), count_include_pad)});
}

// A row is a plane of height 1.
Tensor avg_pool1d(const Tensor& x, const Shape& kernel_size, const Shape& stride,
                  const Shape& padding, bool ceil_mode, bool count_include_pad) {
  constexpr const char* kWhere = "avg_pool1d";
  TS_CHECK_SHAPE(x.defined() && (x.dim() == 2 || x.dim() == 3), kWhere,
                 "expects [N, C, W] or [C, W]; got ", x);
  const auto plane = [&](const char* what, const Shape& values, int64_t rows) {
    TS_CHECK(values.size() == 1, kWhere, what, " must have one value; got ", values);
    return Shape{rows, values[0]};
  };
  return squeeze(avg_pool2d(unsqueeze(x, -2), plane("kernel_size", kernel_size, 1),
                            stride.empty() ? stride : plane("stride", stride, 1),
                            plane("padding", padding, 0), ceil_mode, count_include_pad),
                 -2);
}

Tensor adaptive_avg_pool2d(const Tensor& x, const Shape& output_size) {
  check_defined(kAdaptiveAvgPool2d, "x", x);
  TS_CHECK_SHAPE(x.dim() == 3 || x.dim() == 4, kAdaptiveAvgPool2d,
                 "expects [N, C, H, W] or [C, H, W]; got ", x);
  TS_CHECK_SHAPE(x.size(-2) > 0 && x.size(-1) > 0, kAdaptiveAvgPool2d,
                 "expects planes that are not empty; got ", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), kAdaptiveAvgPool2d,
                 "expects f64, f32, f16 or bf16; got ", x);
  int64_t output[2];
  spread(kAdaptiveAvgPool2d, "output_size", output_size, 2, 0, output);
  return apply_windows(kAdaptiveAvgPool2d, x,
                       {adaptive_map(x.size(-2), output[0]), adaptive_map(x.size(-1), output[1])});
}

Tensor interpolate(const Tensor& given, const Shape& size, std::span<const double> scale_factor,
                   Interpolation mode, bool align_corners) {
  check_defined(kInterpolate, "x", given);
  const bool linear = mode == Interpolation::kLinear;
  TS_CHECK(linear || !align_corners, kInterpolate, "align_corners is of linear interpolation only");
  // Sums of two products: those of 16-bit numbers are rounded once.
  const bool widens = linear && (given.dtype() == kF16 || given.dtype() == kBF16);
  const Tensor x = widens ? to(given, kF32) : given;
  const int spatial = x.dim() - 2;
  TS_CHECK_SHAPE(spatial >= 1 && spatial <= 3, kInterpolate,
                 "expects [N, C, ...] with one to three spatial dimensions; got ", x);
  TS_CHECK_DTYPE(is_floating(x.dtype()) && !is_fp8(x.dtype()), kInterpolate,
                 "expects f64, f32, f16 or bf16; got ", x);
  TS_CHECK(size.empty() != scale_factor.empty(), kInterpolate,
           "expects a size or factors, one of the two");
  const int values = size.empty() ? static_cast<int>(scale_factor.size()) : size.size();
  TS_CHECK(values == spatial || values == 1, kInterpolate,
           "expects one value, or one for each of the ", spatial, " spatial dimensions of ", x);
  std::vector<AxisMaps> maps;
  Shape result_shape = x.shape();
  for (int d = 0; d < spatial; ++d) {
    const int64_t input = x.size(2 + d);
    const int place = values == 1 ? 0 : d;
    const double factor = size.empty() ? scale_factor[static_cast<size_t>(place)] : 0;
    TS_CHECK(!size.empty() || (std::isfinite(factor) && factor > 0), kInterpolate,
             "factors must be positive; got ", factor);
    const int64_t output =
        size.empty() ? static_cast<int64_t>(std::floor(static_cast<double>(input) * factor))
                     : size[place];
    TS_CHECK_SHAPE(input > 0 && output > 0, kInterpolate, "sizes must be positive: dimension ",
                   2 + d, " goes from ", input, " to ", output);
    if (linear && input == output) {  // by whatever factor, as torch has it
      maps.push_back({same_map(input)});
    } else if (linear) {
      maps.push_back(linear_maps(input, output, factor, align_corners));
    } else {
      maps.push_back({nearest_map(input, output, factor, spatial == 2)});
    }
    result_shape[2 + d] = output;
  }
  const int64_t N = x.size(0), C = x.size(1);
  Tensor y;
  if (spatial == 1) {
    y = squeeze(apply_axes(unsqueeze(x, 2), {same_map(1)}, maps[0]), 2);
  } else if (spatial == 2) {
    y = apply_axes(x, maps[0], maps[1]);
  } else {
    // Three dimensions: the last two, then the first over rows of what they gave.
    const Tensor planes =
        apply_axes(reshape(x, {N, C * x.size(2), x.size(3), x.size(4)}), maps[1], maps[2]);
    const int64_t row = result_shape[3] * result_shape[4];
    y = reshape(apply_axes(reshape(planes, {N, C, x.size(2), row}), maps[0], {same_map(row)}),
                result_shape);
  }
  return to(y, given.dtype());
}

}  // namespace tessera
