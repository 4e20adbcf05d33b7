// The adapter in one layer, and which layers of a model get one. Internal to nn.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/module.h>

namespace tessera::nn::detail {

// A layer that gets an adapter.
struct LoraTarget {
  std::string name;  // from the model that add_lora was called for
  ModuleBase* module;
  int64_t rank;
  double alpha;
};

// A tensor of an adapter file. It is transposed where the module's is not.
struct LoraEntry {
  std::string key;   // PEFT's
  std::string name;  // the model's state
  Shape shape;       // the file's
  bool transposed = false;
};

// Owned by the layer that it extends.
class LoraAdapter : public ModuleExtension {
 public:
  // Adds children and hook to target.module.
  static void install(const LoraTarget& target, std::shared_ptr<const LoraOptions> options);
  // The active adapter, or the one of a name; nullptr for a layer without.
  static LoraAdapter* of(const ModuleBase& module);
  static LoraAdapter* of(const ModuleBase& module, const std::string& adapter);
  // All adapters of a layer, in the order in which they were added.
  static std::vector<LoraAdapter*> all_of(const ModuleBase& module);
  ~LoraAdapter() override;
  void extend(ModuleBase& copy) const override;

  const LoraOptions& options() const { return *options_; }
  LoraTarget target(const std::string& name) const { return {name, &module_, rank_, alpha_}; }
  bool merged() const { return original_.defined(); }
  void merge();
  // The merged value of the weight, from whole tensors.
  Tensor merged_weight(const Tensor& weight, const Tensor& a, const Tensor& b) const;
  void unmerge();
  void set_enabled(bool enabled) { enabled_ = enabled; }
  void set_active(bool active) { active_ = active; }
  void requires_grad(bool value);
  bool is_part(const ModuleBase& module) const { return &module == a_ || &module == b_; }
  static void remove(LoraAdapter* adapter);  // destroys it

 private:
  LoraAdapter(ModuleBase& module, int64_t rank, double alpha,
              std::shared_ptr<const LoraOptions> options);
  void add_to(TensorRefs inputs, TensorRefs outputs) const;

  ModuleBase& module_;
  int64_t rank_;
  double alpha_;
  double scaling_;
  std::shared_ptr<const LoraOptions> options_;
  const Tensor& weight_;  // the layer's place of it
  ModuleBase* a_ = nullptr;
  ModuleBase* b_ = nullptr;
  bool enabled_ = true;
  bool active_ = true;
  std::unique_ptr<LoraAdapter> next_;  // the layer's next adapter
  Tensor original_;                    // the weight that merging has replaced
  Tensor merged_;                      // by this one
  HookHandle hook_;
};

// Adapters of a model, by name; empty where it has none.
struct NamedLora {
  std::string name;
  ModuleBase* module;
  LoraAdapter* adapter;
};
std::vector<NamedLora> lora_adapters(ModuleBase& model);  // the active one's
std::vector<NamedLora> lora_adapters(ModuleBase& model, const std::string& adapter);

// The names of A's and B's modules in a layer.
std::string lora_part(const LoraOptions& options, const char* part);

// In the scope functions about the active adapter are about this one.
class LoraInHand {
 public:
  LoraInHand(ModuleBase& model, const std::string& adapter);
  ~LoraInHand();
  LoraInHand(const LoraInHand&) = delete;
  LoraInHand& operator=(const LoraInHand&) = delete;

 private:
  ModuleBase& model_;
  std::string before_;
};

// The layers that the options name, all options checked. Not strict: names and patterns without a
// match are ignored if another matches.
std::vector<LoraTarget> lora_targets(ModuleBase& model, const LoraOptions& options, bool strict);

// The part of add_lora after the targets are known.
LoraSummary install_lora(ModuleBase& model, const std::vector<LoraTarget>& targets,
                         const LoraOptions& options);

// The tensors in a file of these adapters, in the order of the model. The adapters need not exist
// yet.
std::vector<LoraEntry> lora_entries(ModuleBase& model, const std::vector<LoraTarget>& targets,
                                    const LoraOptions& options);
// For the active adapter.
std::vector<LoraTarget> installed_targets(ModuleBase& model);

LoraSummary lora_summary(ModuleBase& model);

}  // namespace tessera::nn::detail
