// Which device, or the disk, holds which module of a model that does not fit on one: Accelerate's
// infer_auto_device_map and what it is made of, with its results.
//
//     const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
//     nn::models::Llama model({.layers = 32});
//     const DeviceMap map = infer_auto_device_map(
//         model, {.max_memory = {{cuda(0), "10GB"}, {kCpu, "30GB"}}, .no_split = {"DecoderLayer"}});
//     // model.embed_tokens: cuda:0, model.layers.0: cuda:0, ..., lm_head: disk
//
// Devices are filled in their order, GPUs first, then the processor's memory, then the disk, which
// has no limit. The first GPU and the processor keep room for the largest layer that does not lie
// there, since it passes through. A module that does not fit is divided into its children, unless
// it has none or its class is in `no_split`. Modules whose parameters are tied lie together.
// The whole is arithmetic on shapes: models on kMeta do, no device has to exist.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/accelerate/big_model/model_tree.h>
#include <tessera/core/device.h>

namespace tessera::accelerate {

// Where the weights of a module lie: on a device, or in files.
class WeightPlace {
 public:
  WeightPlace(const Device& device) : device_(device) {}
  static WeightPlace disk() { return WeightPlace(); }
  // "cuda:1", "0" (the GPU of that number, as Accelerate writes it), "cpu", "disk". ConfigError.
  static WeightPlace parse(std::string_view text);

  bool is_disk() const { return !device_; }
  const Device& device() const { return *device_; }  // only where it is not the disk
  std::string describe() const;
  friend bool operator==(const WeightPlace&, const WeightPlace&) = default;

 private:
  WeightPlace() = default;
  std::optional<Device> device_;
};

// Bytes that weights may take: a number, or a text as parse_byte_size() takes it.
struct MemoryLimit {
  MemoryLimit(WeightPlace at, int64_t limit) : place(at), bytes(limit) {}
  MemoryLimit(WeightPlace at, std::string_view limit);
  WeightPlace place;
  int64_t bytes;
};
using MaxMemory = std::vector<MemoryLimit>;
// "cuda:0=10GB,cpu=30GB". ConfigError names the part that is wrong.
MaxMemory parse_max_memory(std::string_view text);
// What is free now: of each GPU, and of the processor's memory within its container's limit.
MaxMemory get_max_memory();
// The same limits in the order in which devices are filled. ConfigError: a place twice, kMeta, a
// negative number.
MaxMemory get_max_memory(MaxMemory limits);

// Dotted names of modules, or of weights that lie in a module that was divided, in the model's
// order. "": the whole model. A name stands for all that lies in it and has no entry of its own.
using DeviceMap = std::vector<std::pair<std::string, WeightPlace>>;
// The place of a weight or a module; nothing where the map does not say.
std::optional<WeightPlace> place_of(const DeviceMap& map, std::string_view name);

struct DeviceMapOptions {
  MaxMemory max_memory = {};               // none: get_max_memory()
  std::vector<std::string> no_split = {};  // classes; Accelerate's no_split_module_classes
  std::optional<DType> dtype = {};         // in which the model will be loaded
  bool clean_result = true;  // modules that lie together become one entry, their parent's
  // Where the module that is next does not fit on a device that holds nothing yet, another one that
  // does is put there.
  bool fallback_allocation = false;
};

// ConfigError if a limit is wrong. What fits nowhere else goes to the disk.
DeviceMap infer_auto_device_map(const ModelTree& model, const DeviceMapOptions& options = {});
DeviceMap infer_auto_device_map(nn::ModuleBase& model, const DeviceMapOptions& options = {});

struct BalancedMemoryOptions {
  MaxMemory max_memory = {};
  std::vector<std::string> no_split = {};
  std::optional<DType> dtype = {};
  bool low_zero = false;  // the first GPU gets as little as possible, for what else runs there
};
// Limits under which infer_auto_device_map() spreads the model evenly over the GPUs.
MaxMemory get_balanced_memory(const ModelTree& model, const BalancedMemoryOptions& options = {});
MaxMemory get_balanced_memory(nn::ModuleBase& model, const BalancedMemoryOptions& options = {});

// ConfigError: weights of the model for which the map has no place, tied parameters in two places,
// names that the model does not have, a name twice.
void check_device_map(nn::ModuleBase& model, const DeviceMap& map);

}  // namespace tessera::accelerate
