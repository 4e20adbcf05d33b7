#include <tessera/distributed/tensor_parallel/compute_mesh.h>

#include <algorithm>

#include <tessera/core/context.h>

namespace tessera::distributed {
namespace {

struct ComputeMeshSlot {
  Mesh* mesh = nullptr;
  std::weak_ptr<const void> lifetime;
  std::unique_ptr<ComputeMesh> axes;
  std::unique_ptr<MarkRules> rules;
};

}  // namespace

ComputeMesh::ComputeMesh(Mesh& mesh) : lifetime_(mesh.lifetime()) {
  TS_CHECK_AS(ConfigError, mesh.axes().size() <= kMaxAxes, "compute mesh", "has at most ", kMaxAxes,
              " axes; got ", mesh.describe());
  for (const MeshAxis& axis : mesh.axes()) {
    names_.push_back(axis.name);
    groups_.push_back(&mesh.group(axis.name));
  }
}

size_t ComputeMesh::position(std::string_view axis) const {
  const auto found = std::ranges::find(names_, axis);
  TS_CHECK_AS(ConfigError, found != names_.end(), "compute mesh", "has no axis '", axis, "'");
  return static_cast<size_t>(found - names_.begin());
}

Group& ComputeMesh::group(size_t axis) const {
  TS_CHECK_AS(ConfigError, !lifetime_.expired(), "compute mesh",
              "the mesh is gone; keep it as long as the model that was divided over it");
  return *groups_[axis];
}

ComputeMesh& compute_mesh() {
  const auto& slot = Context::current().slot<ComputeMeshSlot>();
  TS_CHECK_AS(ConfigError, slot.axes != nullptr, "compute mesh",
              "this context has none; parallelize_module(model, mesh[\"tp\"]) gives it one");
  return *slot.axes;
}

ComputeMesh& use_compute_mesh(Mesh& mesh) {
  Context& context = Context::current();
  auto& slot = context.slot<ComputeMeshSlot>();
  if (slot.axes != nullptr && !slot.lifetime.expired()) {
    TS_CHECK_AS(ConfigError, slot.mesh == &mesh, "compute mesh", "this context calculates on ",
                slot.mesh->describe(), " already; got ", mesh.describe(),
                "; divide all models over one mesh of all compute axes");
    return *slot.axes;
  }
  slot = {&mesh, mesh.lifetime(), std::make_unique<ComputeMesh>(mesh), nullptr};
  slot.rules = make_rules(*slot.axes);
  context.slot<MarkRulesSlot>().rules = slot.rules.get();
  return *slot.axes;
}

}  // namespace tessera::distributed
