// The parameters of a model on which its ranks have agreed. Internal.
//
// One that comes to the model later is in no unit and in no bucket: each rank would train it by
// itself, in silence. One that leaves it may be gone, and units write to where it stood.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <tessera/nn/module.h>

namespace tessera::distributed {

using ParameterPlaces = std::unordered_set<const Tensor*>;

class KnownParameters {
 public:
  // `known`: those of the modules' places that the ranks have agreed on, ignored ones included.
  // `may_leave`: whether one of them may be taken out of the model. Errors are named `where`.
  KnownParameters(std::vector<nn::ModuleBase*> modules, const ParameterPlaces& known,
                  bool may_leave, std::string_view where);

  // Throws ConfigError where gradients are recorded and a parameter that requires grad is not
  // known, or where a known one is no longer there and may not leave. Before a forward; a
  // comparison or two while no module changes.
  void check();

 private:
  void look();
  std::vector<nn::ModuleBase*> modules_;
  std::unordered_map<const Tensor*, std::string> names_;  // of the known places
  bool may_leave_;
  std::string where_;
  uint64_t seen_;                            // changes of modules when it last looked
  std::vector<nn::ParameterPlace> unknown_;  // almost always none
};

}  // namespace tessera::distributed
