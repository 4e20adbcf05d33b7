#include <tessera/distributed/mesh/redistribute.h>

#include <algorithm>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

const CollectiveOptions kModuleCall{.channel = Channel::kModule, .waits = true};

// ---- One axis -----------------------------------------------------------------------------------
// x: this rank's part. `length`: of a dimension before the axis cuts it, on all its ranks.

Shape resized(Shape shape, int dim, int64_t size) {
  shape[dim] = size;
  return shape;
}

Tensor chunk_along(const Tensor& x, const Placement& cut, int parts, int i) {
  const int dim = shard_dim(cut);
  return held_along(x, dim, ranges_of(cut, x.size(dim), parts, i));
}

TensorList chunks_along(const Tensor& x, const Placement& cut, int parts) {
  TensorList result;
  for (int i = 0; i < parts; ++i) result.push_back(contiguous(chunk_along(x, cut, parts, i)));
  return result;
}

// Memory for what the ranks hold of a dimension of that length of a tensor that is otherwise of
// this shape.
TensorList parts_along(const Tensor& like, const Shape& shape, const Placement& cut, int64_t length,
                       int ranks) {
  TensorList parts;
  for (int r = 0; r < ranks; ++r) {
    const int64_t held = length_of(ranges_of(cut, length, ranks, r));
    parts.push_back(raw::empty(resized(shape, shard_dim(cut), held), like.dtype(), like.device()));
  }
  return parts;
}

Tensor shard_to_replicate(const Tensor& x, const Placement& cut, int64_t length, Group& group,
                          const CollectiveOptions& call) {
  if (shard_dim(cut) == 0 && blocks_of(cut) == 1 && length % group.size() == 0) {
    const Tensor whole = raw::empty(resized(x.shape(), 0, length), x.dtype(), x.device());
    group.all_gather(whole, x, call).wait();
    return whole;
  }
  const TensorList parts = parts_along(x, x.shape(), cut, length, group.size());
  group.all_gather(parts, x, call).wait();
  return joined_along(parts, cut, length);
}

Tensor partial_to_replicate(const Tensor& x, ReduceOp op, Group& group,
                            const CollectiveOptions& call) {
  const Tensor result = contiguous(clone(x));
  group.all_reduce(result, op, call).wait();
  return result;
}

Tensor partial_to_shard(const Tensor& x, ReduceOp op, const Placement& cut, Group& group,
                        const CollectiveOptions& call) {
  const TensorList parts = chunks_along(x, cut, group.size());
  const Tensor own =
      raw::empty(parts[static_cast<size_t>(group.rank())].shape(), x.dtype(), x.device());
  group.reduce_scatter(own, parts, op, call).wait();
  return own;
}

Tensor shard_to_shard(const Tensor& x, const Placement& from, int64_t from_length,
                      const Placement& to, Group& group, const CollectiveOptions& call) {
  const TensorList sent = chunks_along(x, to, group.size());
  const Shape own = sent[static_cast<size_t>(group.rank())].shape();
  const TensorList received = parts_along(x, own, from, from_length, group.size());
  group.all_to_all(received, sent, call).wait();
  return joined_along(received, from, from_length);
}

// Zeros around it.
Tensor shard_to_partial(const Tensor& x, const Placement& cut, int64_t length, Group& group) {
  const int dim = shard_dim(cut);
  const Tensor whole = raw::zeros(resized(x.shape(), dim, length), x.dtype(), x.device());
  int64_t at = 0;
  for (const auto& [begin, end] : ranges_of(cut, length, group.size(), group.rank())) {
    kernels::copy_into(raw::narrow(whole, dim, begin, end - begin),
                       raw::narrow(x, dim, at, end - begin));
    at += end - begin;
  }
  return whole;
}

// An own copy: a view would keep the whole alive.
Tensor replicate_to_shard(const Tensor& x, const Placement& cut, Group& group) {
  const Tensor own = chunk_along(x, cut, group.size(), group.rank());
  return own.storage() == x.storage() ? contiguous(clone(own)) : own;
}

Tensor run_to_replicate(const Tensor& x, const FlatShard& flat, const Shape& shape, Group& group) {
  if (group.size() == 1) return raw::view(contiguous(x), shape);
  const Tensor whole = raw::empty({numel_of(shape)}, x.dtype(), x.device());
  group.all_gather(runs_of(whole, flat, group.size()), contiguous(x), kModuleCall).wait();
  return raw::view(whole, shape);
}

Tensor replicate_to_run(const Tensor& x, const FlatShard& flat, Group& group) {
  if (group.size() == 1) return elements_of(x);
  const auto [begin, end] = run_of(flat, x.numel(), group.rank());
  return contiguous(clone(raw::narrow(elements_of(x), 0, begin, end - begin)));
}

Tensor partial_to_run(const Tensor& x, ReduceOp op, const FlatShard& flat, Group& group) {
  if (group.size() == 1) return elements_of(x);
  const TensorList parts = runs_of(elements_of(x), flat, group.size());
  const Tensor own =
      raw::empty(parts[static_cast<size_t>(group.rank())].shape(), x.dtype(), x.device());
  group.reduce_scatter(own, parts, op, kModuleCall).wait();
  return own;
}

Tensor replicate_to_partial(const Tensor& x, ReduceOp op, Group& group) {
  return op == ReduceOp::kSum && group.rank() != 0 ? zeros_like(x) : clone(x);
}

// ---- All axes -----------------------------------------------------------------------------------

// How a tensor lies on the way from one spec to another.
class Journey {
 public:
  Journey(const DTensorSpec& from, const DTensorSpec& to) : spec_(from), to_(to) {
    for (int dim = 0; dim < from.shape.size(); ++dim) {
      cuts_.push_back(cuts_of(from, dim));
      wanted_.push_back(cuts_of(to, dim));
    }
  }

  Tensor run(Tensor x) {
    for (;;) {
      rename();
      if (spec_.placements == to_.placements && cuts_ == wanted_) break;
      // A run is of what the other axes leave: it is put together before they move.
      const auto run = spec_.flat_axis();
      if (run && (spec_.placements[*run] != to_.placements[*run] || cuts_ != wanted_)) {
        x = step(x, *run, Replicate());
        continue;
      }
      size_t axis = 0;
      int cheapest = kNever;
      for (size_t i = 0; i < spec_.placements.size(); ++i) {
        if (const int cost = cost_of(i); cost < cheapest) {
          cheapest = cost;
          axis = i;
        }
      }
      if (cheapest < kNever) {
        x = step(x, axis, to_.placements[axis]);
      } else {
        x = step(x, misplaced(), Replicate());
      }
    }
    return x;
  }

 private:
  static constexpr int kNever = 100;

  struct Cut {
    size_t axis;
    int blocks;
    friend bool operator==(const Cut&, const Cut&) = default;
  };
  using Cuts = std::vector<Cut>;
  static Cuts cuts_of(const DTensorSpec& spec, int dim) {
    Cuts cuts;
    for (const size_t axis : spec.cuts(dim))
      cuts.push_back({axis, blocks_of(spec.placements[axis])});
    return cuts;
  }

  // Cuts that are where they are wanted are only called otherwise: a StridedShard with no other cut
  // to its right is a Shard, and so is a BlockShard of one block.
  void rename() {
    for (size_t dim = 0; dim < cuts_.size(); ++dim) {
      for (size_t i = 0; i < cuts_[dim].size() && i < wanted_[dim].size(); ++i) {
        if (cuts_[dim][i] != wanted_[dim][i]) break;
        const size_t axis = cuts_[dim][i].axis;
        spec_.placements[axis] = to_.placements[axis];
      }
    }
  }

  // The innermost cut of its dimension: what it has cut can be put together again.
  bool may_leave(size_t axis) const {
    const int dim = shard_dim(spec_.placements[axis]);
    return dim < 0 || cuts_[static_cast<size_t>(dim)].back().axis == axis;
  }
  // Next in the wanted order of cuts.
  bool may_cut(size_t axis, int dim) const {
    Cuts cuts = cuts_[static_cast<size_t>(dim)];
    std::erase_if(cuts, [&](const Cut& cut) { return cut.axis == axis; });
    cuts.push_back({axis, blocks_of(to_.placements[axis])});
    const auto& wanted = wanted_[static_cast<size_t>(dim)];
    return cuts.size() <= wanted.size() && std::equal(cuts.begin(), cuts.end(), wanted.begin());
  }

  static bool is_run(const Placement& placement) {
    return std::holds_alternative<FlatShard>(placement);
  }
  // Of what leads axis to its goal: less for what makes the part smaller; kNever where it is there
  // or another axis has to move first.
  int cost_of(size_t axis) const {
    const Placement &from = spec_.placements[axis], &to = to_.placements[axis];
    const int from_dim = shard_dim(from), to_dim = shard_dim(to);
    if (from == to) return kNever;
    if (is_run(to) && from_dim < 0) {
      return cuts_ != wanted_ ? kNever : is_partial(from) ? 1 : 0;
    }
    if (!may_leave(axis) || (to_dim >= 0 && !may_cut(axis, to_dim))) return kNever;
    if (to_dim >= 0) return from_dim >= 0 ? 2 : is_partial(from) ? 1 : 0;
    if (from_dim < 0) return is_partial(from) ? 3 : 4;
    return 5;
  }

  // A cut that is not where it is wanted, and that can be put together.
  size_t misplaced() const {
    for (size_t axis = spec_.placements.size(); axis-- > 0;) {
      const int dim = shard_dim(spec_.placements[axis]);
      if (dim < 0 || !may_leave(axis)) continue;
      const auto &cuts = cuts_[static_cast<size_t>(dim)],
                 &wanted = wanted_[static_cast<size_t>(dim)];
      if (cuts.size() > wanted.size() || !std::equal(cuts.begin(), cuts.end(), wanted.begin())) {
        return axis;
      }
    }
    TS_THROW(ValueError, "redistribute", "no way from ", describe(spec_.placements), " to ",
             describe(to_.placements), "; this is a bug of tessera");
  }

  // The length of a dimension before `axis`, its last cut, cuts it.
  int64_t length_before(size_t axis, int dim) const {
    int64_t length = spec_.shape[dim];
    for (const auto& [other, blocks] : cuts_[static_cast<size_t>(dim)]) {
      if (other == axis) break;
      const MeshAxis& along = spec_.mesh->axes()[other];
      length = length_of(ranges_of(spec_.placements[other], length, along.size,
                                   spec_.mesh->coordinate(along.name)));
    }
    return length;
  }

  Tensor step(const Tensor& x, size_t axis, Placement to) {
    const Placement from = spec_.placements[axis];
    const int from_dim = shard_dim(from), to_dim = shard_dim(to);
    // Through Replicate: from a shard or another reduction to a Partial, within a dimension, and
    // between a run and any shard.
    const bool direct = is_run(from)    ? false
                        : from_dim >= 0 ? !is_partial(to) && !is_run(to) && from_dim != to_dim
                                        : !(is_partial(from) && is_partial(to));
    if (!direct) to = Replicate();
    const int target_dim = direct ? to_dim : -1;
    const Tensor result = along(x, axis, from, to);
    if (from_dim >= 0) cuts_[static_cast<size_t>(from_dim)].pop_back();
    if (target_dim >= 0) {
      cuts_[static_cast<size_t>(target_dim)].push_back({axis, blocks_of(to)});
    }
    spec_.placements[axis] = to;
    return result;
  }

  Tensor along(const Tensor& x, size_t axis, const Placement& from, const Placement& to) const {
    Group& group = spec_.mesh->group(spec_.mesh->axes()[axis].name);
    if (const auto* flat = std::get_if<FlatShard>(&from)) {
      return run_to_replicate(x, *flat, spec_.shape_of_run(), group);
    }
    if (const auto* flat = std::get_if<FlatShard>(&to)) {
      return is_partial(from) ? partial_to_run(x, std::get<Partial>(from).op, *flat, group)
                              : replicate_to_run(x, *flat, group);
    }
    const int from_dim = shard_dim(from);
    const int64_t length = from_dim >= 0 ? length_before(axis, from_dim) : 0;
    return moved_along(x, from, to, length, group, kModuleCall);
  }

  DTensorSpec spec_;  // the placements of now; a strided shard may stand among others for a while
  const DTensorSpec& to_;
  std::vector<Cuts> cuts_, wanted_;  // of each dimension, in order
};

// ---- Through autograd ---------------------------------------------------------------------------

// By what the gradient of a summand is smaller than that of the value.
double mean_factor(const DTensorSpec& spec) {
  double factor = 1;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const auto* partial = std::get_if<Partial>(&spec.placements[i]);
    if (partial != nullptr && partial->op == ReduceOp::kMean) factor *= spec.mesh->axes()[i].size;
  }
  return factor;
}

void check_linear(const DTensorSpec& spec) {
  for (const Placement& placement : spec.placements) {
    const auto* partial = std::get_if<Partial>(&placement);
    TS_CHECK_AS(
        UnsupportedError,
        partial == nullptr || partial->op == ReduceOp::kSum || partial->op == ReduceOp::kMean,
        "redistribute", "there is no gradient through ", describe(spec.placements),
        "; detach() the tensor, or reduce to_local() parts by hand");
  }
}

class RedistributeNode final : public Node {
 public:
  RedistributeNode(const Tensor& x, const Tensor& result, DTensorSpec arriving, DTensorSpec leaving,
                   double factor)
      : arriving_(std::move(arriving)), leaving_(std::move(leaving)), factor_(factor) {
    next_edges.push_back(gradient_edge(x));
    output_metas.push_back(TensorMeta::of(result));
    take_sequence();
  }
  TensorList apply(TensorList grads) override {
    const Tensor gradient =
        redistribute_local(grads[0], arriving_, leaving_, leaving_.of_gradient());
    return {factor_ == 1 ? gradient : gradient * Scalar(factor_)};
  }
  std::string name() const override { return "redistribute"; }

 private:
  const DTensorSpec arriving_, leaving_;
  const double factor_;
};

}  // namespace

Tensor moved_along(const Tensor& x, const Placement& from, const Placement& to, int64_t length,
                   Group& group, const CollectiveOptions& call) {
  if (group.size() == 1) return x;
  const int from_dim = shard_dim(from), to_dim = shard_dim(to);
  if (from_dim >= 0) {
    if (is_partial(to)) return shard_to_partial(x, from, length, group);
    return to_dim >= 0 ? shard_to_shard(x, from, length, to, group, call)
                       : shard_to_replicate(contiguous(x), from, length, group, call);
  }
  if (is_partial(from)) {
    const ReduceOp op = std::get<Partial>(from).op;
    return to_dim >= 0 ? partial_to_shard(x, op, to, group, call)
                       : partial_to_replicate(x, op, group, call);
  }
  if (to_dim >= 0) return replicate_to_shard(x, to, group);
  return replicate_to_partial(x, std::get<Partial>(to).op, group);
}

Tensor held_along(const Tensor& x, int dim, const Ranges& ranges) {
  const auto piece = [dim](const Tensor& tensor, int64_t begin, int64_t length) {
    return raw::narrow(tensor, dim, begin, length);
  };
  if (ranges.size() == 1) return piece(x, ranges[0].first, ranges[0].second - ranges[0].first);
  const Tensor result =
      raw::empty(resized(x.shape(), dim, length_of(ranges)), x.dtype(), x.device());
  int64_t at = 0;
  for (const auto& [begin, end] : ranges) {
    kernels::copy_into(piece(result, at, end - begin), piece(x, begin, end - begin));
    at += end - begin;
  }
  return result;
}

Tensor joined_along(const TensorList& parts, const Placement& cut, int64_t length) {
  const int dim = shard_dim(cut), ranks = static_cast<int>(parts.size());
  if (blocks_of(cut) == 1) return cat(parts, dim);
  const Tensor& like = parts[0];
  const Tensor whole = raw::empty(resized(like.shape(), dim, length), like.dtype(), like.device());
  for (int r = 0; r < ranks; ++r) {
    int64_t at = 0;
    for (const auto& [begin, end] : ranges_of(cut, length, ranks, r)) {
      kernels::copy_into(raw::narrow(whole, dim, begin, end - begin),
                         raw::narrow(parts[static_cast<size_t>(r)], dim, at, end - begin));
      at += end - begin;
    }
  }
  return whole;
}

Tensor elements_of(const Tensor& x) { return raw::view(contiguous(x), {x.numel()}); }

TensorList runs_of(const Tensor& elements, const FlatShard& flat, int ranks) {
  TensorList runs;
  for (int r = 0; r < ranks; ++r) {
    const auto [begin, end] = run_of(flat, elements.numel(), r);
    runs.push_back(raw::narrow(elements, 0, begin, end - begin));
  }
  return runs;
}

Tensor redistribute_local(const Tensor& local, const DTensorSpec& from, const DTensorSpec& to,
                          const DTensorSpec& output_gradient) {
  const ProfilerRange range("redistribute");
  const bool recorded = grad_enabled() && requires_grad(local);
  if (recorded) {
    check_linear(from);
    check_linear(to);
    check_linear(output_gradient);
  }
  Tensor result;
  {
    const NoGradGuard no_grad;
    result = Journey(from, to).run(raw::alias(local));
  }
  if (!recorded) return result;
  // The factor of what stays the same cancels out.
  const double factor = mean_factor(to) / mean_factor(from);
  auto node = std::make_shared<RedistributeNode>(local, result, output_gradient, from.of_gradient(),
                                                 factor);
  set_history(result, std::move(node), 0);
  return result;
}

}  // namespace tessera::distributed
