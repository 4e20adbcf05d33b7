#include <tessera/distributed/backward/known_parameters.h>

#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/nn/structure.h>

namespace tessera::distributed {

namespace {

// Of all modules, under their names in the model.
std::vector<nn::ParameterPlace> places_of(const std::vector<nn::ModuleBase*>& modules) {
  std::vector<nn::ParameterPlace> places;
  for (nn::ModuleBase* module : modules) {
    const std::string prefix = module->dotted_name().empty() ? "" : module->dotted_name() + ".";
    for (auto& [name, tensor] : module->parameter_places()) {
      places.push_back({prefix + name, tensor});
    }
  }
  return places;
}

}  // namespace

KnownParameters::KnownParameters(std::vector<nn::ModuleBase*> modules, const ParameterPlaces& known,
                                 bool may_leave, std::string_view where)
    : modules_(std::move(modules)), may_leave_(may_leave), where_(where) {
  for (auto& [name, place] : places_of(modules_)) {
    if (known.contains(place)) names_.emplace(place, std::move(name));
  }
  look();
}

void KnownParameters::look() {
  seen_ = nn::structure_changes();
  unknown_.clear();
  ParameterPlaces there;
  for (auto& [name, place] : places_of(modules_)) {
    there.insert(place);
    if (place->defined() && !names_.contains(place)) unknown_.push_back({std::move(name), place});
  }
  if (may_leave_) return;
  for (const auto& [place, name] : names_) {
    if (there.contains(place)) continue;
    seen_ = 0;  // the next call is refused, too
    TS_THROW(ConfigError, where_, "'", name,
             "' has left the model since it was sharded, and the ranks still gather it; change "
             "the model before it is sharded");
  }
}

void KnownParameters::check() {
  if (seen_ != nn::structure_changes()) look();
  for (const auto& [name, place] : unknown_) {
    TS_CHECK_AS(ConfigError, !place->requires_grad() || !grad_enabled(), where_, "'", name,
                "' came to the model after its ranks agreed on what they reduce, so that each of "
                "them would train it by itself; add it before the model is sharded or prepared, or "
                "freeze it");
  }
}

}  // namespace tessera::distributed
