// Declares which layer alone reads the result of a norm.
//
//     const nn::ReadBy scope(dense);  // of norms called until the block ends
//     Tensor normed = ln(x);
//
// If that layer runs in fp8 on a GPU and its scale is known before, the norm may write the layer's
// operand instead of a result (autograd/fp8/norm.h); another reader triggers the calculation of the
// result. Otherwise the scope changes nothing.
#pragma once

#include <tessera/autograd/fp8/norm.h>
#include <tessera/core/context.h>
#include <tessera/nn/linear.h>

namespace tessera::nn {

class ReadBy {
 public:
  explicit ReadBy(const Linear& reader);

 private:
  ScopedValue<Fp8Reader> scope_;
};

}  // namespace tessera::nn
