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
// copy_segments is the same of pieces of memory, where there are too many for a tensor each: what
// the ranks hold of the parameters of a unit.
//
// Cost: every element is read once and written once. On a GPU it is one launch and a table of 40
// bytes a piece (uploaded, or a constant of the graph that captures it); pieces whose memory begins
// at multiples of 16 bytes on both sides move in vectors, others element by element, neighbors by
// neighboring threads. On the CPU it is one parallel loop over all elements, cut evenly wherever
// pieces begin.
#pragma once

#include <cstdint>
#include <span>

#include <tessera/core/tensor/tensor.h>

namespace tessera::kernels {

void multi_tensor_copy(std::span<const Tensor> targets, std::span<const Tensor> sources);

struct CopySegment {
  const void* from;  // nullptr: zeros are written
  void* to;
  int64_t numel;
};
// Elements of dtype `source` become such of dtype `target`, by the rules above. Memory of `device`,
// at whole elements; segments overlap neither each other nor sources. The caller gives new versions
// to tensors in which they lie. Nothing on a Meta device. Throws DTypeError, ValueError before
// anything is written.
void copy_segments(std::span<const CopySegment> segments, DType source, DType target,
                   const Device& device);

}  // namespace tessera::kernels
