// The ranks of a group as a grid with named axes.
//
//     Mesh mesh(world());                                        // one axis, "dp": all ranks
//     Mesh grid(world(), {{"dp_replicate", 2}, {"dp_shard", 4}});
//     grid.group("dp_shard").all_reduce(x);                      // the 4 ranks of this row
//
// Everything that depends on a number of ranks (loaders, loss scaling, sharding) asks an axis for
// it, never the world. Ranks are numbered row by row: the last axis varies fastest.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct MeshAxis {
  std::string name;
  int size = -1;  // -1 (of one axis at most): what the others leave
};

class Mesh {
 public:
  // Collective: every rank of `world` makes the same mesh. `world` must outlive it. Throws
  // ConfigError where the sizes do not multiply to the number of ranks, or a name is empty or used
  // twice.
  explicit Mesh(Group& world, std::vector<MeshAxis> axes = {{"dp", -1}});
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const std::vector<MeshAxis>& axes() const { return axes_; }
  bool has(std::string_view axis) const;
  // Of one axis; ConfigError for an unknown name.
  int size(std::string_view axis) const;
  int coordinate(std::string_view axis) const;  // this rank's place along the axis
  Group& group(std::string_view axis) const;    // the ranks that differ from this one only there
  std::string describe() const;                 // "mesh(dp_replicate=2, dp_shard=4)"

 private:
  size_t position(std::string_view axis) const;

  std::vector<MeshAxis> axes_;
  std::vector<int> coordinates_;
  std::vector<Group*> groups_;
  std::vector<std::shared_ptr<Group>> owned_;  // groups that were split off
};

// The mesh of the current context; at first one axis "dp" over world(). Collective when it is made.
Mesh& mesh();
void set_mesh(std::shared_ptr<Mesh> mesh);

}  // namespace tessera::distributed
