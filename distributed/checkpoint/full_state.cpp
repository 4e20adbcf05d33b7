#include <tessera/distributed/checkpoint/full_state.h>

#include <exception>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/manifest.h>
#include <tessera/distributed/checkpoint/parts.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

constexpr const char* kFullState = "full_state_dict";

// All that a rank could say against gathering a tensor, said before anyone waits for it.
void check_gatherable(const std::string& name, const Tensor& tensor, const Group& group) {
  const Mesh& mesh = mesh_of(tensor);
  TS_CHECK_DEVICE(!tensor.is_meta(), kFullState, shown(name), " is ", tensor,
                  " and has no elements; load it first");
  for (const Placement& placement : placements_of(tensor)) {
    TS_CHECK_AS(UnsupportedError, !is_partial(placement), kFullState, shown(name), " is ", tensor,
                ", a summand; redistribute() it to copies or shards first");
  }
  TS_CHECK_AS(ConfigError, mesh.size() == group.size() && mesh.coordinate() == group.rank(),
              kFullState, shown(name), " lies on ", mesh.describe(), ", whose ranks are not the ",
              group.size(), " of the group in their order; place it on the mesh of them all, with ",
              "Replicate() along the other axes");
}

Tensor whole_on_first(const Tensor& tensor) {
  const NoGradGuard no_grad;
  if (!is_dtensor(tensor)) return tensor.detach().to(kCpu);
  const Tensor whole = gather_to_first(tensor);
  return whole.defined() ? whole.to(kCpu) : whole;
}

}  // namespace

void with_whole_tensors(const StateDict& state, Group& group, const std::string& what,
                        const std::function<void(const WholeTensor& whole)>& body) {
  const CollectiveOptions control{.channel = Channel::kControl, .tag = "full_state"};
  std::exception_ptr error;
  bool parts = false;
  try {
    for (const auto& [name, tensor] : state) {
      if (!is_dtensor(tensor)) continue;
      parts = true;
      check_gatherable(name, tensor, group);
    }
  } catch (...) {  // the meshes are alike on all ranks, and so is this
    error = std::current_exception();
  }
  if (parts) throw_together(error, what, group);
  const bool leads = group.rank() == 0, served = parts && group.size() > 1;
  // Rank 0 says whose turn it is, so that one that fails there ends it everywhere.
  if (leads) {
    try {
      body([&](const std::string& name) {
        const Tensor& tensor = state.at(name);
        if (served && is_dtensor(tensor)) broadcast_object(nlohmann::json(name), 0, group, control);
        return whole_on_first(tensor);
      });
    } catch (const DistributedError&) {  // the others learn of it by themselves
      throw;
    } catch (...) {
      error = std::current_exception();
    }
    if (served) broadcast_object(nlohmann::json(), 0, group, control);
  } else if (served) {
    for (;;) {
      const nlohmann::json name = broadcast_object({}, 0, group, control);
      if (name.is_null()) break;
      whole_on_first(state.at(name.get<std::string>()));
    }
  }
  throw_together(error, what, group);
}

StateDict full_state_dict(const StateDict& state, Group& group) {
  StateDict result;
  with_whole_tensors(state, group, kFullState, [&](const WholeTensor& whole) {
    TiedNames tied;
    for (const auto& [name, tensor] : state) {
      const std::string* first = tied.first_name(name, tensor);
      result.set(name, first != nullptr ? Tensor(result.at(*first)) : whole(name));
    }
  });
  return result;
}

}  // namespace tessera::distributed
