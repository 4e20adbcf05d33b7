// The parameters of a model on which its ranks have agreed. Internal.
//
// A parameter added later would be in no unit and no bucket, so each rank would train it alone
// without notice. One that is removed may be destroyed while units still write to its place.
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

  // Throws ConfigError if gradients are recorded and a parameter that requires grad is not known,
  // or if a known one is missing and may not leave. Called before a forward; costs a comparison or
  // two while no module changes.
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
