#include <tessera/distributed/mesh/parallel_dims.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include <tessera/core/context.h>
#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

struct Axis {
  const char* name;
  const ParallelSize* size;

  bool is_open() const { return size->ranks == -1; }
  std::string setting() const { return std::string(name) + "_size"; }
  std::string said() const {  // "dp_shard_size=3 (code)"
    return setting() + "=" + std::to_string(size->ranks) +
           (size->source.empty() ? "" : " (" + size->source + ")");
  }
};
using Axes = std::array<Axis, 5>;

std::string joined(const std::vector<std::string>& parts, const char* last) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == parts.size() ? last : ", ") + parts[i];
  }
  return text;
}

// Sizes of one axis by which those of all fit, the others as they are: the exact one, or where an
// axis takes what is left the nearest on both sides.
std::vector<std::string> fitting(const Axis& axis, int64_t others, bool any_open, int ranks) {
  std::vector<std::string> sizes;
  if (ranks % others != 0) return sizes;
  const auto most = static_cast<int>(ranks / others);
  const auto add = [&](int size) { sizes.push_back(axis.setting() + "=" + std::to_string(size)); };
  if (!any_open) {
    add(most);
    return sizes;
  }
  int below = std::min(axis.size->ranks, most), above = axis.size->ranks;
  while (most % below != 0) --below;
  add(below);
  while (above < most && most % above != 0) ++above;
  if (above <= most && above != below) add(above);
  return sizes;
}

void check_product(const Axes& axes, bool any_open, int ranks) {
  constexpr int64_t kMany = int64_t{1} << 40;  // more than there are ranks
  int64_t product = 1;
  std::vector<std::string> said, fits;
  for (const Axis& axis : axes) {
    if (axis.is_open()) continue;
    product = std::min(product * axis.size->ranks, kMany);
    if (axis.size->ranks > 1) said.push_back(axis.said());
  }
  if (any_open ? ranks % product == 0 : product == ranks) return;
  for (const Axis& axis : axes) {
    int64_t others = 1;
    for (const Axis& other : axes) {
      if (&other != &axis && !other.is_open()) {
        others = std::min(others * other.size->ranks, kMany);
      }
    }
    if (axis.size->ranks <= 1) continue;
    for (std::string& one : fitting(axis, others, any_open, ranks)) fits.push_back(std::move(one));
  }
  TS_CHECK_AS(ConfigError, !said.empty(), "ParallelDims", "no size is above 1, and there are ",
              ranks, " ranks; let one of dp_shard_size and dp_replicate_size be -1");
  TS_THROW(ConfigError, "ParallelDims", joined(said, " and "), " would make ", product, " ranks, ",
           any_open ? "which do not divide the " : "and there are ", ranks,
           any_open ? " that there are" : "", "; ",
           fits.empty() ? "leave one of the sizes out" : joined(fits, " or ") + " would fit");
}

std::vector<MeshAxis> axes_of(const ParallelSizes& sizes, int ranks) {
  const Axes axes = {{{"pp", &sizes.pp},
                      {"dp_replicate", &sizes.dp_replicate},
                      {"dp_shard", &sizes.dp_shard},
                      {"cp", &sizes.cp},
                      {"tp", &sizes.tp}}};
  int open = 0, left = ranks;
  for (const Axis& axis : axes) {
    open += axis.is_open();
    TS_CHECK_AS(ConfigError, axis.size->ranks >= 1 || (axis.is_open() && open == 1), "ParallelDims",
                axis.said(),
                ": sizes are at least 1, and -1 may stand once for what the others leave");
  }
  check_product(axes, open > 0, ranks);
  for (const Axis& axis : axes) left /= axis.is_open() ? 1 : axis.size->ranks;
  std::vector<MeshAxis> result;
  for (const Axis& axis : axes) {
    result.push_back({axis.name, axis.is_open() ? left : axis.size->ranks});
  }
  // One that says whose batches are a rank's own stays, of whatever size.
  constexpr size_t kReplicate = 1, kShard = 2;
  const size_t stays = sizes.dp_replicate.ranks == -1 ? kReplicate : kShard;
  const bool any_data = result[kReplicate].size > 1 || result[kShard].size > 1;
  const std::string kept = any_data ? "" : result[stays].name;
  std::erase_if(result, [&](const MeshAxis& axis) { return axis.size == 1 && axis.name != kept; });
  return result;
}

}  // namespace

ParallelDims::ParallelDims(Group& world, const ParallelSizes& sizes)
    : ParallelDims(world, axes_of(sizes, world.size())) {}

ParallelDims::ParallelDims(Group& world, std::vector<MeshAxis> axes)
    : mesh_(world, std::move(axes)) {
  const auto name_product = [&](const char* name, std::vector<std::string_view> product) {
    std::erase_if(product, [&](std::string_view axis) { return !mesh_.has(axis); });
    if (!product.empty()) mesh_.flatten(product, name);
  };
  name_product("dp", {"dp_replicate", "dp_shard"});
  name_product("loss", {"dp_replicate", "dp_shard", "cp"});
  name_product("fsdp", {"dp_shard", "cp"});
  name_product("stage", {"dp_replicate", "dp_shard", "cp", "tp"});
  if (!mesh_.has("pp") || !world.backend().moves_data()) return;
  pipeline_outputs_ = mesh_.group("pp").split(0);
  pipeline_gradients_ = mesh_.group("pp").split(0);
}

Group& ParallelDims::pipeline_group(const std::shared_ptr<Group>& group) {
  TS_CHECK_AS(ConfigError, group != nullptr, "ParallelDims",
              "has no ranks along 'pp' that could send; give pp_size more than 1");
  return *group;
}

Mesh& ParallelDims::parameter_mesh() {
  TS_CHECK_AS(ConfigError, mesh_.has("fsdp"), "ParallelDims",
              "has nothing to cut along 'dp_shard' of ", mesh_.describe(),
              "; give dp_shard_size more than 1, or train whole copies (ddp)");
  std::vector<std::string_view> axes = {mesh_.has("cp") ? "fsdp" : "dp_shard"};
  if (mesh_.has("dp_replicate")) axes.insert(axes.begin(), "dp_replicate");
  const bool all = !mesh_.has("cp") && axes.size() == mesh_.axes().size();
  return all ? mesh_ : mesh_.submesh(axes);
}

// ---- Of a context ------------------------------------------------------------------------------

namespace {

// Parameters refer to their meshes as long as they live.
struct DimsSlot {
  struct Made {
    std::weak_ptr<Group> world;
    std::unique_ptr<ParallelDims> dims;
  };
  std::vector<Made> made;
};

}  // namespace

ParallelDims& parallel_dims(const ParallelSizes& sizes) {
  const std::shared_ptr<Group>& world = rank_context().world;
  const std::vector<MeshAxis> axes = axes_of(sizes, world->size());
  auto& made = Context::current().slot<DimsSlot>().made;
  const auto known = std::ranges::find_if(made, [&](const DimsSlot::Made& one) {
    return one.world.lock() == world && one.dims->mesh().axes() == axes;
  });
  if (known != made.end()) return *known->dims;
  made.push_back({world, std::unique_ptr<ParallelDims>(new ParallelDims(*world, axes))});
  return *made.back().dims;
}

}  // namespace tessera::distributed
