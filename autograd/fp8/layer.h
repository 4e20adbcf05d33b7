// Linear layers whose three products run in fp8.
//
// | product         | quantized along the sum                 |
// |-----------------|-----------------------------------------|
// | y = x W^T       | x and W along their columns             |
// | grad_x = dy W   | dy along its columns, W along its rows  |
// | grad_W = dy^T x | dy and x along their rows               |
//
// An nn::Linear in fp8 has an Fp8Linear (set by precision/fp8_linear.h), which the module's forward
// asks. Backward keeps one byte an element of x instead of x: products read the bytes. The weight
// is quantized from the leaf itself, whatever autocast makes of x, and kept until the leaf is
// written (autograd/weight_cache.h). The result and the gradients have the dtype that autocast
// gives x; a bias is added to the rounded result; its gradient is the sum of dy before
// quantization.
//
// On a GPU each operand is made by rows and, if backward needs that, by columns, in one pass; for x
// the copy by columns is kept. The result's product has fast accumulation; those of gradients do
// not, nor do those with scales that change along the sum; the bias is added before the rounding.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <tessera/core/kernels/fp8/quantize.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

enum class Fp8Role : uint8_t { kInput, kWeight, kGradOutput };
inline constexpr int kNumFp8Roles = 3;

// How each operand of the products is quantized. Equal ones are made once.
struct Fp8Casts {
  kernels::QuantizeOptions input, weight;                // of y
  kernels::QuantizeOptions grad_output, weight_of_grad;  // of grad_x
  // For grad_W. Without it that product runs in the dtype of x, and x is kept.
  std::optional<kernels::QuantizeOptions> grad_output_of_weight, input_of_weight;
};

class Fp8Linear {
 public:
  virtual ~Fp8Linear() = default;
  virtual const Fp8Casts& casts() const = 0;
  // Whether it belongs to a layer that a recipe leaves out: it counts calls, and takes none of
  // them.
  virtual bool is_left_out() const { return false; }
  // Whether this call runs in fp8; if false it runs as without a recipe. `rows`: those of x, whose
  // dtype is that of the products' results. May throw.
  virtual bool takes(const Tensor& x, const Tensor& weight, int64_t rows) = 0;
  // takes() without side effects: nothing is counted, nothing throws.
  virtual bool could_take(const Tensor& x, const Tensor& weight, int64_t rows) const = 0;
  // One f32 scale for the whole operand; undefined: from the current values.
  virtual Tensor scale(Fp8Role) { return {}; }
  // Where a GPU records the counts of the next quantization of an operand.
  virtual kernels::QuantizeWants notes(Fp8Role) { return {}; }
  // Called after a quantization of `x`, also in recomputations (autograd/checkpoint.h).
  virtual void saw(Fp8Role, const Tensor& x, const kernels::Quantized& q) {
    static_cast<void>(x), static_cast<void>(q);
  }
};

// linear(x, weight, bias) as `layer` decides: in fp8, or without it. Throws what linear() and
// kernels::quantize() throw, and what takes() does.
Tensor linear_by(const std::shared_ptr<Fp8Linear>& layer, const Tensor& x, const Tensor& weight,
                 const Tensor& bias);

// x W^T + bias by `layer`. x: [..., in]; weight: [out, in]; bias: [out] or undefined. No second
// derivatives. Throws what linear() and kernels::quantize() throw.
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  std::shared_ptr<Fp8Linear> layer);

// out_weight gelu(weight x^T + bias) + out_bias by two such layers with one scale a tensor: as
// fp8_linear(gelu(fp8_linear(x))) to the bit, with gelu and its gradient inside of the
// quantizations, so that a GPU stores neither. Kept: x and gelu(..) as bytes, and what gelu took.
Tensor fp8_linear_gelu_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                              std::shared_ptr<Fp8Linear> layer, const Tensor& out_weight,
                              const Tensor& out_bias, std::shared_ptr<Fp8Linear> out_layer,
                              bool tanh_form);

}  // namespace tessera
