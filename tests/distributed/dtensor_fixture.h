// DTensors beside plain tensors: parts cut by hand, and what was communicated.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/mesh/dtensor.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed {

// Whole numbers, all different: every sum below is exact.
inline Tensor numbered(const Shape& shape, double first = 1) {
  return reshape(to(arange(numel_of(shape)), kF32) + Scalar(first), shape);
}

// This rank's part by the definition: chunks of ceil(L / N), the left axis first, strided ones
// after all others; of blocks a chunk of each; of a flat shard the elements that its chunk of the unit has. A summand of a
// sum: rank-dependent numbers, and the rest at coordinate 0.
inline Tensor part_by_hand(const Tensor& whole, Mesh& mesh, const Placements& placements) {
  Tensor part = whole;
  const auto cut = [&](int dim, const MeshAxis& axis) {
    const int64_t length = part.size(dim), size = (length + axis.size - 1) / axis.size;
    const int64_t begin = std::min(length, mesh.coordinate(axis.name) * size);
    part = part.narrow(dim, begin, std::min(size, length - begin));
  };
  for (size_t i = 0; i < placements.size(); ++i) {
    if (const auto* shard = std::get_if<Shard>(&placements[i])) cut(shard->dim, mesh.axes()[i]);
    if (const auto* shard = std::get_if<BlockShard>(&placements[i])) {
      const Tensor all = part;
      const int64_t length = all.size(shard->dim) / shard->blocks;
      TensorList chunks;
      for (int block = 0; block < shard->blocks; ++block) {
        part = all.narrow(shard->dim, block * length, length);
        cut(shard->dim, mesh.axes()[i]);
        chunks.push_back(part);
      }
      part = cat(chunks, shard->dim);
    }
  }
  for (size_t i = placements.size(); i-- > 0;) {
    if (const auto* shard = std::get_if<StridedShard>(&placements[i])) {
      cut(shard->dim, mesh.axes()[i]);
    }
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* flat = std::get_if<FlatShard>(&placements[i]);
    if (flat == nullptr) continue;
    const int64_t rank = mesh.coordinate(mesh.axes()[i].name);
    std::vector<double> own;
    const std::vector<double> all = part.to_vector();
    for (int64_t e = 0; e < part.numel(); ++e) {
      const int64_t place = flat->offset + e;
      if (rank * flat->chunk <= place && place < (rank + 1) * flat->chunk) {
        own.push_back(all[static_cast<size_t>(e)]);
      }
    }
    part = tensor(std::span<const double>(own), {static_cast<int64_t>(own.size())}, kF64)
               .to(part.dtype());
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!is_partial(placements[i])) continue;
    const MeshAxis& axis = mesh.axes()[i];
    const int place = mesh.coordinate(axis.name);
    const auto summand = [&](int c) { return numbered(part.shape(), 1) * Scalar(10.0 * c); };
    if (place > 0) {
      part = summand(place);
    } else {
      for (int c = 1; c < axis.size; ++c) part = part - summand(c);
    }
  }
  return part.contiguous();
}

// Of the collectives that `body` issues on this rank, without those of agreement: "all_gather
// reduce_scatter", in order.
template <class Body>
std::string calls_of(Body&& body) {
  const CommTrace::Scope scope(*rank_context().trace);
  body();
  std::string text;
  for (const CommRecord& record : scope.records()) {
    if (record.channel == Channel::kControl) continue;
    text += (text.empty() ? "" : " ") + std::string(name_of(record.operation));
  }
  return text;
}

inline void expect_equal(const Tensor& actual, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.shape(), expected.shape()) << what;
  EXPECT_EQ(actual.to_vector(), expected.to_vector()) << what;
}

// A gradient is the same on all ranks where the tensor is partial.
inline Placements of_gradient(Placements placements) {
  for (Placement& placement : placements) {
    if (is_partial(placement)) placement = Replicate();
  }
  return placements;
}

// `whole` goes from one way of lying to another, and the gradient `upstream` of the whole goes
// back. Returns the calls.
inline std::pair<std::string, std::string> check_way(Mesh& mesh, const Shape& shape,
                                                     const Placements& from, const Placements& to) {
  const std::string what = mesh.describe() + " " + describe(from) + " to " + describe(to) + " of " +
                           testing::PrintToString(shape.to_vector());
  const Tensor whole = numbered(shape), upstream = numbered(shape, -7);
  const Tensor local = part_by_hand(whole, mesh, from).set_requires_grad();
  Tensor moved;
  const std::string forward =
      calls_of([&] { moved = redistribute(from_local(local, mesh, from, {.shape = shape}), to); });
  EXPECT_EQ(placements_of(moved), to) << what;
  EXPECT_EQ(global_shape(moved), shape) << what;
  // All ranks use copies alike; so is the gradient of a summand.
  Placements gradient = to;
  for (Placement& placement : gradient) {
    if (std::holds_alternative<Partial>(placement)) placement = Replicate();
  }
  const Tensor part = to_local(moved, {.grad_placements = gradient});
  bool partial = false;
  for (const Placement& placement : to) partial |= is_partial(placement);
  if (!partial) expect_equal(part, part_by_hand(whole, mesh, to), what);
  expect_equal(full_tensor(moved.detach()), whole, what);
  const std::string backward =
      calls_of([&] { part.backward(part_by_hand(upstream, mesh, of_gradient(to))); });
  expect_equal(local.grad(), part_by_hand(upstream, mesh, of_gradient(from)), "grad, " + what);
  return {forward, backward};
}

}  // namespace tessera::distributed
