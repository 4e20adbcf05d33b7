// Batch norm with the statistics of all ranks' batches.
//
//     synchronise_batch_norm(model, mesh().group("dp"));   // before replicate()
//
// The layers keep their types (nn::BatchNorm1d, nn::BatchNorm2d); in training they exchange 2C + 1
// numbers of f64 a layer in forward and reduce 2C in backward, on Channel::kModule.
#pragma once

#include <tessera/distributed/transport/group.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>

namespace tessera::distributed {

// batch_norm (autograd/ops.h) over the batches of all ranks: forward and backward are those of the
// concatenated batch, with the same bits on every rank. Collective, also in backward: every rank
// calls it and runs backward through it. Batches may differ in size and be empty on some ranks. In
// evaluation it is batch_norm. Gradients of weight and bias are this rank's summands, which
// replicate() reduces. Throws ShapeError if all ranks together have fewer than 2 values per
// channel.
Tensor sync_batch_norm(const nn::BatchNormCall& call, Group& ranks);

// Makes every batch norm of the model use sync_batch_norm over `ranks`, which must outlive the
// model's use. Clones of the model use batch_norm. Returns the number of layers.
int synchronise_batch_norm(nn::ModuleBase& model, Group& ranks);

}  // namespace tessera::distributed
