// The ranks of a group as a grid with named axes.
//
//     Mesh mesh(world());                                        // one axis, "dp": all ranks
//     Mesh grid(world(), {{"dp_replicate", 2}, {"dp_shard", 2}, {"cp", 2}});
//     grid.group("dp_shard").all_reduce(x);                      // the 2 ranks of this row
//     grid.group({"dp_shard", "cp"}).all_reduce(x);              // a product: 4 ranks
//     grid.submesh({"dp_replicate", "dp_shard"});                // a mesh of those two axes
//     grid["cp"];                                                // and of one
//     grid.flatten({"dp_replicate", "dp_shard"}, "dp");          // a product that has a name:
//     grid["dp"];                                                // an axis from now on
//     grid.view({{"dp_replicate"}, {"fsdp", {"dp_shard", "cp"}}});  // a mesh of products
//
// Code that depends on a number of ranks (loaders, loss scaling, sharding) uses an axis or a
// product of axes, never the world. Ranks are numbered row by row: the last axis varies fastest.
//
// [Note: collective calls] Groups are made by a collective of the whole mesh: the constructor makes
// [Note: collective calls] Groups are made by a collective of the whole mesh: the constructor makes
// those of single axes, group({..}) and flatten() that of a product at its first use (a sub-mesh
// asks its parent), view() those of all its products. Every rank of the outermost mesh makes these
// calls alike, even if its own part of a product needs none. Everything else communicates nothing:
// a product that was used before, one that is a single axis (the others having size 1) or the whole
// world, and submesh(). One thread at a time.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct MeshAxis {
  std::string name;
  int size = -1;  // -1 (of one axis at most): what the others leave
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

// An axis of a view: a product of axes. None: the axis of that name.
struct MeshProduct {
  std::string name;
  std::vector<std::string> axes = {};
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
  bool has(std::string_view axis) const;  // an axis, or a product that has this name
  // For one of those; ConfigError for an unknown name.
  int size(std::string_view axis) const;
  int coordinate(std::string_view axis) const;  // this rank's place along the axis
  Group& group(std::string_view axis) const;    // the ranks that differ from this one only there

  // Gives a product the name by which it is an axis wherever this mesh is asked for one, of
  // submesh() too; axes() stays as it is. Makes its group. ConfigError for axes between which
  // another one lies, whose ranks would not be in the mesh's order, and for a name that is taken.
  using Names = std::span<const std::string_view>;
  void flatten(Names axes, std::string name);
  void flatten(std::initializer_list<std::string_view> axes, std::string name) {
    flatten(span_of(axes), std::move(name));
  }

  // For a product: the ranks that differ from this one only along these axes, numbered row by row
  // in the mesh's order of axes, whatever order the names have. ConfigError for a name that is
  // unknown or comes twice, and for none. group() may be collective, see [Note: collective calls].
  int size(Names axes) const;
  int coordinate(Names axes) const;
  Group& group(Names axes) const;
  int size(std::initializer_list<std::string_view> axes) const { return size(span_of(axes)); }
  int coordinate(std::initializer_list<std::string_view> axes) const {
    return coordinate(span_of(axes));
  }
  Group& group(std::initializer_list<std::string_view> axes) const { return group(span_of(axes)); }

  int size() const;                                 // of the whole mesh
  int coordinate() const;                           // this rank's number in it
  std::vector<int> coordinates_of(int rank) const;  // of its rank with that number, of each axis
  Group& group() const;                             // all its ranks

  // The mesh of some of the axes, in this one's order, that this rank lies in; a product that has a
  // name is one axis of it. Its groups are this one's, which owns it: the same object each time.
  // ConfigError as above.
  Mesh& submesh(Names axes) const;
  Mesh& submesh(std::initializer_list<std::string_view> axes) const {
    return submesh(span_of(axes));
  }
  Mesh& operator[](std::string_view axis) const { return submesh({axis}); }
  // The mesh of these products, in this one's order, that this rank lies in: a chunk of a chunk is
  // no chunk of the product (10 rows on 2 x 3), so what is cut over several axes as over one is cut
  // over an axis of a view. Made once, as submesh(), with the groups of all products of its axes
  // (collective at the first call). ConfigError as for flatten(), for products that share an axis
  // or have another order, and for names that come twice.
  Mesh& view(const std::vector<MeshProduct>& products) const;

  // Expires with the mesh: for who keeps its address.
  std::weak_ptr<const void> lifetime() const { return lifetime_; }

  // "mesh(dp_replicate=2, dp_shard=4)"; "mesh(dp=2) of mesh(dp=2, tp=2)"
  std::string describe() const;

 private:
  using Positions = std::vector<size_t>;  // of axes, ascending

  friend Mesh& joined(const Mesh& a, const Mesh& b);
  friend Mesh& widened(const Mesh& mesh, const Mesh& more);
  Mesh(const Mesh& parent, std::vector<MeshProduct> axes);
  const Mesh& outermost() const { return parent_ == nullptr ? *this : parent_->outermost(); }
  Positions outermost_positions(const Positions& axes) const;
  void check_adjacent(const Positions& product, std::string_view name, const char* where) const;
  void make_products() const;  // collective: the groups of all products of the axes
  static Names span_of(std::initializer_list<std::string_view> names) {
    return {names.begin(), names.size()};
  }
  size_t position(std::string_view axis) const;
  const Positions* product_named(std::string_view name) const;  // null where it names none
  Positions positions(Names axes) const;
  std::vector<std::string_view> names_at(const Positions& axes) const;
  Group& make_group(const Positions& axes) const;  // collective
  std::string own_text() const;

  std::shared_ptr<const void> lifetime_ = std::make_shared<char>();
  const Mesh* parent_ = nullptr;  // of a sub-mesh
  Group* world_ = nullptr;        // of the outermost mesh
  std::vector<MeshAxis> axes_;
  std::vector<MeshProduct> origins_;  // of the axes of a sub-mesh, in the parent
  std::vector<int> coordinates_;
  std::vector<Group*> groups_;
  mutable std::vector<std::shared_ptr<Group>> owned_;  // groups that were split off
  mutable std::map<Positions, Group*> products_;
  std::map<std::string, Positions, std::less<>> named_products_;
  mutable std::map<std::vector<std::string>, std::unique_ptr<Mesh>> submeshes_;
  mutable std::map<std::string, std::unique_ptr<Mesh>> views_;
};

// The mesh of the axes of both, which are sub-meshes or views of one mesh and share no axis of it,
// in its order: where they are all its axes that mesh itself, else a view. Collective as view().
// ConfigError for others.
Mesh& joined(const Mesh& a, const Mesh& b);
// The first with the product of its last axis and all of the other's in the last one's place,
// "dp_shard_tp": a view, so made once and collective as that. ConfigError where that is no axis.
Mesh& widened(const Mesh& mesh, const Mesh& more);

// The mesh of the current context; at first one axis "dp" over world(). Collective when it is made.
Mesh& mesh();

}  // namespace tessera::distributed
