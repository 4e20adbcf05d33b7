#include <tessera/distributed/mesh/mesh.h>

#include <algorithm>
#include <iterator>

#include <tessera/core/context.h>
#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

struct MeshSlot {
  std::shared_ptr<Mesh> mesh;
};

}  // namespace

Mesh::Mesh(Group& world, std::vector<MeshAxis> axes) : world_(&world), axes_(std::move(axes)) {
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
  if (open != nullptr) {
    TS_CHECK_AS(ConfigError, world.size() % product == 0, where, "the axes of ", describe(),
                " beside '", open->name, "' make ", product, ", which does not divide the group's ",
                world.size(), " ranks; choose sizes whose product does");
    open->size = world.size() / product;
    product *= open->size;
  }
  TS_CHECK_AS(ConfigError, product == world.size(), where, "the axes ", describe(), " make ",
              product, " ranks, the group has ", world.size(),
              "; choose sizes whose product is the number of ranks");
  coordinates_ = coordinates_of(world.rank());
  groups_.resize(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    groups_[i] = axes_[i].size == world.size() ? &world : &make_group({i});
  }
}

Mesh::Mesh(const Mesh& parent, std::vector<MeshProduct> axes)
    : parent_(&parent), origins_(std::move(axes)) {
  for (const MeshProduct& axis : origins_) {
    const std::vector<std::string_view> names(axis.axes.begin(), axis.axes.end());
    axes_.push_back({axis.name, parent.size(names)});
    coordinates_.push_back(parent.coordinate(names));
    groups_.push_back(&parent.group(names));
  }
}

size_t Mesh::position(std::string_view axis) const {
  const auto found = std::ranges::find(axes_, axis, &MeshAxis::name);
  TS_CHECK_AS(ConfigError, found != axes_.end(), "Mesh", "has no axis '", axis, "'; it is ",
              describe());
  return static_cast<size_t>(found - axes_.begin());
}

Mesh::Positions Mesh::positions(Names axes) const {
  TS_CHECK_AS(ConfigError, !axes.empty(), "Mesh", "needs the name of an axis; got none for ",
              describe());
  Positions result;
  for (const std::string_view axis : axes) {
    const Positions* const product = product_named(axis);
    for (const size_t at : product != nullptr ? *product : Positions{position(axis)}) {
      TS_CHECK_AS(ConfigError, std::ranges::find(result, at) == result.end(), "Mesh", "axis '",
                  axes_[at].name, "' was named twice; name each axis of ", describe(), " once");
      result.push_back(at);
    }
  }
  std::ranges::sort(result);
  return result;
}

std::vector<std::string_view> Mesh::names_at(const Positions& axes) const {
  std::vector<std::string_view> names;
  for (const size_t axis : axes) names.push_back(axes_[axis].name);
  return names;
}

const Mesh::Positions* Mesh::product_named(std::string_view name) const {
  const auto found = named_products_.find(name);
  return found == named_products_.end() ? nullptr : &found->second;
}

bool Mesh::has(std::string_view axis) const {
  return product_named(axis) != nullptr ||
         std::ranges::find(axes_, axis, &MeshAxis::name) != axes_.end();
}
int Mesh::size(std::string_view axis) const {
  return product_named(axis) != nullptr ? size({axis}) : axes_[position(axis)].size;
}
int Mesh::coordinate(std::string_view axis) const {
  return product_named(axis) != nullptr ? coordinate({axis}) : coordinates_[position(axis)];
}
Group& Mesh::group(std::string_view axis) const {
  return product_named(axis) != nullptr ? group({axis}) : *groups_[position(axis)];
}

void Mesh::flatten(Names axes, std::string name) {
  const Positions product = positions(axes);
  TS_CHECK_AS(ConfigError, !name.empty() && !has(name), "Mesh", "flatten: '", name,
              "' is no name for a product of ", describe(), "; give it one that no axis has");
  check_adjacent(product, name, "flatten");
  group(axes);
  named_products_.emplace(std::move(name), product);
}

void Mesh::check_adjacent(const Positions& product, std::string_view name,
                          const char* where) const {
  TS_CHECK_AS(ConfigError, product.back() - product.front() + 1 == product.size(), "Mesh", where,
              ": between the axes of '", name, "' lies another one of ", describe(),
              "; name that one too, or order the mesh otherwise");
}

int Mesh::size(Names axes) const {
  int product = 1;
  for (const size_t axis : positions(axes)) product *= axes_[axis].size;
  return product;
}

int Mesh::coordinate(Names axes) const {
  int place = 0;
  for (const size_t axis : positions(axes)) place = place * axes_[axis].size + coordinates_[axis];
  return place;
}

Group& Mesh::group(Names names) const {
  const Positions asked = positions(names);
  Positions axes;  // those along which there is another rank
  std::ranges::copy_if(asked, std::back_inserter(axes),
                       [&](size_t i) { return axes_[i].size > 1; });
  if (axes.empty()) return *groups_[asked.front()];
  if (axes.size() == 1) return *groups_[axes.front()];
  if (parent_ != nullptr) {
    std::vector<std::string_view> theirs;
    for (const size_t axis : axes) {
      const std::vector<std::string>& origin = origins_[axis].axes;
      theirs.insert(theirs.end(), origin.begin(), origin.end());
    }
    return parent_->group(theirs);
  }
  const auto [made, added] = products_.try_emplace(axes, nullptr);
  if (!added) return *made->second;
  try {
    made->second = size(names_at(axes)) == world_->size() ? world_ : &make_group(axes);
  } catch (...) {
    products_.erase(made);
    throw;
  }
  return *made->second;
}

Group& Mesh::make_group(const Positions& axes) const {
  std::vector<int> members;  // the ranks with the same other coordinates, in their order
  for (int rank = 0; rank < world_->size(); ++rank) {
    std::vector<int> others = coordinates_of(rank);
    for (const size_t axis : axes) others[axis] = coordinates_[axis];
    if (others == coordinates_) members.push_back(rank);
  }
  // Ranks that are not there say no colour, so there the members are listed.
  owned_.push_back(world_->backend().moves_data() ? world_->split(members.front(), world_->rank())
                                                  : world_->subgroup(members));
  return *owned_.back();
}

int Mesh::size() const {
  int product = 1;
  for (const MeshAxis& axis : axes_) product *= axis.size;
  return product;
}
int Mesh::coordinate() const {
  int place = 0;
  for (size_t i = 0; i < axes_.size(); ++i) place = place * axes_[i].size + coordinates_[i];
  return place;
}
std::vector<int> Mesh::coordinates_of(int rank) const {
  std::vector<int> coordinates(axes_.size());
  for (size_t i = axes_.size(); i-- > 0; rank /= axes_[i].size)
    coordinates[i] = rank % axes_[i].size;
  return coordinates;
}
Group& Mesh::group() const {
  std::vector<std::string_view> names;
  for (const MeshAxis& axis : axes_) names.push_back(axis.name);
  return group(names);
}

Mesh& Mesh::submesh(Names names) const {
  positions(names);  // which are known, each once
  std::vector<std::string> axes(names.begin(), names.end());
  std::ranges::sort(axes, {}, [&](const std::string& axis) {
    const Positions* const product = product_named(axis);
    return product != nullptr ? product->front() : position(axis);
  });
  std::unique_ptr<Mesh>& made = submeshes_[axes];
  if (!made) {
    std::vector<MeshProduct> origins;
    for (const std::string& axis : axes) origins.push_back({axis, {axis}});
    made.reset(new Mesh(*this, std::move(origins)));
  }
  return *made;
}

Mesh& Mesh::view(const std::vector<MeshProduct>& products) const {
  TS_CHECK_AS(ConfigError, !products.empty(), "Mesh", "view: needs an axis; got none for ",
              describe());
  std::vector<MeshProduct> origins = products;
  std::string key;
  size_t next = 0;  // the first axis that may come
  for (size_t i = 0; i < origins.size(); ++i) {
    MeshProduct& own = origins[i];
    if (own.axes.empty()) own.axes = {own.name};
    for (size_t j = 0; j < i; ++j) {
      TS_CHECK_AS(ConfigError, origins[j].name != own.name, "Mesh", "view: two axes are named '",
                  own.name, "'; give each a name of its own");
    }
    const std::vector<std::string_view> names(own.axes.begin(), own.axes.end());
    const Positions product = positions(names);
    check_adjacent(product, own.name, "view");
    TS_CHECK_AS(ConfigError, product.front() >= next, "Mesh", "view: '", own.name,
                "' begins before or within what was named before it; name the axes of ", describe(),
                " once and in their order");
    next = product.back() + 1;
    key += own.name + "=";
    for (const size_t axis : product) key += axes_[axis].name + ",";
  }
  std::unique_ptr<Mesh>& made = views_[key];
  if (!made) {
    std::unique_ptr<Mesh> view(new Mesh(*this, std::move(origins)));
    view->make_products();
    made = std::move(view);
  }
  return *made;
}

void Mesh::make_products() const {
  for (size_t chosen = 1; chosen < size_t{1} << axes_.size(); ++chosen) {
    Positions product;
    for (size_t i = 0; i < axes_.size(); ++i) {
      if ((chosen >> i & 1) != 0) product.push_back(i);
    }
    group(names_at(product));
  }
}

Mesh::Positions Mesh::outermost_positions(const Positions& axes) const {
  if (parent_ == nullptr) return axes;
  Positions theirs;
  for (const size_t axis : axes) {
    const std::vector<std::string>& origin = origins_[axis].axes;
    for (const size_t at :
         parent_->positions(std::vector<std::string_view>(origin.begin(), origin.end()))) {
      theirs.push_back(at);
    }
  }
  return parent_->outermost_positions(theirs);
}

Mesh& joined(const Mesh& a, const Mesh& b) {
  const Mesh& whole = a.outermost();
  TS_CHECK_AS(ConfigError, &whole == &b.outermost(), "Mesh", "joined: ", a.describe(), " and ",
              b.describe(), " are no axes of one mesh; take sub-meshes of one");
  std::vector<std::pair<Mesh::Positions, std::string>> axes;
  for (const Mesh* const mesh : {&a, &b}) {
    for (size_t i = 0; i < mesh->axes_.size(); ++i) {
      axes.emplace_back(mesh->outermost_positions({i}), mesh->axes_[i].name);
    }
  }
  std::ranges::sort(axes);
  std::vector<MeshProduct> products;
  size_t next = 0;
  bool all = axes.size() == whole.axes_.size();
  for (const auto& [product, name] : axes) {
    TS_CHECK_AS(ConfigError, product.front() >= next, "Mesh", "joined: ", a.describe(), " and ",
                b.describe(), " share '", whole.axes_[product.front()].name,
                "'; take sub-meshes of other axes");
    next = product.back() + 1;
    MeshProduct& own = products.emplace_back(MeshProduct{name});
    for (const size_t axis : product) own.axes.push_back(whole.axes_[axis].name);
    all = all && own.axes == std::vector<std::string>{name};
  }
  if (!all) return whole.view(products);
  whole.make_products();
  // As sub-meshes are given out: whoever has one may ask for groups.
  return const_cast<Mesh&>(whole);
}

Mesh& widened(const Mesh& mesh, const Mesh& more) {
  const Mesh& whole = mesh.outermost();
  TS_CHECK_AS(ConfigError, &whole == &more.outermost(), "Mesh", "widened: ", mesh.describe(),
              " and ", more.describe(), " are no axes of one mesh; take sub-meshes of one");
  std::vector<MeshProduct> products;
  for (size_t i = 0; i < mesh.axes_.size(); ++i) {
    MeshProduct& own = products.emplace_back(MeshProduct{mesh.axes_[i].name});
    for (const size_t axis : mesh.outermost_positions({i})) {
      own.axes.push_back(whole.axes_[axis].name);
    }
  }
  for (size_t i = 0; i < more.axes_.size(); ++i) {
    products.back().name += "_" + more.axes_[i].name;
    for (const size_t axis : more.outermost_positions({i})) {
      products.back().axes.push_back(whole.axes_[axis].name);
    }
  }
  return whole.view(products);
}

std::string Mesh::own_text() const {
  std::string text = "mesh(";
  for (const MeshAxis& axis : axes_) {
    if (text.back() != '(') text += ", ";
    text += axis.name + "=" + std::to_string(axis.size);
  }
  return text + ")";
}

std::string Mesh::describe() const {
  return parent_ == nullptr ? own_text() : own_text() + " of " + parent_->describe();
}

Mesh& mesh() {
  MeshSlot& slot = Context::current().slot<MeshSlot>();
  if (!slot.mesh) slot.mesh = std::make_shared<Mesh>(world());
  return *slot.mesh;
}

}  // namespace tessera::distributed
