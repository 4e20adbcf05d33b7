// The mesh whose ranks calculate one model together, in the current context: tensors have a mark
// along each of its axes. Data parallelism is no axis of it: a module sees one micro-batch.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/autograd/mark_rules.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/tensor_parallel/mark.h>

namespace tessera::distributed {

class ComputeMesh {
 public:
  // ConfigError for more than four axes.
  explicit ComputeMesh(Mesh& mesh);

  size_t axes() const { return names_.size(); }
  size_t position(std::string_view axis) const;  // ConfigError where there is none of that name
  const std::string& name(size_t axis) const { return names_[axis]; }
  Group& group(size_t axis) const;  // ConfigError where the mesh is gone

 private:
  std::weak_ptr<const void> lifetime_;
  std::vector<std::string> names_;
  std::vector<Group*> groups_;
};

// ConfigError where the context has none.
ComputeMesh& compute_mesh();
// Gives the context one: ops check marks from here on. The same mesh again changes nothing;
// ConfigError for another one while the first one lives.
ComputeMesh& use_compute_mesh(Mesh& mesh);

// The rules for marks along its axes: a table at the head of compute_mesh_rules.cpp.
std::unique_ptr<MarkRules> make_rules(const ComputeMesh& mesh);

}  // namespace tessera::distributed
