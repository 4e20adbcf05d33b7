// The modules of a model by name, class and bytes: what a device map is made from
// (device_map.h). A tree stands for a model of this process, on kMeta too, or for a folder of
// transformers with that library's names and classes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/nn/module.h>

namespace tessera::accelerate {

struct ModelTree {
  struct Weight {
    std::string name;  // in its module: "weight"
    int64_t numel = 0;
    DType dtype = kF32;
    bool is_buffer = false;
    // The dotted name of the first parameter that is the same tensor; empty where it is this one.
    std::string tied_to = {};

    // When the model is loaded in `load_dtype`: floating values that are wider become it.
    int64_t bytes(std::optional<DType> load_dtype = {}) const;
  };
  std::string name = {};        // in its parent; empty for the model
  std::string class_name = {};  // ModuleBase::type_name()
  std::vector<Weight> weights = {};
  std::vector<ModelTree> children = {};

  static ModelTree of(nn::ModuleBase& model);
};

// Bytes of every module and weight by dotted name, with what lies in them; "" is the model. A tied
// parameter counts once, under its first name. Accelerate's function of the same name.
std::map<std::string, int64_t> compute_module_sizes(const ModelTree& model,
                                                    std::optional<DType> dtype = {});
std::map<std::string, int64_t> compute_module_sizes(nn::ModuleBase& model,
                                                    std::optional<DType> dtype = {});

}  // namespace tessera::accelerate
