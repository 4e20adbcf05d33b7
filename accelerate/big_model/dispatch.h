// Runs a model whose weights lie on several devices, in the processor's memory and on the disk, as a
// device map says (device_map.h): Accelerate's big-model inference by its names.
//
//     const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
//     nn::models::Llama model(nn::models::LlamaConfig::read("folder/config.json"));
//     load_checkpoint_and_dispatch(model, "folder", {.max_memory = {{kCpu, "2GB"}}});
//     Tensor logits = model(ids).logits;
//
// Weights on the disk are views of the mapped files: loading reads nothing. While a block of the
// model runs, the kernel reads the pages of the one that ran after it last time; when it has
// run, its pages leave this process's memory. A block is a member of a list of modules, a module of
// a class in `blocks`, or a module without children. Where a call needs other forms than those that
// lie there (another dtype or device, a transposed table), the block has them for its call alone.
//
// The model is for inference: weights on the disk do not require gradients, and one that was written
// to, moved or converted since is an UnsupportedError of the next call of its block. state_dict()
// reads the weights where they lie. Hooks of users run as without a map. A module that is called from
// several threads at once must need no other form: an UnsupportedError else.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/big_model/device_map.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>

namespace tessera::accelerate {

struct LoadCheckpointOptions {
  // Of floating weights in memory; none: the model's own. On the disk they keep the file's.
  std::optional<DType> dtype = {};
  bool strict = false;  // weights in the checkpoint that the model does not have are an error
};

// Gives every weight of the model its values, on the device that the map says; weights may be views
// of files, and those on the disk have to be. Tensors keep their identity, so ties stay. Returns the
// names that the model does not have. ConfigError: the map (check_device_map()); ValueError: weights
// that the checkpoint lacks and shapes that differ, all of them, before anything is loaded.
nn::LoadReport load_checkpoint_in_model(nn::ModuleBase& model, const StateDict& weights,
                                        const DeviceMap& map,
                                        const LoadCheckpointOptions& options = {});
// `checkpoint`: a safetensors file, its index or a folder (load_weights()).
nn::LoadReport load_checkpoint_in_model(nn::ModuleBase& model, const std::string& checkpoint,
                                        const DeviceMap& map,
                                        const LoadCheckpointOptions& options = {});

struct DispatchOptions {
  // Where modules run whose weights lie in the processor's memory or on the disk. None: the first
  // GPU of the map, else the processor.
  std::optional<Device> main_device = {};
  // For a model in memory: where its weights of the disk are written. ConfigError without one.
  std::string offload_folder = {};
  std::vector<std::string> blocks = {};  // classes, beside members of lists
  // Of floating weights in calls; none: as they lie there.
  std::optional<DType> dtype = {};
};
// Moves what lies elsewhere to its place in the map and makes calls run. The handle's remove() ends
// that; weights stay where they lie.
HookHandle dispatch_model(nn::ModuleBase& model, const DeviceMap& map,
                          const DispatchOptions& options = {});

enum class DeviceMapStrategy : uint8_t { kAuto, kBalancedLowZero, kSequential };
struct LoadAndDispatchOptions {
  DeviceMap device_map = {};  // none: made by `strategy`
  DeviceMapStrategy strategy = DeviceMapStrategy::kAuto;
  MaxMemory max_memory = {};
  std::vector<std::string> no_split = {};
  std::optional<DType> dtype = {};  // of floating weights in calls; none: the model's own
  std::optional<Device> main_device = {};
  bool strict = false;
};
struct Dispatched {
  DeviceMap device_map;
  nn::LoadReport report;
  HookHandle hooks;
};
Dispatched load_checkpoint_and_dispatch(nn::ModuleBase& model, const std::string& checkpoint,
                                        const LoadAndDispatchOptions& options = {});
Dispatched load_checkpoint_and_dispatch(nn::ModuleBase& model, const StateDict& weights,
                                        const LoadAndDispatchOptions& options = {});

// All weights in the processor's memory, or on the disk under `folder`, and calls on `device`.
HookHandle cpu_offload(nn::ModuleBase& model, const Device& device);
HookHandle disk_offload(nn::ModuleBase& model, const std::string& folder,
                        const Device& device = kCpu);

// A model that is on the device from its call on until offload(): for a pipeline of models of which
// one at a time fits there.
//
//     CpuOffloadHook first = cpu_offload_with_hook(encoder, cuda(0));
//     CpuOffloadHook second = cpu_offload_with_hook(decoder, cuda(0), &first);
//     Tensor h = encoder(x);
//     for (int i = 0; i < 50; ++i) h = decoder(h);  // the first call sends the encoder back
//     second.offload();
class CpuOffloadHook {
 public:
  void offload() const;  // all of the model into the processor's memory
  void remove();         // ends it; the model stays where it is

 private:
  friend CpuOffloadHook cpu_offload_with_hook(nn::ModuleBase&, const Device&,
                                              const CpuOffloadHook*);
  nn::ModuleBase* model_ = nullptr;
  HookHandle handle_;
};
// `previous`: its model goes before this one comes. The models outlive the hooks.
CpuOffloadHook cpu_offload_with_hook(nn::ModuleBase& model, const Device& device,
                                     const CpuOffloadHook* previous = nullptr);

}  // namespace tessera::accelerate
