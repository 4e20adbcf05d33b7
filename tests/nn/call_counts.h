// How often each module of a model is called, seen by hooks before and after forward.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <tessera/nn/container.h>
#include <tessera/nn/module.h>

namespace tessera::tests {

class CallCounts {
 public:
  // All modules below `model` and itself, but for lists, which are never called.
  explicit CallCounts(nn::ModuleBase& model) {
    for (const auto& [name, module] : model.named_modules()) {
      if (dynamic_cast<nn::ModuleList*>(module) != nullptr) continue;
      Count& count = counts_[name];
      handles_.push_back(module->register_forward_pre_hook(
          [&count](nn::ModuleBase&, nn::TensorRefs) { ++count.before; }));
      handles_.push_back(module->register_forward_hook(
          [&count](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) { ++count.after; }));
    }
  }
  ~CallCounts() {
    for (HookHandle& handle : handles_) handle.remove();
  }
  CallCounts(const CallCounts&) = delete;
  CallCounts& operator=(const CallCounts&) = delete;

  size_t size() const { return counts_.size(); }
  // The modules that were not called `times` times since the last question; empty where all were.
  std::string not_called(int times) {
    std::string text;
    for (auto& [name, count] : counts_) {
      if (count.before != times || count.after != times) {
        text += "'" + name + "' " + std::to_string(count.before) + " before, " +
                std::to_string(count.after) + " after; ";
      }
      count = {};
    }
    return text;
  }

 private:
  struct Count {
    int before = 0, after = 0;
  };
  std::map<std::string, Count> counts_;
  std::vector<HookHandle> handles_;
};

}  // namespace tessera::tests
