// What a model really computed in, layer by layer, beside what its policy says.
//
//     precision::PrecisionWatch watch(model, policy);
//     model(batch.inputs, batch.targets).loss.backward();
//     optimizer.step();
//     std::cout << watch.report(optimizer.state_dict()).table();
//
//     layer          type      parameter  products  other ops  gradient  master  state
//     h.0.attn       Linear    f32        bf16      bf16       f32       -       f32
//
// Calls of the model are watched while the PrecisionWatch lives; an op costs a list entry.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <tessera/autograd/op_observer.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>
#include <tessera/precision/fp8_linear.h>
#include <tessera/precision/policy.h>

namespace tessera::precision {

using DTypes = std::set<DType>;

// One module that has parameters of its own or ran ops of its own.
struct LayerPrecision {
  std::string name;  // dotted, "" for the model itself
  std::string type;
  DTypes parameters = {};  // stored
  DTypes products = {};    // what ops with Autocast::kLow read: matrix products, attention
  DTypes others = {};      // what all other ops gave
  DTypes gradients = {};   // where they lie, or will lie
  DTypes masters = {};     // of the optimizer; none where the parameters are their own
  DTypes states = {};      // of the optimizer: exp_avg and the like
};

// An op that ran in another precision than the policy says.
struct Deviation {
  std::string layer, op;
  DType expected, found;
  int64_t calls = 0;
  std::string describe() const;  // "head: linear ran in f32, the policy says bf16 (2 calls)"
};

struct PrecisionReport {
  Policy policy;
  int64_t calls = 0;                   // of the model
  std::vector<LayerPrecision> layers;  // in the order of the tree
  std::vector<Deviation> deviations;
  std::optional<Fp8Report> fp8 = {};  // where the policy has a recipe
  std::string table() const;
};

class PrecisionWatch : private OpObserver {
 public:
  // `model` must outlive the watch or not be called any more. The one that is made last watches.
  PrecisionWatch(nn::ModuleBase& model, const Policy& policy);
  ~PrecisionWatch();
  PrecisionWatch(const PrecisionWatch&) = delete;
  PrecisionWatch& operator=(const PrecisionWatch&) = delete;

  // `optimizer`: state_dict() of what updates the model, empty where nothing does yet.
  PrecisionReport report(const StateDict& optimizer = {}) const;

 private:
  void saw(const Op& op, std::span<const Tensor> inputs, std::span<const Tensor> results) override;

  struct Seen {
    DTypes products, others;
  };
  nn::ModuleBase& model_;
  Policy policy_;
  HookHandle handle_;
  int64_t calls_ = 0;
  std::map<std::string, Seen, std::less<>> layers_;
  struct Found {
    DType expected;
    int64_t calls = 0;
  };
  std::map<std::tuple<std::string, std::string, DType>, Found> deviations_;
};

}  // namespace tessera::precision
