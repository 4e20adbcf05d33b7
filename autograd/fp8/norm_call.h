// The ops' side of autograd/fp8/norm.h. Internal.
#pragma once

#include <optional>

#include <tessera/autograd/fp8/norm.h>
#include <tessera/core/kernels/norm/norm.h>

namespace tessera {

// One call of a norm, decided before it is recorded.
class Fp8Norm {
 public:
  Fp8Norm(const Tensor& x, int64_t columns);
  // kernels::row_norm_forward() without dropout, whose y may have no bytes.
  kernels::RowNorm forward(const Tensor& x, const Tensor& residual, int64_t columns,
                           const Tensor& weight, const Tensor& bias, double eps, bool center) const;

 private:
  std::shared_ptr<Fp8Linear> layer_;  // null: an ordinary call
  kernels::QuantizeWants wants_;
};

// What a norm wrote for this layer instead of x, once; none where x is no such tensor or was not
// written like that. After none, x has bytes.
std::optional<kernels::Quantized> take_normalised(const Tensor& x, const Fp8Linear& layer,
                                                  std::optional<DType> through, bool by_columns);
// x gets its bytes, if a norm left them out.
void write_normalised(const Tensor& x);

}  // namespace tessera
