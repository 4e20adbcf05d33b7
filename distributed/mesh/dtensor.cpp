#include <tessera/distributed/mesh/dtensor.h>

#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/mesh/matrix_exchange.h>
#include <tessera/distributed/mesh/redistribute.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

struct GroupHolders final : PartHolders {
  explicit GroupHolders(Group& group_in) : PartHolders(&group_in), group(group_in) {}
  void reduce(const Tensor& value, Reduction reduction) const override {
    const ReduceOp op = reduction == Reduction::kMax ? ReduceOp::kMax : ReduceOp::kSum;
    all_reduce(value, op, group, {.channel = Channel::kControl, .tag = "norm"});
  }
  std::unique_ptr<WholeExchange> exchange(std::span<const Tensor> parts) const override {
    std::vector<DTensorSpec> specs;
    for (const Tensor& part : parts) specs.push_back(spec_of(part));
    return std::make_unique<MatrixExchange>(std::move(specs), group);
  }
  Group& group;
};

struct DTensorPlacement final : TensorPlacement {
  explicit DTensorPlacement(DTensorSpec spec_in) : spec(std::move(spec_in)) {}
  std::string describe(const Tensor& part) const override {
    PlainText<std::ostringstream> text;
    text << "DTensor " << describe_whole(part) << ", local " << part.shape();
    return text.str();
  }
  std::string describe_whole(const Tensor& part) const override {
    return spec.describe(part.dtype());
  }
  PlaceInWhole place() const override {
    if (!spec.flat_axis() || spec.shape_of_run() != spec.shape) {
      return {spec.shape, spec.own_boxes()};
    }
    const auto [begin, end] = spec.local_run();  // a box of the flattened whole
    return {{numel_of(spec.shape)}, {{{begin}, {end - begin}, 0, {1}}}};
  }
  std::string_view remedy() const override {
    return "take full_tensor() for the whole, or to_local() for this rank's part; parameters of a "
           "sharded model are whole in its calls, model(x), and in a scope of full_parameters()";
  }
  std::unique_ptr<ElementGuard> clone() const override {
    return std::make_unique<DTensorPlacement>(spec);
  }
  std::unique_ptr<TensorPlacement> of_gradient() const override {
    return std::make_unique<DTensorPlacement>(spec.of_gradient());
  }
  bool equals(const TensorPlacement& other) const override {
    const auto* same = dynamic_cast<const DTensorPlacement*>(&other);
    return same != nullptr && same->spec == spec;
  }
  std::unique_ptr<const PartHolders> holders(std::string_view where) const override {
    for (const Placement& placement : spec.placements) {
      TS_CHECK_AS(UnsupportedError, !is_partial(placement), where,
                  "works on parts and copies; got one of ", spec.shape, " on ",
                  spec.mesh->describe(), ": ", distributed::describe(spec.placements),
                  ", a summand; redistribute() it");
    }
    Group* const group = holding_group();
    if (group == nullptr || group->size() == 1) return nullptr;
    return std::make_unique<GroupHolders>(*group);
  }
  // Of the axes that cut the tensor; those that replicate hold it again.
  Group* holding_group() const {
    std::vector<std::string_view> axes;
    for (size_t i = 0; i < spec.placements.size(); ++i) {
      if (is_sharding(spec.placements[i])) axes.push_back(spec.mesh->axes()[i].name);
    }
    return axes.empty() ? nullptr : &spec.mesh->group(axes);
  }
  const Shape& whole_shape() const override { return spec.shape; }
  Tensor part_of(const Tensor& whole) const override {
    if (whole.shape() != spec.shape) return {};
    const NoGradGuard no_grad;
    return part_of_whole(whole, spec);
  }
  const DTensorSpec spec;
  std::optional<Placements> stated_gradient = {};  // set_grad_placements()
};

const DTensorPlacement* lies_as(const Tensor& tensor) {
  return dynamic_cast<const DTensorPlacement*>(tensor_placement(tensor));
}

// `part`, an object that nobody else has, as a DTensor.
Tensor as_dtensor(Tensor part, DTensorSpec spec) {
  part.impl()->guard = std::make_unique<DTensorPlacement>(std::move(spec));
  return part;
}

// How the gradient of a plain tensor that lies by `spec` is stated to lie.
DTensorSpec stated_gradient(const DTensorSpec& spec, const ToLocalOptions& options,
                            std::string_view where) {
  if (!options.grad_placements) return spec.of_gradient();
  DTensorSpec stated = spec.with(*options.grad_placements).checked(where);
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const Placement &own = spec.placements[i], &other = stated.placements[i];
    const bool whole = !is_sharding(own) && !is_sharding(other);
    TS_CHECK_AS(ConfigError, whole || own == other, where, "a gradient placed ",
                describe(stated.placements), " has not the shape of a part placed ",
                describe(spec.placements),
                "; where the part is a shard its gradient is the same shard");
  }
  return stated;
}

// A plain tensor, which remembers whose elements it shares where its gradient simply goes there: a
// write to it is then refused, or seen, as one to any view.
Tensor plain(const Tensor& dtensor, const DTensorSpec& to, const ToLocalOptions& options,
             std::string_view where) {
  const DTensorSpec& from = spec_of(dtensor);
  const DTensorSpec gradient = stated_gradient(to, options, where);
  const Tensor result = redistribute_local(dtensor, from, to, gradient);
  if (result.storage() == dtensor.storage() && gradient == from.of_gradient()) {
    ensure_autograd_slot(result).view =
        std::make_unique<ViewInfo>(ViewInfo{dtensor, result.version(), !grad_enabled()});
  }
  return result;
}

}  // namespace

Tensor distribute_tensor(const Tensor& tensor, Mesh& mesh, const Placements& placements) {
  const std::string_view where = "distribute_tensor";
  TS_CHECK(tensor.defined(), where, "the tensor is undefined; give it a value first");
  check_whole(tensor, where);
  DTensorSpec spec = DTensorSpec{&mesh, placements, tensor.shape()}.checked(where);
  for (const Placement& placement : spec.placements) {
    TS_CHECK_AS(ConfigError, !is_partial(placement), where, "makes shards and copies; got ",
                describe(spec.placements), "; redistribute() makes a Partial");
  }
  TS_CHECK_AS(AutogradError, tensor.is_leaf(), where, "makes a leaf, and ", tensor,
              " has a history; detach() it, or redistribute() a from_local() of Replicate()");
  const NoGradGuard no_grad;
  const bool wants_grad = requires_grad(tensor);
  Tensor part;
  if (tensor.is_meta()) {
    part = raw::empty(spec.local_shape(), tensor.dtype(), tensor.device());
  } else {
    part = scatter_from_first(raw::alias(tensor), spec);
  }
  Tensor result = as_dtensor(std::move(part), std::move(spec));
  pass_initial_values(tensor, result);
  if (wants_grad) result.set_requires_grad();
  return result;
}

Tensor from_local(const Tensor& local, Mesh& mesh, const Placements& placements,
                  const FromLocalOptions& options) {
  const std::string_view where = "from_local";
  TS_CHECK(local.defined(), where, "the tensor is undefined; give it a value first");
  check_whole(local, where);
  for (const Placement& placement : placements) {
    TS_CHECK_AS(ConfigError, options.shape || !std::holds_alternative<FlatShard>(placement), where,
                "the shape of the whole does not follow from a part placed ", describe(placements),
                "; give FromLocalOptions::shape");
  }
  DTensorSpec spec =
      DTensorSpec{&mesh, placements, options.shape.value_or(local.shape())}.checked(where);
  if (!options.shape) {
    for (size_t i = 0; i < placements.size(); ++i) {
      const int dim = shard_dim(spec.placements[i]);
      if (dim >= 0) spec.shape[dim] *= mesh.axes()[i].size;
    }
  }
  if (options.run_check) {
    check_parts(local, spec, options.shape.has_value());
  } else {
    TS_CHECK_SHAPE(local.shape() == spec.local_shape(), where, "of ", spec.describe(local.dtype()),
                   " this rank holds ", spec.describe_part(), ", a part ", spec.local_shape(),
                   "; got ", local, "; ", rule_of_parts(spec));
  }
  Tensor part = redistribute_local(local, spec, spec, spec.of_gradient());
  return as_dtensor(std::move(part), std::move(spec));
}

namespace {

// Ranks that use a copy with data of their own have a summand of its gradient each, ranks that use
// it alike the same one; which of both follows from nothing here.
void check_gradient_of_copies(const Tensor& dtensor, const DTensorSpec& spec) {
  if (!grad_enabled() || !requires_grad(dtensor)) return;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    const MeshAxis& axis = spec.mesh->axes()[i];
    TS_CHECK_AS(
        AutogradError, axis.size == 1 || !std::holds_alternative<Replicate>(spec.placements[i]),
        "to_local", dtensor, " requires grad and is a copy on each rank of '", axis.name,
        "'; say in grad_placements how its gradient lies there: Partial() where each rank "
        "uses it with data of its own, Replicate() where all use it alike, or take it under "
        "a NoGradGuard");
  }
}

}  // namespace

Tensor to_local(const Tensor& dtensor, const ToLocalOptions& options) {
  if (!options.grad_placements) {
    if (const Placements* stated = grad_placements_of(dtensor)) {
      return plain(dtensor, spec_of(dtensor), {.grad_placements = *stated}, "to_local");
    }
    check_gradient_of_copies(dtensor, spec_of(dtensor));
  }
  return plain(dtensor, spec_of(dtensor), options, "to_local");
}

void set_grad_placements(const Tensor& dtensor, const Placements& placements) {
  const DTensorSpec& spec = spec_of(dtensor);
  Placements stated =
      stated_gradient(spec, {.grad_placements = placements}, "set_grad_placements").placements;
  static_cast<DTensorPlacement&>(*dtensor.impl()->guard).stated_gradient = std::move(stated);
}

const Placements* grad_placements_of(const Tensor& dtensor) {
  const DTensorPlacement* own = lies_as(dtensor);
  return own != nullptr && own->stated_gradient ? &*own->stated_gradient : nullptr;
}

Tensor full_tensor(const Tensor& dtensor, const ToLocalOptions& options) {
  return plain(dtensor, spec_of(dtensor).replicated(), options, "full_tensor");
}

Tensor redistribute(const Tensor& dtensor, const Placements& placements) {
  const DTensorSpec& from = spec_of(dtensor);
  DTensorSpec to = from.with(placements).checked("redistribute");
  Tensor part = redistribute_local(dtensor, from, to, to.of_gradient());
  return as_dtensor(std::move(part), std::move(to));
}

bool is_dtensor(const Tensor& tensor) { return lies_as(tensor) != nullptr; }

const DTensorSpec& spec_of(const Tensor& dtensor) {
  const DTensorPlacement* own = lies_as(dtensor);
  TS_CHECK(own != nullptr, "DTensor", "expects a DTensor; got ", dtensor,
           "; make one with distribute_tensor() or from_local()");
  return own->spec;
}
const Placements& placements_of(const Tensor& dtensor) { return spec_of(dtensor).placements; }
Mesh& mesh_of(const Tensor& dtensor) { return *spec_of(dtensor).mesh; }
const Shape& global_shape(const Tensor& dtensor) { return spec_of(dtensor).shape; }
Box local_box(const Tensor& dtensor) { return spec_of(dtensor).local_box(); }
std::vector<Box> local_boxes(const Tensor& dtensor) { return spec_of(dtensor).local_boxes(); }
std::string describe(const Tensor& tensor) { return tensor.describe(); }

}  // namespace tessera::distributed
