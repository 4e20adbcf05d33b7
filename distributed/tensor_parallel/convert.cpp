#include <tessera/distributed/tensor_parallel/convert.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>

namespace tessera::distributed {
namespace {

const Op kConvert{.name = "convert", .flops_per_element = 0};
const CollectiveOptions kConvertCall{.channel = Channel::kModule, .tag = "convert", .waits = true};

// ---- Chunks -------------------------------------------------------------------------------------
// A dimension in `blocks` equal blocks is seen as two, of the blocks and of one block's elements,
// the second one being cut.

int cut_dim(const Mark& shard) { return shard.blocks == 1 ? shard.dim : shard.dim + 1; }

Tensor with_blocks(const Tensor& x, const Mark& shard) {
  if (shard.blocks == 1) return x;
  Shape shape = x.shape();
  shape[shard.dim] /= shard.blocks;
  shape.insert(shard.dim, shard.blocks);
  return raw::view(contiguous(x), shape);
}

Tensor without_blocks(const Tensor& x, const Mark& shard) {
  if (shard.blocks == 1) return x;
  Shape shape = x.shape();
  shape[shard.dim + 1] *= shard.blocks;
  shape.erase(shard.dim);
  return raw::view(contiguous(x), shape);
}

// Of a tensor with_blocks().
Tensor chunk_of_blocks(const Tensor& x, const Mark& shard, int ranks, int i) {
  const auto [begin, end] = chunk_of(x.size(cut_dim(shard)), ranks, i);
  return raw::narrow(x, cut_dim(shard), begin, end - begin);
}

int64_t chunk_length(int64_t length, const Mark& shard, int ranks, int i) {
  const auto [begin, end] = chunk_of(length / shard.blocks, ranks, i);
  return (end - begin) * shard.blocks;
}

Shape with_length(Shape shape, int dim, int64_t size) {
  shape[dim] = size;
  return shape;
}

TensorList all_chunks(const Tensor& whole, const Mark& shard, int ranks) {
  const Tensor blocks = with_blocks(whole, shard);
  TensorList result;
  for (int i = 0; i < ranks; ++i) {
    result.push_back(contiguous(without_blocks(chunk_of_blocks(blocks, shard, ranks, i), shard)));
  }
  return result;
}

// Space for the chunk of each rank, where this one's is x.
TensorList chunk_places(const Tensor& x, const Mark& shard, int64_t length, int ranks) {
  TensorList result;
  for (int i = 0; i < ranks; ++i) {
    const int64_t size = chunk_length(length, shard, ranks, i);
    result.push_back(raw::empty(with_length(x.shape(), shard.dim, size), x.dtype(), x.device()));
  }
  return result;
}

Tensor joined_chunks(const TensorList& parts, const Mark& shard) {
  TensorList blocks;
  for (const Tensor& part : parts) blocks.push_back(with_blocks(part, shard));
  return without_blocks(cat(blocks, cut_dim(shard)), shard);
}

// ---- The table ----------------------------------------------------------------------------------

// One row, on plain tensors. `length`: of the dimension of `from`, when whole.
struct Conversion {
  size_t axis;
  Mark from, to;
  int64_t length;  // of the dimension that from, or else to, cuts
  int64_t other;   // of that of `to` where both cut one

  Conversion transposed() const {
    const bool both = from.is_shard() && to.is_shard();
    return {axis, dual(to), dual(from), both ? other : length, length};
  }

  Tensor run(const Tensor& x, Group& group) const {
    const bool moves_nothing = from == to || (!from.is_shard() && !from.is_summand() &&
                                              !to.is_shard() && !to.is_summand());
    if (moves_nothing || group.size() == 1) return raw::alias(x);
    if (from.is_shard()) return to.is_shard() ? exchange(x, group) : from_shard(x, group);
    if (to.is_shard()) return from.is_summand() ? reduce_scatter(x, group) : own_chunk(x, group);
    if (from.is_summand()) return all_reduce(x, group);
    return group.rank() == 0 ? raw::alias(x) : zeros_like(x);
  }

 private:
  static Tensor all_reduce(const Tensor& x, Group& group) {
    const Tensor sum = contiguous(clone(x));
    group.all_reduce(sum, ReduceOp::kSum, kConvertCall).wait();
    return sum;
  }
  Tensor own_chunk(const Tensor& x, Group& group) const {
    return chunk_at(x, to, group.size(), group.rank());
  }
  Tensor reduce_scatter(const Tensor& x, Group& group) const {
    const TensorList parts = all_chunks(x, to, group.size());
    const Tensor own =
        raw::empty(parts[static_cast<size_t>(group.rank())].shape(), x.dtype(), x.device());
    group.reduce_scatter(own, parts, ReduceOp::kSum, kConvertCall).wait();
    return own;
  }
  Tensor from_shard(const Tensor& x, Group& group) const {
    if (to.is_summand()) {
      const Tensor whole = zeros(with_length(x.shape(), from.dim, length),
                                 {.dtype = x.dtype(), .device = x.device()});
      const Tensor own =
          chunk_of_blocks(with_blocks(whole, from), from, group.size(), group.rank());
      copy_(own, with_blocks(x, from));
      return whole;
    }
    const TensorList parts = chunk_places(x, from, length, group.size());
    group.all_gather(parts, contiguous(x), kConvertCall).wait();
    return joined_chunks(parts, from);
  }
  Tensor exchange(const Tensor& x, Group& group) const {
    const TensorList sent = all_chunks(x, to, group.size());
    const TensorList received =
        chunk_places(sent[static_cast<size_t>(group.rank())], from, length, group.size());
    group.all_to_all(received, sent, kConvertCall).wait();
    return joined_chunks(received, from);
  }
};

Tensor converted(const Tensor& x, const Conversion& conversion) {
  // The ranks' group outlives the graph as the mesh does: compute_mesh() says so where it does not.
  return differentiable(
      kConvert, {x},
      [&](Inputs in) { return conversion.run(in[0], compute_mesh().group(conversion.axis)); },
      [conversion](Grads dy, const Saved&) { return converted(dy[0], conversion.transposed()); });
}

// The length of the dimension that `shard` cuts, of x which is whole along the axis.
int64_t length_to_cut(const Tensor& x, const Mark& shard, int ranks, bool uneven) {
  TS_CHECK_INDEX(shard.dim >= 0 && shard.dim < x.dim(), kConvert, "to ", describe(shard),
                 ": there is no such dimension in ", x);
  const int64_t length = x.size(shard.dim);
  TS_CHECK_SHAPE(length % shard.blocks == 0, kConvert, "dimension ", shard.dim, " of ", x,
                 " is not ", shard.blocks, " equal blocks");
  TS_CHECK_SHAPE(uneven || length % (ranks * shard.blocks) == 0, kConvert, "dimension ", shard.dim,
                 " of ", x, " does not divide among ", ranks, " ranks in ", shard.blocks,
                 " blocks; pad it to a multiple of ", ranks * shard.blocks);
  return length;
}

}  // namespace

Tensor chunk_at(const Tensor& whole, const Mark& shard, int ranks, int coordinate) {
  const NoGradGuard no_grad;
  const Tensor own = chunk_of_blocks(with_blocks(whole, shard), shard, ranks, coordinate);
  return contiguous(clone(without_blocks(own, shard)));
}

Tensor convert(const Tensor& x, std::string_view axis_name, const Mark& to,
               const ConvertOptions& options) {
  check_defined(kConvert, "x", x);
  ComputeMesh& mesh = compute_mesh();
  const size_t axis = mesh.position(axis_name);
  const int ranks = mesh.group(axis).size();
  const Mark from = mark_of(x, axis);
  if (from == to) return x;
  TS_CHECK_AS(UnsupportedError, !(from.is_shard() && to.is_shard() && from.dim == to.dim), kConvert,
              "from ", describe(from), " to ", describe(to), " of ", x,
              " goes through replicated; convert twice");
  int64_t length = 0, other = 0;
  if (from.is_shard()) {
    length = options.length.value_or(x.size(from.dim) * ranks);
    if (to.is_shard()) other = length_to_cut(x, to, ranks, options.uneven);
  } else if (to.is_shard()) {
    length = length_to_cut(x, to, ranks, options.uneven);
  }
  // Checked here, by both ends, and not again as an op; nor are the ops that it is made of.
  const ScopedValue<const MarkRules*> checked(Context::current().slot<MarkRulesSlot>().rules,
                                              nullptr);
  Tensor result = converted(x, {axis, from, to, length, other});
  result.impl()->marks = x.impl()->marks;
  set_mark(result, axis, to);
  return result;
}

}  // namespace tessera::distributed
