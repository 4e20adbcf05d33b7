#include <tessera/distributed/mesh/mesh.h>

#include <algorithm>

#include <tessera/core/context.h>
#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

struct MeshSlot {
  std::shared_ptr<Mesh> mesh;
};

}  // namespace

Mesh::Mesh(Group& world, std::vector<MeshAxis> axes) : axes_(std::move(axes)) {
  const std::string_view where = "Mesh";
  TS_CHECK_AS(ConfigError, !axes_.empty(), where, "needs an axis; got none");
  int product = 1;
  MeshAxis* open = nullptr;
  for (size_t i = 0; i < axes_.size(); ++i) {
    MeshAxis& axis = axes_[i];
    TS_CHECK_AS(ConfigError, !axis.name.empty(), where, "axis ", i, " needs a name");
    for (size_t j = 0; j < i; ++j) {
      TS_CHECK_AS(ConfigError, axes_[j].name != axis.name, where, "two axes are named '", axis.name,
                  "'; give each a name of its own");
    }
    TS_CHECK_AS(ConfigError, axis.size >= 1 || (axis.size == -1 && open == nullptr), where,
                "axis '", axis.name, "' has size ", axis.size,
                "; sizes are at least 1, and -1 may stand once for what the others leave");
    if (axis.size == -1) {
      open = &axis;
    } else {
      product *= axis.size;
    }
  }
  if (open != nullptr && world.size() % product == 0) {
    open->size = world.size() / product;
    product *= open->size;
  }
  TS_CHECK_AS(ConfigError, product == world.size(), where, "the axes ", describe(), " make ",
              product, " ranks, the group has ", world.size(),
              "; choose sizes whose product is the number of ranks");
  coordinates_.resize(axes_.size());
  groups_.resize(axes_.size());
  int stride = 1;
  for (size_t i = axes_.size(); i-- > 0;) {
    const int size = axes_[i].size;
    coordinates_[i] = world.rank() / stride % size;
    if (size == world.size()) {
      groups_[i] = &world;
    } else {
      // Ranks with the same other coordinates: the rank with this one's coordinate set to 0.
      owned_.push_back(world.split(world.rank() - coordinates_[i] * stride, coordinates_[i]));
      groups_[i] = owned_.back().get();
    }
    stride *= size;
  }
}

size_t Mesh::position(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &MeshAxis::name);
  TS_CHECK_AS(ConfigError, found != axes_.end(), "Mesh", "has no axis '", axis, "'; it is ",
              describe());
  return static_cast<size_t>(found - axes_.begin());
}

bool Mesh::has(std::string_view axis) const {
  return std::ranges::find(axes_, axis, &MeshAxis::name) != axes_.end();
}
int Mesh::size(std::string_view axis) const { return axes_[position(axis)].size; }
int Mesh::coordinate(std::string_view axis) const { return coordinates_[position(axis)]; }
Group& Mesh::group(std::string_view axis) const { return *groups_[position(axis)]; }

std::string Mesh::describe() const {
  std::string text = "mesh(";
  for (const MeshAxis& axis : axes_) {
    if (text.back() != '(') text += ", ";
    text += axis.name + "=" + std::to_string(axis.size);
  }
  return text + ")";
}

Mesh& mesh() {
  MeshSlot& slot = Context::current().slot<MeshSlot>();
  if (!slot.mesh) slot.mesh = std::make_shared<Mesh>(world());
  return *slot.mesh;
}

void set_mesh(std::shared_ptr<Mesh> mesh) {
  Context::current().slot<MeshSlot>().mesh = std::move(mesh);
}

}  // namespace tessera::distributed
