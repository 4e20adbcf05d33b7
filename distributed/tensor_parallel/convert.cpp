#include <tessera/distributed/tensor_parallel/convert.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/redistribute.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera::distributed {

const Op kConvert{.name = "convert", .flops_per_element = 0};

namespace {

const CollectiveOptions kConvertCall{.channel = Channel::kModule, .tag = "convert", .waits = true};

Placement placement_of(const Mark& mark) {
  if (mark.is_summand()) return Partial();
  if (!mark.is_shard()) return Replicate();
  return mark.blocks == 1 ? Placement(Shard(mark.dim)) : BlockShard(mark.dim, mark.blocks);
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

  // Of what another stage of a pipeline calculates: its shape.
  Tensor shape_of_result(const Tensor& x, Group& group) const {
    Shape shape = x.shape();
    if (from.is_shard()) shape[from.dim] = length;
    if (to.is_shard()) {
      const int64_t whole = from.is_shard() ? other : length;
      shape[to.dim] = length_of(ranges_of(placement_of(to), whole, group.size(), group.rank()));
    }
    return raw::empty(shape, x.dtype(), x.device());
  }

  Tensor run(const Tensor& x, Group& group) const {
    const bool was_whole = !from.is_shard() && !from.is_summand();
    const bool moves_nothing = from == to || (was_whole && !to.is_shard() && !to.is_summand()) ||
                               (was_whole && to.is_summand() && group.rank() == 0);
    if (moves_nothing || group.size() == 1) return raw::alias(x);
    if (x.is_meta() && group.backend().moves_data()) return shape_of_result(x, group);
    const PhaseScope phase(current_backward() == 0 ? "forward" : "backward");
    return moved_along(x, placement_of(from), placement_of(to), length, group, kConvertCall);
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
  const Ranges held = ranges_of(placement_of(shard), whole.size(shard.dim), ranks, coordinate);
  return contiguous(clone(held_along(whole, shard.dim, held)));
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
    TS_CHECK_AS(UnsupportedError, options.length || !from.uneven, kConvert, "from ", describe(from),
                " of ", x, ": its chunks differ in length; give the whole .length");
    length = options.length.value_or(x.size(from.dim) * ranks);
    if (to.is_shard()) other = length_to_cut(x, to, ranks, options.uneven);
  } else if (to.is_shard()) {
    length = length_to_cut(x, to, ranks, options.uneven);
  }
  // Checked here, by both ends, and not again as an op; nor are the ops that it is made of.
  const CheckedMarks checked;
  Tensor result = converted(x, {axis, from, to, length, other});
  result.impl()->marks = x.impl()->marks;
  Mark mark = to;
  if (to.is_shard()) mark.uneven = (from.is_shard() ? other : length) % (ranks * to.blocks) != 0;
  set_mark(result, axis, mark);
  return result;
}

}  // namespace tessera::distributed
