// A model that is made to be loaded next, whole or in parts. Internal to from_pretrained().
#pragma once

#include <functional>
#include <memory>

#include <tessera/nn/materialise.h>
#include <tessera/nn/module.h>

namespace tessera::nn::models {

// `divide`: called with the model while it has no memory, which it gets afterwards, for the parts
// that this rank keeps. `initialise`: whether what the file lacks keeps its initial values.
template <class Model, class Config>
std::unique_ptr<Model> made_to_load(const Config& config,
                                    const std::function<void(ModuleBase& model)>& divide,
                                    bool initialise = false) {
  ParameterDefaults defaults = ParameterDefaultsGuard::current();
  const Device device = defaults.device;
  defaults.initialise = initialise;
  if (divide) defaults.device = kMeta;
  std::unique_ptr<Model> model;
  {
    const ParameterDefaultsGuard guard(defaults);
    model = std::make_unique<Model>(config);
  }
  if (!divide) return model;
  divide(*model);
  if (!device.is_meta()) materialise(*model, device, {.initialise = initialise});
  return model;
}

}  // namespace tessera::nn::models
