#include <tessera/distributed/mesh/dtensor_inputs.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/raw_views.h>
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

Tensor scattered(const Tensor& x, int dim, Group& group) {
  TensorList parts;
  for (int r = 0; r < group.size(); ++r) {
    const auto [begin, end] = chunk_of(x.size(dim), group.size(), r);
    parts.push_back(raw::narrow(x, dim, begin, end - begin));
  }
  const Tensor own =
      raw::empty(parts[static_cast<size_t>(group.rank())].shape(), x.dtype(), x.device());
  if (group.rank() == 0) {
    for (Tensor& part : parts) part = contiguous(part);
  } else {
    parts.clear();
  }
  group.scatter(own, parts, 0, kWaiting).wait();
  return own;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}

Tensor on_host(const Tensor& x) {
  const Tensor copy = raw::empty(x.shape(), x.dtype());
  kernels::copy_into(copy, x);
  return copy;
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
      if (group_of(axis).size() > 1) x = scattered(x, dim, group_of(axis));
    }
  }
  if (x.is(whole)) x = contiguous(clone(whole));
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (shard_dim(spec.placements[axis]) >= 0 || group_of(axis).size() == 1) continue;
    group_of(axis).broadcast(x, 0, kWaiting).wait();
  }
  return x;
}

void check_parts(const Tensor& local, const DTensorSpec& spec, bool shape_given) {
  const std::string_view where = "from_local";
  const NoGradGuard no_grad;
  const Box box = spec.local_box();
  std::string problem;
  if (local.shape() != box.extent) {
    problem = detail::concatenate("holds ", box, " of ", spec.describe(local.dtype()), ", a part ",
                                  box.extent, ", and gives ", local);
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
                   all[r]["problem"].get<std::string>(), "; chunks are of ceil(length / ranks)");
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
