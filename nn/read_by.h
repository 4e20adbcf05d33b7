// Says which layer alone reads the result of a norm.
//
//     const nn::ReadBy scope(dense);  // of norms called until the block ends
//     Tensor normed = ln(x);
//
// Where that layer runs in fp8 on a GPU and knows its scale before, the norm may write the
// layer's operand and no result (autograd/fp8/norm.h); anything else that reads the result has
// it calculated then. Everywhere else the scope changes nothing.
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
