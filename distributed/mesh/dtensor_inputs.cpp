#include <tessera/distributed/mesh/dtensor_inputs.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/redistribute.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

using Json = nlohmann::json;

CollectiveOptions control(std::string_view tag) {
  return {.channel = Channel::kControl, .tag = tag};
}
const CollectiveOptions kWaiting{.channel = Channel::kParameter, .waits = true};

// What every rank of the mesh says, in its order.
std::vector<Json> say(const DTensorSpec& spec, const Json& own, std::string_view tag) {
  return all_gather_objects(spec.mesh->group(), own, control(tag));
}

// Rank 0's part of each rank, which it gives.
Tensor scattered(TensorList parts, Group& group) {
  const Tensor& mine = parts[static_cast<size_t>(group.rank())];
  const Tensor own = raw::empty(mine.shape(), mine.dtype(), mine.device());
  if (group.rank() == 0) {
    for (Tensor& part : parts) part = contiguous(part);
  } else {
    parts.clear();
  }
  group.scatter(own, parts, 0, kWaiting).wait();
  return own;
}

// Of who does not give, the shapes count.
TensorList chunks_of_dim(const Tensor& x, const Placement& cut, Group& group) {
  const int dim = shard_dim(cut);
  TensorList parts;
  for (int r = 0; r < group.size(); ++r) {
    const Ranges held = ranges_of(cut, x.size(dim), group.size(), r);
    parts.push_back(group.rank() == 0 ? held_along(x, dim, held)
                                      : raw::narrow(x, dim, 0, length_of(held)));
  }
  return parts;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}

Tensor on_host(const Tensor& x) {
  const Tensor copy = raw::empty(x.shape(), x.dtype());
  kernels::copy_into(copy, x);
  return copy;
}

void check_no_summand(const DTensorSpec& spec, std::string_view where) {
  for (const Placement& placement : spec.placements) {
    TS_CHECK_AS(UnsupportedError, !is_partial(placement), where, "works on copies and shards; got ",
                describe(spec.placements), "; redistribute() the tensor first");
  }
}

}  // namespace

Tensor scatter_from_first(const Tensor& whole, const DTensorSpec& spec) {
  const std::string_view where = "distribute_tensor";
  const NoGradGuard no_grad;
  const std::vector<Json> all = say(
      spec, {{"shape", whole.shape().to_vector()}, {"dtype", std::string(name_of(whole.dtype()))}},
      "distribute_tensor");
  for (size_t r = 1; r < all.size(); ++r) {
    TS_CHECK_SHAPE(all[r]["shape"] == all[0]["shape"], where, "rank 0 of the mesh gives ",
                   all[0]["shape"].dump(), ", rank ", r, " ", all[r]["shape"].dump(),
                   "; every rank gives a tensor of one shape");
    TS_CHECK_DTYPE(all[r]["dtype"] == all[0]["dtype"], where, "rank 0 of the mesh gives ",
                   all[0]["dtype"].get<std::string>(), ", rank ", r, " ",
                   all[r]["dtype"].get<std::string>(), "; every rank gives a tensor of one dtype");
  }
  Tensor x = whole;
  const auto group_of = [&](size_t axis) -> Group& {
    return spec.mesh->group(spec.mesh->axes()[axis].name);
  };
  for (int dim = 0; dim < spec.shape.size(); ++dim) {
    for (const size_t axis : spec.cuts(dim)) {
      Group& group = group_of(axis);
      if (group.size() == 1) continue;
      x = scattered(chunks_of_dim(x, spec.placements[axis], group), group);
    }
  }
  if (const auto axis = spec.flat_axis(); axis && group_of(*axis).size() > 1) {
    Group& group = group_of(*axis);
    // Who does not give shows how many there are.
    const Tensor elements =
        group.rank() == 0 ? elements_of(x) : raw::as_strided(x, {x.numel()}, {0}, x.offset());
    x = scattered(runs_of(elements, std::get<FlatShard>(spec.placements[*axis]), group.size()),
                  group);
  }
  if (x.is(whole)) x = raw::view(contiguous(clone(whole)), spec.local_shape());
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (is_sharding(spec.placements[axis]) || group_of(axis).size() == 1) continue;
    group_of(axis).broadcast(x, 0, kWaiting).wait();
  }
  return x;
}

Tensor scatter_whole(const Tensor& whole, const Tensor& target, Group& group) {
  constexpr const char* kScatterWhole = "scatter_whole";
  const NoGradGuard no_grad;
  const bool parts = is_dtensor(target);
  const Shape& shape = parts ? global_shape(target) : target.shape();
  TS_CHECK_SHAPE(whole.shape() == shape, kScatterWhole, "the whole is ", whole,
                 ", and what it goes into ", target, "; give one of its shape");
  const Device device = target.is_meta() ? kCpu : target.device();
  const Tensor given = raw::alias(whole);
  if (!parts) {
    const Tensor all = group.rank() == 0 ? contiguous(given.to(device))
                                         : raw::empty(whole.shape(), whole.dtype(), device);
    group.broadcast(all, 0, {.channel = Channel::kParameter, .waits = true}).wait();
    return all;
  }
  const DTensorSpec& spec = spec_of(target);
  TS_CHECK_AS(ConfigError,
              spec.mesh->size() == group.size() && spec.mesh->coordinate() == group.rank(),
              kScatterWhole, "the target is ", target, ", whose ranks are not the ", group.size(),
              " of the group in their order; place it on the mesh of them all");
  // Of who does not give, the shape counts: one element stands for all.
  const Tensor source =
      group.rank() == 0
          ? given.to(device)
          : raw::as_strided(raw::empty({1}, whole.dtype(), device), whole.shape(),
                            Shape::filled(static_cast<int>(whole.shape().size()), 0), 0);
  return from_local(scatter_from_first(source, spec), *spec.mesh, spec.placements,
                    {.shape = spec.shape});
}

Tensor gather_to_first(const Tensor& dtensor) {
  const DTensorSpec& spec = spec_of(dtensor);
  check_no_summand(spec, "gather_to_first");
  const NoGradGuard no_grad;
  // Who is not the first along an axis that copies has nothing to say; who is not the first along
  // one that was gathered has said it.
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const MeshAxis& axis = spec.mesh->axes()[i];
    if (!is_sharding(spec.placements[i]) && spec.mesh->coordinate(axis.name) > 0) return {};
  }
  Tensor x = raw::alias(dtensor);
  const auto group_of = [&](size_t axis) -> Group& {
    return spec.mesh->group(spec.mesh->axes()[axis].name);
  };
  // False where another rank has it all now.
  const auto gather = [&](Group& group, const TensorList& parts) {
    const bool first = group.rank() == 0;
    group.gather(first ? parts : TensorList(), contiguous(x), 0, kWaiting).wait();
    return first;
  };
  if (const auto axis = spec.flat_axis()) {
    Group& group = group_of(*axis);
    const Shape shape = spec.shape_of_run();
    Tensor whole = contiguous(x);
    if (group.size() > 1) {
      TensorList parts;
      if (group.rank() == 0) {
        whole = raw::empty({numel_of(shape)}, x.dtype(), x.device());
        parts = runs_of(whole, std::get<FlatShard>(spec.placements[*axis]), group.size());
      }
      if (!gather(group, parts)) return {};
    }
    x = raw::view(whole, shape);
  }
  for (int dim = spec.shape.size(); dim-- > 0;) {
    const std::vector<size_t> cuts = spec.cuts(dim);
    // The length before each cut; the last one is put together first.
    std::vector<int64_t> lengths = {spec.shape[dim]};
    for (const size_t axis : cuts) {
      lengths.push_back(length_of(ranges_of(spec.placements[axis], lengths.back(),
                                            group_of(axis).size(), group_of(axis).rank())));
    }
    for (size_t i = cuts.size(); i-- > 0;) {
      Group& group = group_of(cuts[i]);
      if (group.size() == 1) continue;
      const Placement& cut = spec.placements[cuts[i]];
      const bool in_place = dim == 0 && blocks_of(cut) == 1;
      Tensor joined;
      TensorList parts;
      if (group.rank() == 0) {
        Shape shape = x.shape();
        shape[dim] = lengths[i];
        if (in_place) joined = raw::empty(shape, x.dtype(), x.device());
        for (int r = 0; r < group.size(); ++r) {
          const Ranges held = ranges_of(cut, lengths[i], group.size(), r);
          shape[dim] = length_of(held);
          parts.push_back(in_place ? raw::narrow(joined, 0, held[0].first, shape[dim])
                                   : raw::empty(shape, x.dtype(), x.device()));
        }
      }
      if (!gather(group, parts)) return {};
      x = in_place ? joined : joined_along(parts, cut, lengths[i]);
    }
  }
  return x;
}

Tensor part_of_whole(const Tensor& whole, const DTensorSpec& spec) {
  check_no_summand(spec, "DTensor");
  Tensor part = raw::alias(whole);
  for (int dim = 0; dim < spec.shape.size(); ++dim) {
    part = held_along(part, dim, spec.own_ranges(dim));
  }
  if (!spec.flat_axis()) return part;
  const auto [begin, end] = spec.local_run();
  return raw::narrow(elements_of(part), 0, begin, end - begin);
}

std::string_view rule_of_parts(const DTensorSpec& spec) {
  if (spec.flat_axis()) {
    return "a part is what the rank's chunk of the unit has of the tensor, 1-D";
  }
  const auto blocks = [](const Placement& placement) { return blocks_of(placement) > 1; };
  return std::ranges::any_of(spec.placements, blocks)
             ? "a part has a chunk of ceil(length / ranks) of every block"
             : "chunks are of ceil(length / ranks)";
}

void check_parts(const Tensor& local, const DTensorSpec& spec, bool shape_given) {
  const std::string_view where = "from_local";
  const NoGradGuard no_grad;
  std::string problem;
  if (local.shape() != spec.local_shape()) {
    problem =
        detail::concatenate("holds ", spec.describe_part(), " of ", spec.describe(local.dtype()),
                            ", a part ", spec.local_shape(), ", and gives ", local);
  }
  const std::vector<Json> all = say(spec,
                                    {{"whole", spec.shape.to_vector()},
                                     {"local", local.shape().to_vector()},
                                     {"given", shape_given},
                                     {"dtype", std::string(name_of(local.dtype()))},
                                     {"problem", problem}},
                                    "from_local");
  for (size_t r = 0; r < all.size(); ++r) {
    TS_CHECK_SHAPE(all[r]["whole"] == all[0]["whole"] && all[r]["given"] == all[0]["given"], where,
                   all[0]["given"] && all[r]["given"]
                       ? "the shapes of the whole differ: "
                       : "the parts differ in size, and not all ranks say the shape of the whole: ",
                   "rank 0 of the mesh gives ", all[0]["local"].dump(), " of ",
                   all[0]["whole"].dump(), ", rank ", r, " ", all[r]["local"].dump(), " of ",
                   all[r]["whole"].dump(), "; give FromLocalOptions::shape alike on all ranks");
    TS_CHECK_DTYPE(all[r]["dtype"] == all[0]["dtype"], where, "rank 0 of the mesh gives ",
                   all[0]["dtype"].get<std::string>(), ", rank ", r, " ",
                   all[r]["dtype"].get<std::string>(), "; parts of one tensor have one dtype");
  }
  for (size_t r = 0; r < all.size(); ++r) {
    TS_CHECK_SHAPE(all[r]["problem"] == "", where, "rank ", r, " of the mesh ",
                   all[r]["problem"].get<std::string>(), "; ", rule_of_parts(spec));
  }
  if (local.is_meta()) return;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    const std::string& name = spec.mesh->axes()[axis].name;
    Group& group = spec.mesh->group(name);
    if (!std::holds_alternative<Replicate>(spec.placements[axis]) || group.size() == 1) continue;
    const Tensor first = contiguous(clone(local));
    group.broadcast(first, 0, kWaiting).wait();
    const bool same = same_bytes(on_host(first), on_host(local));
    const std::vector<Json> equal = say(spec, same, "from_local");
    for (size_t r = 0; r < equal.size(); ++r) {
      TS_CHECK(equal[r].get<bool>(), where, "rank ", r, " of ", spec.describe(local.dtype()),
               " gives another part than rank 0 of its axis '", name,
               "', which replicates; distribute_tensor() makes them equal");
    }
  }
}

}  // namespace tessera::distributed
