// Affine maps of the last dimension.
#pragma once

#include <memory>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

struct LinearOptions {
  bool bias = true;
};
// y = x W^T + b. x: [..., in_features]; result [..., out_features]. weight: [out, in], bias: [out],
// both uniform in +-1/sqrt(in) at first.
class Linear : public Module<Linear> {
 public:
  using Options = LinearOptions;
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  Tensor forward(const Tensor& x);
  void reset_parameters();
  std::string extra_repr() const override;
  std::unique_ptr<Linear> remake() const {
    return std::make_unique<Linear>(in_features, out_features, options);
  }

  // Runs this layer's calls in fp8, or counts the calls of a layer that a recipe leaves out;
  // usually null. Owned by whoever set it (precision/fp8_linear.h).
  std::shared_ptr<Fp8Linear> fp8() const { return fp8_.lock(); }
  void set_fp8(const std::shared_ptr<Fp8Linear>& layer) { fp8_ = layer; }

  const int64_t in_features;
  const int64_t out_features;
  const LinearOptions options;
  const Tensor& weight;
  const Tensor& bias;  // undefined without one

 private:
  std::weak_ptr<Fp8Linear> fp8_;
};

// The layers of a block that alone read its input, and the layer whose result it returns unchanged,
// for nn/transformer/residual.h. Null if there is no such layer.
struct PartEnds {
  const Linear* first = nullptr;
  const Linear* last = nullptr;
};

}  // namespace tessera::nn
