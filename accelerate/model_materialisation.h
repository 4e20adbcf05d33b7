// Models that are prepared before all ranks have elements for them. Internal: accelerator.h is the
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
  // Asks all ranks what they have: collective. ConfigError on every rank where rank 0 alone has
  // elements and the setting is off, where rank 0 lacks what others have; ValueError where values
  // of no rank are not known.
  ModelMaterialisation(nn::ModuleBase& model, const Settings& settings, distributed::Group& ranks,
                       const Device& device);

  bool any() const { return state_ != State::kNone; }
  // Before policies and modes change the model. Where parameters will be cut all ranks are without
  // elements of them afterwards, and rank 0 keeps the values aside; else all have memory for the
  // whole. `synchronises`: the mode makes rank 0's parameters everybody's.
  void begin(bool cuts_parameters, bool synchronises);
  // Once they are cut.
  void make_memory();
  // Rank 0's values into the model. `take` is called with each of these parameters, and with those
  // that a policy has narrowed before they had elements, and what of its value this rank keeps, in
  // the dtype that it had before policies.
  using Take = std::function<void(const Tensor& parameter, const Tensor& value)>;
  void give(const Take& take);

 private:
  enum class State : uint8_t { kNone, kNoRank, kFirstRank };
  nn::ModuleBase& model_;
  distributed::Group& ranks_;
  Device device_;
  State state_ = State::kNone;
  bool cuts_ = false;
  std::vector<std::string> missing_;  // names that some rank has no elements of
  // Rank 0's, on the others without elements; of no rank's, how they would have been filled.
  StateDict values_;
};

}  // namespace tessera::accelerate
