#include <tessera/distributed/mesh/placement.h>

#include <algorithm>
#include <sstream>

#include <tessera/core/error.h>

namespace tessera::distributed {
namespace {

template <class... Cases>
struct Match : Cases... {
  using Cases::operator()...;
};

std::string name_of_reduction(ReduceOp op) { return std::string(name_of(op)); }

}  // namespace

std::string describe(const Placement& placement) {
  return std::visit(
      Match{
          [](const Replicate&) { return std::string("Replicate"); },
          [](const Shard& shard) { return "Shard(" + std::to_string(shard.dim) + ")"; },
          [](const StridedShard& shard) {
            return "StridedShard(" + std::to_string(shard.dim) + ", " +
                   std::to_string(shard.split_factor) + ")";
          },
          [](const Partial& partial) { return "Partial(" + name_of_reduction(partial.op) + ")"; }},
      placement);
}

std::string describe(const Placements& placements) {
  std::string text = "[";
  for (const Placement& placement : placements) {
    if (text.size() > 1) text += ", ";
    text += describe(placement);
  }
  return text + "]";
}

bool is_partial(const Placement& placement) { return std::holds_alternative<Partial>(placement); }

int shard_dim(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim;
  if (const auto* shard = std::get_if<StridedShard>(&placement)) return shard->dim;
  return -1;
}

std::pair<int64_t, int64_t> chunk_of(int64_t length, int parts, int i) {
  const int64_t size = (length + parts - 1) / parts;
  return {std::min(i * size, length), std::min((i + 1) * size, length)};
}

DTensorSpec DTensorSpec::checked(std::string_view where) const {
  TS_CHECK_AS(ConfigError, placements.size() == mesh->axes().size(), where,
              "needs a placement for each axis of ", mesh->describe(), "; got ",
              distributed::describe(placements));
  DTensorSpec result = *this;
  const Partial* first = nullptr;
  for (size_t i = 0; i < placements.size(); ++i) {
    Placement& placement = result.placements[i];
    const auto wrap = [&](int& dim) { dim = static_cast<int>(wrap_dim(dim, shape.size(), where)); };
    if (auto* shard = std::get_if<Shard>(&placement)) wrap(shard->dim);
    if (auto* shard = std::get_if<StridedShard>(&placement)) wrap(shard->dim);
    const auto* partial = std::get_if<Partial>(&placement);
    if (partial == nullptr) continue;
    TS_CHECK_AS(ConfigError, partial->op != ReduceOp::kProduct, where,
                "a Partial is a sum, mean, max or min; got ", distributed::describe(placements));
    if (first == nullptr) first = partial;
    TS_CHECK_AS(ConfigError, first->op == partial->op, where,
                "the Partials of one tensor have one reduction; got ",
                distributed::describe(placements), "; reduce one axis before the other");
  }
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* strided = std::get_if<StridedShard>(&result.placements[i]);
    if (strided == nullptr) continue;
    int parts = 1;
    for (size_t j = i + 1; j < placements.size(); ++j) {
      if (shard_dim(result.placements[j]) == strided->dim) parts *= mesh->axes()[j].size;
    }
    TS_CHECK_AS(ConfigError, strided->split_factor == parts, where, "the axes to the right of '",
                mesh->axes()[i].name, "' cut dimension ", strided->dim, " of ", mesh->describe(),
                " into ", parts, " parts; the split factor of ", distributed::describe(placements),
                " must say so");
  }
  return result;
}

std::vector<size_t> DTensorSpec::cuts(int dim) const {
  std::vector<size_t> plain, strided;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (shard_dim(placements[i]) != dim) continue;
    (std::holds_alternative<Shard>(placements[i]) ? plain : strided).push_back(i);
  }
  plain.insert(plain.end(), strided.rbegin(), strided.rend());
  return plain;
}

Box DTensorSpec::local_box() const {
  Box box = Box::whole(shape);
  for (int dim = 0; dim < shape.size(); ++dim) {
    for (const size_t axis : cuts(dim)) {
      const MeshAxis& along = mesh->axes()[axis];
      const auto [begin, end] = chunk_of(box.extent[dim], along.size, mesh->coordinate(along.name));
      box.offset[dim] += begin;
      box.extent[dim] = end - begin;
    }
  }
  return box;
}

std::string DTensorSpec::describe(DType dtype) const {
  std::ostringstream out;
  out << dtype << shape << " on " << mesh->describe() << ": " << distributed::describe(placements);
  return out.str();
}

DTensorSpec DTensorSpec::of_gradient() const {
  DTensorSpec result = *this;
  for (Placement& placement : result.placements) {
    if (is_partial(placement)) placement = Replicate();
  }
  return result;
}

DTensorSpec DTensorSpec::replicated() const {
  return with(Placements(placements.size(), Replicate()));
}

}  // namespace tessera::distributed
