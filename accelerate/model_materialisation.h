// Preparation of models that are on the meta device on some ranks. Internal: accelerator.h is the
// interface.
//
//     on no rank       every rank makes what it keeps, with the initial values that one process
//                      would have (nn/materialise.h)
//     on rank 0 alone  the setting fsdp_cpu_ram_efficient_loading: its values travel tensor by
//                      tensor, and where parameters are sharded no other rank ever has the whole
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <tessera/accelerate/settings/config.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/module.h>

namespace tessera::accelerate {

class ModelMaterialisation {
 public:
  // Asks all ranks which tensors have memory: collective. ConfigError on every rank if only rank 0
  // has memory and the setting is off, or if rank 0 lacks tensors that others have; ValueError if a
  // value is known on no rank.
  ModelMaterialisation(nn::ModuleBase& model, const Settings& settings, distributed::Group& ranks,
                       const Device& device);

  bool any() const { return state_ != State::kNone; }
  // Called before policies and modes change the model. If parameters will be sharded, no rank has
  // memory for them afterwards, and rank 0 keeps the values aside; otherwise all have memory for
  // the whole. `synchronises`: the mode sends rank 0's parameters to all ranks.
  void begin(bool cuts_parameters, bool synchronises);
  // Called after sharding.
  void make_memory();
  // Copies rank 0's values into the model. `take` is called with each of these parameters, and with
  // those that a policy narrowed on the meta device, and the part of the value that this rank
  // keeps, in its dtype before policies.
  using Take = std::function<void(const Tensor& parameter, const Tensor& value)>;
  void give(const Take& take);

 private:
  enum class State : uint8_t { kNone, kNoRank, kFirstRank };
  nn::ModuleBase& model_;
  distributed::Group& ranks_;
  Device device_;
  State state_ = State::kNone;
  bool cuts_ = false;
  std::vector<std::string> missing_;  // names of tensors without memory on some rank
  // On ranks without memory rank 0's values; if no rank has memory, the recorded fills.
  StateDict values_;
};

}  // namespace tessera::accelerate
