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

  // Who takes this layer's calls in fp8, or counts those that a recipe leaves out; mostly nobody.
  // Owned by whoever set it (precision/fp8_linear.h).
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

// The layers of a part that read what it gets, and nobody else does, and whose result it returns as
// it is; for nn/transformer/residual.h. Null where there is no such layer.
struct PartEnds {
  const Linear* first = nullptr;
  const Linear* last = nullptr;
};

}  // namespace tessera::nn
