#include <tessera/nn/parallel_style.h>

#include <tessera/autograd/ops.h>

namespace tessera::nn {

Tensor Boundary::embedding(const Tensor& index, const Tensor& weight,
                           std::optional<int64_t> padding_idx) const {
  return tessera::embedding(index, weight, padding_idx);
}
Tensor Boundary::linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                      int64_t ignore_index, bool mean) const {
  return tessera::linear_cross_entropy(x, weight, target, ignore_index,
                                       mean ? Reduction::kMean : Reduction::kSum);
}

}  // namespace tessera::nn
