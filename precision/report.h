// The precision in which a model actually computed, layer by layer, compared with its policy.
//
//     precision::PrecisionWatch watch(model, policy);
//     model(batch.inputs, batch.targets).loss.backward();
//     optimizer.step();
//     std::cout << watch.report(optimizer.state_dict()).table();
//
//     layer          type      parameter  products  other ops  gradient  master  state
//     h.0.attn       Linear    f32        bf16      bf16       f32       -       f32
//
// Calls of the model are recorded during the lifetime of the PrecisionWatch; an op costs a list
// entry.
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

// One module with its own parameters or ops.
struct LayerPrecision {
  std::string name;  // dotted, "" for the model itself
  std::string type;
  DTypes parameters = {};  // stored
  DTypes products = {};    // dtypes read by ops with Autocast::kLow: products, attention
  DTypes others = {};      // dtypes of all other ops' results
  DTypes gradients = {};   // of `.grad`, or of the buffer for it
  DTypes masters = {};     // of the optimizer; empty if parameters have none
  DTypes states = {};      // of the optimizer: exp_avg and the like
};

// An op that ran in another precision than the policy's.
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
  std::optional<Fp8Report> fp8 = {};  // if the policy has a recipe
  std::string table() const;
};

class PrecisionWatch : private OpObserver {
 public:
  // `model` must outlive the watch or not be called any more. Only the latest watch records.
  PrecisionWatch(nn::ModuleBase& model, const Policy& policy);
  ~PrecisionWatch();
  PrecisionWatch(const PrecisionWatch&) = delete;
  PrecisionWatch& operator=(const PrecisionWatch&) = delete;

  // `optimizer`: state_dict() of the model's optimizer, empty without one.
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
