#include <tessera/distributed/checkpoint/parts.h>

#include <tessera/autograd/autograd.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {
namespace {

constexpr const char* kCheckpointParts = "checkpoint";

void check_saved_placement(const DTensorSpec& spec, const std::string& name) {
  for (const Placement& placement : spec.placements) {
    TS_CHECK_AS(UnsupportedError, !is_partial(placement), kCheckpointParts,
                "a checkpoint holds values, not summands; ", shown(name), " is placed ",
                describe(spec.placements), "; redistribute() it to copies or shards first");
  }
}

// The ranks that hold what this one does, ascending: those that differ from it only along axes that
// replicate. The mesh numbers its ranks row by row.
std::vector<int> holders_of(const DTensorSpec& spec) {
  std::vector<int> ranks = {0};
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const MeshAxis& axis = spec.mesh->axes()[i];
    const int own = spec.mesh->coordinate(axis.name);
    std::vector<int> next;
    for (const int rank : ranks) {
      for (int c = 0; c < axis.size; ++c) {
        if (is_sharding(spec.placements[i]) && c != own) continue;
        next.push_back(rank * axis.size + c);
      }
    }
    ranks = std::move(next);
  }
  return ranks;
}

// A box's elements in a part that holds it.
Tensor elements_in(const PartBox& box, const Tensor& part) {
  return raw::as_strided(part, box.extent, box.strides, part.offset() + box.first);
}

}  // namespace

std::vector<SaveItem> items_of(const std::string& name, const Tensor& tensor, Group& group) {
  if (!is_dtensor(tensor)) return {SaveItem::whole(name, tensor)};
  const DTensorSpec& spec = spec_of(tensor);
  TS_CHECK_AS(
      ConfigError, spec.mesh->size() == group.size() && spec.mesh->coordinate() == group.rank(),
      kCheckpointParts, shown(name), " lies on ", spec.mesh->describe(), ", and the ", group.size(),
      " ranks that save are not its ranks in its order; place it on the mesh ",
      "of them all, with Replicate() along the other axes");
  check_saved_placement(spec, name);
  const NoGradGuard no_grad;
  const Tensor part = kernels::contiguous(raw::alias(tensor));
  bool cut = false;
  for (const Placement& placement : spec.placements) cut |= is_sharding(placement);
  if (numel_of(spec.shape) == 0) {  // no rank has a box of it, and it has a name and a shape
    return {SaveItem::whole(name, raw::empty(spec.shape, part.dtype()))};
  }
  if (!cut) return {SaveItem::whole(name, part)};
  const std::vector<int> holders = holders_of(spec);
  std::vector<SaveItem> items;
  for (const PartBox& box : spec.own_boxes()) {
    items.push_back(SaveItem::part(name, elements_in(box, part), spec.shape, box.offset));
    items.back().holders = holders;
  }
  return items;
}

Tensor read_as(CheckpointReader& reader, const std::string& name, const DTensorSpec& spec,
               const Device& device) {
  const SavedTensor& saved = reader.tensor(name);
  TS_CHECK_SHAPE(saved.shape == spec.shape, kCheckpointParts, "'", reader.folder(),
                 "': ", shown(name), " is ", saved.dtype, saved.shape, "; to be read as ",
                 spec.describe(saved.dtype), "; read it with the shape that it has");
  check_saved_placement(spec, name);
  const NoGradGuard no_grad;
  const std::vector<PartBox> boxes = spec.own_boxes();
  const auto saved_in = [&](const PartBox& box) {
    return reader.view(name, {box.offset, box.extent});
  };
  Tensor part;
  if (boxes.size() == 1) {
    part = raw::view(saved_in(boxes[0]), spec.local_shape());
  } else {
    part = raw::empty(spec.local_shape(), saved.dtype);
    for (const PartBox& box : boxes) kernels::copy_into(elements_in(box, part), saved_in(box));
  }
  return from_local(part.to(device), *spec.mesh, spec.placements, {.shape = spec.shape});
}

}  // namespace tessera::distributed
