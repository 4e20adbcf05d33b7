#include <tessera/nn/transformer/positions.h>

#include <tessera/autograd/ops.h>

namespace tessera::nn {

Tensor positions(int64_t length, const Device& device, int64_t past, DType dtype) {
  return arange(past, past + length, 1, dtype, device);
}

Tensor positions(const TokenRows& rows, int64_t past) {
  if (rows.documents.defined()) return rows.documents.position_ids;
  return positions(rows.ids.size(-1), rows.ids.device(), past);
}

}  // namespace tessera::nn
