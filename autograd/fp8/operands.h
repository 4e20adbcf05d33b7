// The operands that a call of an fp8 layer quantizes, and those that backward reads. Internal.
#pragma once

#include <optional>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/autograd/op.h>

namespace tessera {

struct Fp8Kept {
  Tensor x, x_scales;  // for grad_W: bytes, or x itself without scales; undefined if unused
  Tensor weight, weight_scales;  // for grad_x
};
// An operand from saved bytes, as a product of backward takes it: by columns on a GPU.
inline kernels::Quantized fp8_kept(const Tensor& bytes, const Tensor& inverse,
                                   const kernels::ScaleTile& tile) {
  const bool by_columns = bytes.device().is_cuda();
  return {.values = by_columns ? Tensor() : bytes,
          .transposed = by_columns ? bytes : Tensor(),
          .inverse = inverse,
          .tile = tile};
}

struct Fp8Operands {
  Tensor rows;                   // x as a matrix
  kernels::Quantized x, weight;  // for the result
  bool wants_x = false, wants_weight = false;
  kernels::Quantized x_of_weight;     // for grad_W, if it runs in fp8
  kernels::Quantized weight_of_grad;  // for grad_x
  Fp8Kept kept() const;
};

// The copy that backward reads (by columns on a GPU), and its scales.
inline const Tensor& fp8_to_keep(const kernels::Quantized& q) {
  return q.device().is_cuda() ? q.transposed : q.values;
}
inline const Tensor& fp8_scales_to_keep(const kernels::Quantized& q) {
  return q.inverse_by_columns.defined() ? q.inverse_by_columns : q.inverse;
}

// The cached bytes of a weight; tells the layer when they are new.
kernels::Quantized fp8_weight(const Tensor& weight, const kernels::QuantizeOptions& options,
                              Fp8Linear& layer);

// dy for the products that are wanted, and the sums of its columns if the same pass made them.
struct Fp8Gradient {
  kernels::Quantized of_x, of_weight;  // for grad_x and grad_W
  Tensor sums = {};
};
struct Fp8GradientWants {
  bool x = false, weight = false;  // `weight` only if that product runs in fp8
  bool sums = false;
  Tensor factor = {};  // see QuantizeWants
};
// dy: [rows, out]. Tells the layer.
Fp8Gradient fp8_gradient(const Tensor& dy, Fp8Linear& layer, const Fp8GradientWants& wanted);
// The wants of one quantization for both products.
inline kernels::QuantizeWants fp8_grad_wants(Fp8Linear& layer, bool by_rows, bool by_columns,
                                             bool sums) {
  kernels::QuantizeWants wants = layer.notes(Fp8Role::kGradOutput);
  wants.by_rows = by_rows;
  wants.by_columns = by_columns;
  wants.sums = sums;
  return wants;
}

inline double fp8_flops(int64_t m, int64_t n, int64_t k) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
}

// x as [rows, features], contiguous.
Tensor fp8_rows(const Tensor& x);

// Quantizes x (in autocast's dtype, or rounded to `through`) and the leaf `weight` as layer.casts()
// says, and tells the layer. Throws as fp8_linear().
Fp8Operands fp8_operands(const Op& op, const Tensor& x, const Tensor& weight, Fp8Linear& layer,
                         std::optional<DType> through = {});

// The dtype to which a GPU rounds an f32 x while it quantizes it, because autocast would make a
// tensor of that dtype first; absent if it would not or if x itself is kept.
std::optional<DType> fp8_through(const Tensor& x, const Fp8Casts& casts);

}  // namespace tessera
