#include <tessera/accelerate/big_model/dispatch.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/materialise.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kDispatch = "dispatch_model";

struct NamedWeight {
  std::string name;
  Tensor tensor;
  bool is_buffer;
};
std::vector<NamedWeight> weights_of(nn::ModuleBase& module) {
  std::vector<NamedWeight> weights;
  for (const nn::ParameterPlace& place : module.parameter_places()) {
    if (place.tensor->defined()) weights.push_back({place.name, *place.tensor, false});
  }
  for (const nn::ParameterPlace& place : module.buffer_places()) {
    if (place.tensor->defined()) weights.push_back({place.name, *place.tensor, true});
  }
  return weights;
}

std::span<const std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.storage()->data()),
          static_cast<size_t>(tensor.storage()->bytes())};
}
bool lies_in_file(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.storage()->is_foreign() &&
         are_file_pages(bytes_of(tensor));
}

// A weight of a block: what lies there between calls, and what a call needs.
struct HeldWeight {
  std::string name;
  Tensor tensor;     // the module's
  Tensor kept;       // its contents between calls
  uint32_t version;  // after which nobody wrote
  DType dtype;       // of calls
  Device device;
  bool in_file;

  bool changes() const {
    return dtype != kept.dtype() || device != kept.device() || !kept.is_contiguous();
  }
  Tensor for_calls() const { return kept.to(device).to(dtype).contiguous(); }
};

// Modules that come and go together.
struct Block {
  std::string name;
  Device device;  // of its calls
  std::vector<HeldWeight> weights = {};
  Block* next = nullptr;  // which ran after it last time
  int calls = 0;

  bool changes() const {
    return std::ranges::any_of(weights, [](const HeldWeight& w) { return w.changes(); });
  }
};

// All blocks of a model; the hooks own it.
class Blocks {
 public:
  std::deque<Block> blocks;

  void link() {
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i].next = &blocks[(i + 1) % blocks.size()];
  }

  std::shared_ptr<void> begin(Block& block) {
    const std::lock_guard lock(mutex_);
    if (last_ != nullptr && last_ != &block) last_->next = &block;
    last_ = &block;
    for (const HeldWeight& weight : block.weights) check_untouched(block, weight);
    const bool changes = block.changes();
    TS_CHECK_AS(UnsupportedError, block.calls == 0 || !changes, kDispatch, "'", block.name,
                "' is called while a call of it runs, and has its weights on ", block.device,
                " for one call at a time; call the model from one thread");
    if (block.next != &block) {
      for (const HeldWeight& weight : block.next->weights) {
        if (weight.in_file) read_pages_ahead(bytes_in_file(weight));
      }
    }
    if (changes) {
      const NoGradGuard no_grad;
      for (HeldWeight& weight : block.weights) {
        if (weight.changes()) set(weight, weight.for_calls());
      }
    }
    ++block.calls;
    return {static_cast<void*>(&block), [this, &block](void*) { end(block); }};
  }

 private:
  static std::span<const std::byte> bytes_in_file(const HeldWeight& weight) {
    const auto* begin = static_cast<const std::byte*>(weight.kept.data());
    return {begin, static_cast<size_t>(weight.kept.numel() * size_of(weight.kept.dtype()))};
  }
  static void set(HeldWeight& weight, const Tensor& contents) {
    weight.tensor.set_data(contents);
    weight.version = weight.tensor.version();
  }
  void end(Block& block) {
    const std::lock_guard lock(mutex_);
    if (--block.calls > 0) return;
    const NoGradGuard no_grad;
    for (HeldWeight& weight : block.weights) {
      if (weight.changes()) set(weight, weight.kept);
      if (weight.in_file) drop_file_pages(bytes_in_file(weight));
    }
  }
  static void check_untouched(const Block& block, const HeldWeight& weight) {
    TS_CHECK_AS(
        UnsupportedError,
        block.calls > 0 || (weight.tensor.version() == weight.version &&
                            weight.tensor.device() == weight.kept.device() &&
                            weight.tensor.dtype() == weight.kept.dtype() &&
                            weight.tensor.data() == weight.kept.data()),
        kDispatch, "'", weight.name,
        "' was written to, moved or converted since the model was dispatched, and what lies "
        "on the disk or waits in memory is read only; remove() the handle first");
  }

  std::mutex mutex_;
  Block* last_ = nullptr;
};

bool is_number(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// Splits what lies in `module` into blocks; weights that a module with children holds itself are
// taken by its own calls.
template <class Take>
void divide(nn::ModuleBase& module, const std::string& name,
            const std::vector<std::string>& classes, const Take& take) {
  const bool together = module.num_children() == 0 || is_number(module.name()) ||
                        std::ranges::find(classes, module.type_name()) != classes.end();
  if (together) {
    take(module, name, weights_of(module));
    return;
  }
  std::vector<NamedWeight> own;
  for (NamedWeight& weight : weights_of(module)) {
    if (weight.name.find('.') == std::string::npos) own.push_back(std::move(weight));
  }
  if (!own.empty()) take(module, name, std::move(own));
  for (const nn::NamedModule& child : module.named_children()) {
    divide(*child.module, name.empty() ? child.name : name + "." + child.name, classes, take);
  }
}

Device main_device_of(const DeviceMap& map, const std::optional<Device>& chosen) {
  if (chosen) return *chosen;
  for (const auto& [name, place] : map) {
    if (!place.is_disk() && place.device().is_cuda()) return place.device();
  }
  return kCpu;
}

Device device_of(const WeightPlace& place, const Device& main_device) {
  return place.is_disk() || place.device().is_cpu() ? main_device : place.device();
}

void move_tensors(nn::TensorRefs tensors, const Device& device) {
  for (Tensor* tensor : tensors) {
    if (tensor->defined() && tensor->device() != device) *tensor = tensor->to(device);
  }
}

// Results come back to the device that the model's inputs came from.
void return_to_caller(nn::ModuleBase& model, std::vector<HookHandle>& handles) {
  const auto caller = std::make_shared<std::optional<Device>>();
  handles.push_back(
      model.register_forward_pre_hook([caller](nn::ModuleBase&, nn::TensorRefs inputs) {
        caller->reset();
        if (!inputs.empty() && inputs[0]->defined()) *caller = inputs[0]->device();
      }));
  handles.push_back(model.register_forward_hook(
      [caller](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
        if (*caller) move_tensors(outputs, **caller);
      }));
}

}  // namespace

nn::LoadReport load_checkpoint_in_model(nn::ModuleBase& model, const StateDict& weights,
                                        const DeviceMap& map,
                                        const LoadCheckpointOptions& options) {
  check_device_map(model, map);
  // Names and shapes, each tensor by any of its names.
  const nn::LoadReport report = model.compare_state_dict(weights);
  TS_CHECK(report.missing.empty() && report.misshapen.empty() &&
               (!options.strict || report.unexpected.empty()),
           "load_checkpoint_in_model", report.describe());
  const NoGradGuard no_grad;
  std::unordered_set<const TensorImpl*> done;
  for (const NamedWeight& weight : weights_of(model)) {
    const Tensor* found = weights.find(weight.name);
    if (found == nullptr || !done.insert(weight.tensor.impl()).second) continue;
    const WeightPlace place = *place_of(map, weight.name);
    if (place.is_disk()) {
      TS_CHECK_AS(ConfigError, found->numel() == 0 || lies_in_file(*found),
                  "load_checkpoint_in_model", "'", weight.name,
                  "' is to stay on the disk, and what is given is no view of a file; give the path "
                  "of safetensors, or dispatch_model() an offload_folder");
      weight.tensor.set_requires_grad(false);
      weight.tensor.set_data(*found);
      continue;
    }
    const DType own = weight.tensor.dtype();
    const DType dtype = options.dtype && is_floating(own) ? *options.dtype : own;
    Tensor loaded = found->to(place.device()).to(dtype).contiguous();
    if (loaded.storage()->is_foreign()) loaded = loaded.clone();
    weight.tensor.set_data(loaded);
  }
  nn::materialise(model);  // buffers that no checkpoint has
  return report;
}

nn::LoadReport load_checkpoint_in_model(nn::ModuleBase& model, const std::string& checkpoint,
                                        const DeviceMap& map,
                                        const LoadCheckpointOptions& options) {
  return load_checkpoint_in_model(model, load_weights(checkpoint), map, options);
}

namespace {

// `call_dtypes`: of weights in calls; as they lie there if it has none.
HookHandle dispatch(nn::ModuleBase& model, const DeviceMap& map, const DispatchOptions& options,
                    const std::map<const TensorImpl*, DType>& call_dtypes) {
  check_device_map(model, map);
  const Device main_device = main_device_of(map, options.main_device);

  // What the disk is to hold and a file does not yet.
  StateDict to_write;
  std::map<std::string, Tensor> written;
  std::unordered_set<const TensorImpl*> seen;
  for (const NamedWeight& weight : weights_of(model)) {
    TS_CHECK_AS(ConfigError, !weight.tensor.is_meta(), kDispatch, "'", weight.name,
                "' has no values yet; load_checkpoint_in_model() gives them");
    const WeightPlace place = *place_of(map, weight.name);
    if (!seen.insert(weight.tensor.impl()).second || !place.is_disk() ||
        weight.tensor.numel() == 0 || lies_in_file(weight.tensor)) {
      continue;
    }
    TS_CHECK_AS(ConfigError, !options.offload_folder.empty(), kDispatch, "'", weight.name,
                "' is to lie on the disk and no offload_folder says where");
    to_write.set(weight.name, weight.tensor.detach().to(kCpu));
    written.emplace(weight.name, weight.tensor);
  }
  const NoGradGuard no_grad;
  if (!to_write.empty()) {
    save_weights(to_write, options.offload_folder);
    const StateDict files = load_weights(options.offload_folder);
    for (const auto& [name, tensor] : written) {
      tensor.set_requires_grad(false);
      tensor.set_data(files.at(name));
    }
  }

  const auto dtype_in_calls = [&](const Tensor& tensor) {
    const auto found = call_dtypes.find(tensor.impl());
    if (found != call_dtypes.end()) return found->second;
    return options.dtype && is_floating(tensor.dtype()) ? *options.dtype : tensor.dtype();
  };
  const auto blocks = std::make_shared<Blocks>();
  std::vector<HookHandle> handles;
  bool several = false;
  for (const auto& [name, place] : map) several |= device_of(place, main_device) != main_device;
  std::unordered_set<const TensorImpl*> moved;
  const auto take = [&](nn::ModuleBase& module, const std::string& name,
                        std::vector<NamedWeight> weights) {
    const std::optional<WeightPlace> own = place_of(map, name);
    const Device device = own ? device_of(*own, main_device) : main_device;
    Block block{.name = name.empty() ? model.type_name() : name, .device = device};
    for (NamedWeight& weight : weights) {
      const std::string dotted = name.empty() ? weight.name : name + "." + weight.name;
      const WeightPlace place = *place_of(map, dotted);
      if (!place.is_disk() && moved.insert(weight.tensor.impl()).second &&
          weight.tensor.device() != place.device()) {
        weight.tensor.set_data(weight.tensor.detach().to(place.device()));
      }
      const bool waits = place.is_disk() || place.device() != device;
      if (!waits) continue;
      // Buffers are small and read by the host: they keep their values where calls run.
      block.weights.push_back({.name = dotted,
                               .tensor = weight.tensor,
                               .kept = weight.tensor.detach(),
                               .version = weight.tensor.version(),
                               .dtype = dtype_in_calls(weight.tensor),
                               .device = device,
                               .in_file = place.is_disk() && lies_in_file(weight.tensor)});
    }
    if (several || device != kCpu) {
      handles.push_back(module.register_forward_pre_hook(
          [device](nn::ModuleBase&, nn::TensorRefs inputs) { move_tensors(inputs, device); }));
    }
    if (block.weights.empty()) return;
    blocks->blocks.push_back(std::move(block));
    handles.push_back(module.register_call_scope(
        [blocks, at = &blocks->blocks.back()](nn::ModuleBase&) { return blocks->begin(*at); }));
  };
  if (several) return_to_caller(model, handles);
  divide(model, "", options.blocks, take);
  blocks->link();
  return HookHandle([handles]() mutable {
    for (HookHandle& handle : handles) handle.remove();
  });
}

DeviceMap map_for(nn::ModuleBase& model, const LoadAndDispatchOptions& options) {
  if (!options.device_map.empty()) return options.device_map;
  MaxMemory limits = options.max_memory;
  if (options.strategy != DeviceMapStrategy::kSequential) {
    limits = get_balanced_memory(
        model, {.max_memory = limits,
                .no_split = options.no_split,
                .dtype = options.dtype,
                .low_zero = options.strategy == DeviceMapStrategy::kBalancedLowZero});
  }
  return infer_auto_device_map(
      model, {.max_memory = limits, .no_split = options.no_split, .dtype = options.dtype});
}

}  // namespace

HookHandle dispatch_model(nn::ModuleBase& model, const DeviceMap& map,
                          const DispatchOptions& options) {
  return dispatch(model, map, options, {});
}

Dispatched load_checkpoint_and_dispatch(nn::ModuleBase& model, const StateDict& weights,
                                        const LoadAndDispatchOptions& options) {
  Dispatched result{.device_map = map_for(model, options), .report = {}, .hooks = {}};
  std::map<const TensorImpl*, DType> dtypes;
  for (const NamedWeight& weight : weights_of(model)) {
    const DType own = weight.tensor.dtype();
    dtypes[weight.tensor.impl()] = options.dtype && is_floating(own) ? *options.dtype : own;
  }
  result.report = load_checkpoint_in_model(model, weights, result.device_map,
                                           {.dtype = options.dtype, .strict = options.strict});
  result.hooks = dispatch(model, result.device_map,
                          {.main_device = options.main_device, .blocks = options.no_split}, dtypes);
  return result;
}

Dispatched load_checkpoint_and_dispatch(nn::ModuleBase& model, const std::string& checkpoint,
                                        const LoadAndDispatchOptions& options) {
  return load_checkpoint_and_dispatch(model, load_weights(checkpoint), options);
}

HookHandle cpu_offload(nn::ModuleBase& model, const Device& device) {
  return dispatch_model(model, {{"", kCpu}}, {.main_device = device});
}

HookHandle disk_offload(nn::ModuleBase& model, const std::string& folder, const Device& device) {
  return dispatch_model(model, {{"", WeightPlace::disk()}},
                        {.main_device = device, .offload_folder = folder});
}

void CpuOffloadHook::offload() const {
  const TensorList parameters = model_->parameters();
  if (!parameters.empty() && !parameters[0].device().is_cpu()) model_->to(kCpu);
}

void CpuOffloadHook::remove() { handle_.remove(); }

CpuOffloadHook cpu_offload_with_hook(nn::ModuleBase& model, const Device& device,
                                     const CpuOffloadHook* previous) {
  CpuOffloadHook hook;
  hook.model_ = &model;
  model.to(kCpu);
  const auto sends_back = previous != nullptr ? std::optional(*previous) : std::nullopt;
  hook.handle_ = model.register_forward_pre_hook(
      [device, sends_back](nn::ModuleBase& called, nn::TensorRefs inputs) {
        const TensorList parameters = called.parameters();
        if (!parameters.empty() && parameters[0].device() != device) {
          if (sends_back) sends_back->offload();
          called.to(device);
        }
        move_tensors(inputs, device);
      });
  return hook;
}

}  // namespace tessera::accelerate
