// Initial values: torch.nn.init on named random streams.
//
// Every function writes its tensor in place, without recording, and returns it. Random functions
// take the next stream of the context unless one is given; a module passes the stream of the
// parameter's dotted name, so that values depend on seed and name alone (see module.h):
//
//     for (const auto& [name, tensor] : model.named_parameters()) {
//       if (tensor.dim() >= 2) init::normal(tensor, 0, 0.02, named_random_stream(name));
//     }
//
// Tensors may have any floating dtype and device. A meta tensor records what was done to it and is
// filled when it gets memory (materialise.h). Throws DTypeError, ShapeError, ValueError.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <tessera/core/factory/initial_values.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::nn::init {

using Stream = std::optional<RandomStream>;

enum class FanMode { kFanIn, kFanOut };
enum class Nonlinearity { kLinear, kSigmoid, kTanh, kRelu, kLeakyRelu, kSelu };

// The factor by which a nonlinearity shrinks the standard deviation; slope: that of leaky_relu.
double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);

// Numbers of inputs and outputs of one element: weight [out, in, kernel...]. Needs 2 dimensions.
struct Fans {
  int64_t in;
  int64_t out;
};
Fans calculate_fans(const Tensor& weight);

const Tensor& constant(const Tensor& x, double value);
const Tensor& zeros(const Tensor& x);
const Tensor& ones(const Tensor& x);
const Tensor& uniform(const Tensor& x, double low = 0, double high = 1, Stream stream = {});
const Tensor& normal(const Tensor& x, double mean = 0, double std = 1, Stream stream = {});
// Truncated normal in [low, high], by inversion: one random number an element.
const Tensor& trunc_normal(const Tensor& x, double mean = 0, double std = 1, double low = -2,
                           double high = 2, Stream stream = {});
const Tensor& eye(const Tensor& x);  // 2-D
// Convolution weights [out, in / groups, kernel...] that pass their input through.
const Tensor& dirac(const Tensor& x, int64_t groups = 1);

// Your own formulas. They run at once on a tensor with memory. On a meta tensor they run when it
// gets memory, on each rank for the elements that it holds and perhaps for a few at a time, so they
// must capture by value, and an element's value may depend on its position only.
//
//     const Tensor table = rand({weight.numel()});
//     init::by_range(weight, [table](const Tensor& piece, int64_t first) {
//       piece.copy_(table.narrow(0, first, piece.numel()));
//     });
//     init::by_index(scale, [](int64_t i) { return 1 / (1 + 0.5 * static_cast<double>(i)); });
const Tensor& by_range(const Tensor& x, FillRange fill);
// The value of the i-th element in row-major order.
const Tensor& by_index(const Tensor& x, std::function<double(int64_t i)> value);

// Glorot, Bengio 2010: bound gain * sqrt(6 / (in + out)), std gain * sqrt(2 / (in + out)).
const Tensor& xavier_uniform(const Tensor& x, double gain = 1, Stream stream = {});
const Tensor& xavier_normal(const Tensor& x, double gain = 1, Stream stream = {});
// He et al. 2015: std = gain / sqrt(fan), bound sqrt(3) * std. slope: that of leaky_relu.
struct KaimingOptions {
  double slope = 0;
  FanMode mode = FanMode::kFanIn;
  Nonlinearity nonlinearity = Nonlinearity::kLeakyRelu;
};
const Tensor& kaiming_uniform(const Tensor& x, const KaimingOptions& options = {},
                              Stream stream = {});
const Tensor& kaiming_normal(const Tensor& x, const KaimingOptions& options = {},
                             Stream stream = {});
// Saxe et al. 2013: rows (or columns, whichever are fewer) are orthonormal, times gain. Dimensions
// after the first are flattened. O(rows * columns * min(rows, columns)), also if a shard of a meta
// tensor gets memory: every rank then computes the whole matrix, in f64.
const Tensor& orthogonal(const Tensor& x, double gain = 1, Stream stream = {});
// Martens 2010: 2-D; a fraction `sparsity` of each column is zero, the rest normal. For a shard the
// whole matrix is computed, as by orthogonal().
const Tensor& sparse(const Tensor& x, double sparsity, double std = 0.01, Stream stream = {});

}  // namespace tessera::nn::init
