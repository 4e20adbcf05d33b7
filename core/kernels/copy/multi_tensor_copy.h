// Copies of many tensors in one pass, with conversion: the shards of a flat buffer into parameters,
// gradients into a bucket, f32 masters into 16-bit weights.
//
//     multi_tensor_copy(targets, sources);   // targets[i] = sources[i]
//
// targets[i] and sources[i] have one shape. All tensors lie on one device and targets are
// contiguous: views of one packed buffer at any element are. A source that is not contiguous is
// copied first, at the cost of a copy of its own. Dtypes: equal ones (any), or f64, f32, bf16 and
// f16 in any pair, by the rules of copy_into (one rounding to nearest even); pairs may differ from
// tensor to tensor. Targets overlap neither each other nor sources. They get a new version. Meta
// tensors are checked and left alone. Throws ShapeError, DTypeError, DeviceError before anything is
// written.
//
// Cost: every element is read once and written once. On a GPU it is one launch and a table of 112
// bytes a tensor (uploaded, or a constant of the graph that captures it); pairs whose memory begins
// at multiples of 16 bytes move in vectors, others element by element, neighbours by neighbouring
// threads. On the CPU it is one parallel loop over chunks of kMultiTensorChunk elements.
#pragma once

#include <span>

#include <tessera/core/tensor.h>

namespace tessera::kernels {

void multi_tensor_copy(std::span<const Tensor> targets, std::span<const Tensor> sources);

}  // namespace tessera::kernels
