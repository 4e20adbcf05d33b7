#include <tessera/distributed/mesh/placement.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/placement.h>

namespace tessera::distributed {
namespace {

template <class... Cases>
struct Match : Cases... {
  using Cases::operator()...;
};

std::string name_of_reduction(ReduceOp op) { return std::string(name_of(op)); }

// A FlatShard has copies and even cuts alone beside it, and its chunks hold every element.
void check_flat(const DTensorSpec& spec, std::string_view where) {
  const auto axis = spec.flat_axis();
  if (!axis) return;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement& placement = spec.placements[i];
    TS_CHECK_AS(
        ConfigError,
        i == *axis || (!is_partial(placement) && !std::holds_alternative<FlatShard>(placement)),
        where, "beside a FlatShard the other axes replicate or cut dimensions; got ",
        describe(spec.placements), "; reduce or gather along them first");
  }
  for (int dim = 0; dim < spec.shape.size(); ++dim) {
    int64_t parts = 1;
    for (const size_t cut : spec.cuts(dim)) {
      if (parts == 1) parts = blocks_of(spec.placements[cut]);
      parts *= spec.mesh->axes()[cut].size;
    }
    TS_CHECK_AS(ConfigError, spec.shape[dim] % parts == 0, where,
                "beside a FlatShard the other axes cut evenly; got ", describe(spec.placements),
                " on ", spec.mesh->describe(), ", and dimension ", dim, " of ", spec.shape,
                " does not divide by ", parts, "; gather along them first");
  }
  const auto& flat = std::get<FlatShard>(spec.placements[*axis]);
  const int64_t ranks = spec.mesh->axes()[*axis].size, numel = numel_of(spec.shape_of_run());
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  TS_CHECK_AS(ConfigError,
              flat.offset >= 0 && flat.chunk >= 0 && flat.chunk <= kMost / ranks &&
                  numel <= flat.chunk * ranks && flat.offset <= flat.chunk * ranks - numel,
              where, "the ", ranks, " chunks of ", describe(spec.placements[*axis]),
              " must hold all of ", spec.shape_of_run(), ": offset + ", numel,
              " elements is at most chunk * ", ranks, "; give the unit's true chunk");
}

std::vector<int> own_coordinates(const Mesh& mesh) {
  std::vector<int> coordinates;
  for (const MeshAxis& axis : mesh.axes()) coordinates.push_back(mesh.coordinate(axis.name));
  return coordinates;
}

// The axes that cut each dimension.
using Cuts = std::vector<std::vector<size_t>>;

Cuts cuts_of(const DTensorSpec& spec) {
  Cuts cuts;
  for (int dim = 0; dim < spec.shape.size(); ++dim) cuts.push_back(spec.cuts(dim));
  return cuts;
}

// Neighbours as one, and none without elements but where there are none at all.
Ranges merged(const Ranges& ranges) {
  Ranges result;
  for (const auto& [begin, end] : ranges) {
    if (begin == end && length_of(ranges) > 0) continue;
    if (!result.empty() && result.back().second == begin) {
      result.back().second = end;
    } else if (begin < end || result.empty()) {
      result.emplace_back(begin, end);
    }
  }
  return result;
}

// Of the elements in `held`, counted one behind the other, those in `taken`.
Ranges within(const Ranges& held, const Ranges& taken) {
  Ranges result;
  for (const auto& [first, last] : taken) {
    int64_t before = 0;
    for (const auto& [begin, end] : held) {
      const int64_t from = std::clamp(begin + first - before, begin, end);
      result.emplace_back(from, std::clamp(begin + last - before, from, end));
      before += end - begin;
    }
  }
  return merged(result);
}

// Of a dimension, what the rank at these coordinates holds. Not of a FlatShard.
Ranges ranges_at(const DTensorSpec& spec, const std::vector<size_t>& cuts, int dim,
                 std::span<const int> coordinates) {
  Ranges held = {{0, spec.shape[dim]}};
  for (const size_t axis : cuts) {
    held = within(held, ranges_of(spec.placements[axis], length_of(held),
                                  spec.mesh->axes()[axis].size, coordinates[axis]));
  }
  return held;
}

// Of blocks the first cut of their dimension, and of a length that they divide.
void check_blocks(const DTensorSpec& spec, std::string_view where) {
  for (int dim = 0; dim < spec.shape.size(); ++dim) {
    const std::vector<size_t> cuts = spec.cuts(dim);
    for (size_t i = 0; i < cuts.size(); ++i) {
      const auto* own = std::get_if<BlockShard>(&spec.placements[cuts[i]]);
      if (own == nullptr) continue;
      TS_CHECK_AS(ConfigError, own->blocks >= 1 && spec.shape[dim] % own->blocks == 0, where,
                  "the blocks of ", describe(spec.placements[cuts[i]]),
                  " are of one size, and dimension ", dim, " of ", spec.shape,
                  " does not divide by ", own->blocks, "; give the number that it is made of");
      TS_CHECK_AS(ConfigError, i == 0 || spec.placements[cuts[i - 1]] == spec.placements[cuts[i]],
                  where, "blocks are cut before chunks; got ", describe(spec.placements), " on ",
                  spec.mesh->describe(), ", where '", spec.mesh->axes()[cuts[i - 1]].name,
                  "' cuts dimension ", dim,
                  " first; order the axes otherwise, or give that one a StridedShard");
    }
  }
}

}  // namespace

std::string describe(const Placement& placement) {
  return std::visit(
      Match{[](const Replicate&) { return std::string("Replicate"); },
            [](const Shard& shard) { return "Shard(" + std::to_string(shard.dim) + ")"; },
            [](const StridedShard& shard) {
              return "StridedShard(" + std::to_string(shard.dim) + ", " +
                     std::to_string(shard.split_factor) + ")";
            },
            [](const BlockShard& shard) {
              return "BlockShard(" + std::to_string(shard.dim) + ", " +
                     std::to_string(shard.blocks) + ")";
            },
            [](const Partial& partial) { return "Partial(" + name_of_reduction(partial.op) + ")"; },
            [](const FlatShard& flat) {
              return "FlatShard(offset=" + std::to_string(flat.offset) +
                     ", chunk=" + std::to_string(flat.chunk) + ")";
            }},
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
  if (const auto* shard = std::get_if<BlockShard>(&placement)) return shard->dim;
  return -1;
}

int blocks_of(const Placement& placement) {
  const auto* shard = std::get_if<BlockShard>(&placement);
  return shard != nullptr ? shard->blocks : 1;
}

bool is_sharding(const Placement& placement) {
  return !std::holds_alternative<Replicate>(placement) && !is_partial(placement);
}

std::pair<int64_t, int64_t> chunk_of(int64_t length, int parts, int i) {
  const int64_t size = (length + parts - 1) / parts;
  return {std::min(i * size, length), std::min((i + 1) * size, length)};
}

Ranges ranges_of(const Placement& cut, int64_t length, int parts, int i) {
  const int blocks = blocks_of(cut);
  const int64_t block = length / blocks;
  const auto [begin, end] = chunk_of(block, parts, i);
  Ranges ranges;
  for (int b = 0; b < blocks; ++b) ranges.emplace_back(b * block + begin, b * block + end);
  return merged(ranges);
}

int64_t length_of(const Ranges& ranges) {
  int64_t length = 0;
  for (const auto& [begin, end] : ranges) length += end - begin;
  return length;
}

std::pair<int64_t, int64_t> run_of(const FlatShard& flat, int64_t numel, int i) {
  const int64_t begin = i * flat.chunk - flat.offset;
  return {std::clamp(begin, int64_t{0}, numel), std::clamp(begin + flat.chunk, int64_t{0}, numel)};
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
    if (auto* shard = std::get_if<BlockShard>(&placement)) wrap(shard->dim);
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
  check_blocks(result, where);
  check_flat(result, where);
  return result;
}

std::optional<size_t> DTensorSpec::flat_axis() const {
  for (size_t i = 0; i < placements.size(); ++i) {
    if (std::holds_alternative<FlatShard>(placements[i])) return i;
  }
  return std::nullopt;
}

std::vector<size_t> DTensorSpec::cuts(int dim) const {
  std::vector<size_t> plain, strided;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (shard_dim(placements[i]) != dim) continue;
    (std::holds_alternative<StridedShard>(placements[i]) ? strided : plain).push_back(i);
  }
  plain.insert(plain.end(), strided.rbegin(), strided.rend());
  return plain;
}

Box DTensorSpec::local_box() const {
  TS_CHECK_AS(UnsupportedError, !flat_axis(), "local_box", "of ", distributed::describe(placements),
              " a rank holds a run of elements, which is no one box; take local_boxes()");
  Box box = Box::whole(shape);
  for (int dim = 0; dim < shape.size(); ++dim) {
    const Ranges held = own_ranges(dim);
    TS_CHECK_AS(UnsupportedError, held.size() == 1, "local_box", "of ",
                distributed::describe(placements), " a rank holds ", held.size(),
                " pieces of dimension ", dim, ", which are no one box; take local_boxes()");
    box.offset[dim] = held[0].first;
    box.extent[dim] = held[0].second - held[0].first;
  }
  return box;
}

std::vector<Box> DTensorSpec::local_boxes() const {
  std::vector<Box> boxes;
  for (const PartBox& held : own_boxes()) boxes.push_back({held.offset, held.extent});
  return boxes;
}

Ranges DTensorSpec::own_ranges(int dim) const {
  return ranges_at(*this, cuts(dim), dim, own_coordinates(*mesh));
}

std::vector<PartBox> DTensorSpec::own_boxes() const { return boxes_at(own_coordinates(*mesh)); }

std::vector<PartBox> DTensorSpec::boxes_at(std::span<const int> coordinates) const {
  std::vector<Ranges> held;
  Shape part = shape;  // of what the cuts of dimensions leave
  for (int dim = 0; dim < shape.size(); ++dim) {
    held.push_back(ranges_at(*this, cuts(dim), dim, coordinates));
    part[dim] = length_of(held.back());
  }
  if (numel_of(part) == 0) return {};
  std::vector<PartBox> boxes;  // by their places in that
  if (const auto axis = flat_axis()) {
    const auto [begin, end] =
        run_of(std::get<FlatShard>(placements[*axis]), numel_of(part), coordinates[*axis]);
    int64_t first = 0;
    for (const Box& box : boxes_of_run(part, begin, end)) {
      boxes.push_back({box.offset, box.extent, first, contiguous_strides(box.extent)});
      first += box.numel();
    }
  } else {
    boxes.push_back({Shape::filled(part.size(), 0), part, 0, contiguous_strides(part)});
  }
  for (int dim = 0; dim < shape.size(); ++dim) {  // by their places in the whole
    std::vector<PartBox> next;
    for (const PartBox& box : boxes) {
      int64_t before = 0;
      for (const auto& [begin, end] : held[static_cast<size_t>(dim)]) {
        const int64_t from = std::max(box.offset[dim], before),
                      to = std::min(box.offset[dim] + box.extent[dim], before + end - begin);
        if (from < to) {
          PartBox& one = next.emplace_back(box);
          one.offset[dim] = begin + from - before;
          one.extent[dim] = to - from;
          one.first += (from - box.offset[dim]) * one.strides[dim];
        }
        before += end - begin;
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

std::vector<int64_t> DTensorSpec::part_numels() const {
  const Cuts all = cuts_of(*this);
  const auto flat = flat_axis();
  const std::vector<MeshAxis>& axes = mesh->axes();
  std::vector<int64_t> numels(static_cast<size_t>(mesh->size()));
  std::vector<int> at(axes.size());
  for (int64_t& numel : numels) {
    if (flat) {
      const auto [begin, end] =
          run_of(std::get<FlatShard>(placements[*flat]), numel_of(shape_of_run()), at[*flat]);
      numel = end - begin;
    } else {
      numel = 1;
      for (int dim = 0; dim < shape.size(); ++dim) {
        numel *= length_of(ranges_at(*this, all[static_cast<size_t>(dim)], dim, at));
      }
    }
    for (size_t i = at.size(); i-- > 0 && ++at[i] == axes[i].size;) at[i] = 0;  // the next rank
  }
  return numels;
}

std::pair<int64_t, int64_t> DTensorSpec::local_run() const {
  const auto axis = flat_axis();
  TS_CHECK(axis.has_value(), "local_run", "expects a FlatShard; got ",
           distributed::describe(placements), "; take local_box()");
  return run_of(std::get<FlatShard>(placements[*axis]), numel_of(shape_of_run()),
                mesh->coordinate(mesh->axes()[*axis].name));
}

Shape DTensorSpec::shape_of_run() const {
  Shape left = shape;
  for (int dim = 0; dim < shape.size(); ++dim) left[dim] = length_of(own_ranges(dim));
  return left;
}

Shape DTensorSpec::local_shape() const {
  if (flat_axis()) {
    const auto [begin, end] = local_run();
    return {end - begin};
  }
  return shape_of_run();
}

std::string DTensorSpec::describe_part() const {
  PlainText<std::ostringstream> out;
  if (flat_axis()) {
    const auto [begin, end] = local_run();
    out << "the elements [" << begin << ':' << end << ']';
    if (const Shape left = shape_of_run(); left != shape) out << " of its part " << left;
  } else if (const std::vector<Box> boxes = local_boxes(); boxes.size() > 1) {
    for (size_t i = 0; i < boxes.size(); ++i) out << (i > 0 ? " and " : "") << boxes[i];
  } else {
    out << local_box();
  }
  return out.str();
}

std::string DTensorSpec::describe(DType dtype) const {
  PlainText<std::ostringstream> out;
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
