// The Linears of a model in fp8 by a recipe: counts of their calls, and the scales that persist
// over steps.
//
//     AppliedPolicy applied = apply(model, Policy::fp8(Fp8Recipe::named("delayed")));
//     ...
//     optimizer.step();
//     applied.fp8()->update();                      // delayed: once, after the steps of all
//     std::cout << applied.fp8()->report().table();
//
// Types, names, parameters and state dicts of the model do not change. A call of such a Linear runs
// as autograd/fp8/layer.h says; adapters (nn/lora/lora.h) are separate Linears. A call that cannot
// run in fp8 runs as under bf16 and is counted with the reason; with `strict` it is an
// UnsupportedError. Calls of Linears that the filter leaves out are counted separately. Reasons are
// rows or dimensions that are not multiples of 16 (which a GPU's products need, and therefore all
// machines), an f64 operand, autocast that is off, and evaluation if the recipe excludes it.
//
// [Note: delayed scales] During a step the largest magnitudes of x, W and dy of each layer are
// recorded, over all of its calls and micro-batches. update() puts them at the head of a history
// and makes the scales of the next step from it. A maximum that is 0, infinite or NaN enters the
// history as 0, and if there is no other the scale does not change. The first scales are 1, as in
// TransformerEngine. Calls without grad and recomputations record nothing.
//
// This library does not know ranks: set_reduction() gets a function that takes the maximum over
// them, called once in each update(), on every rank.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/autograd/fp8/layer.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/nn/module.h>
#include <tessera/precision/fp8_recipe.h>

namespace tessera::precision {

// For one operand of a layer, since the beginning or reset_counts().
struct Fp8OperandReport {
  float amax = 0;  // of the last quantization; on a GPU the largest since the beginning, or of the
                   // step at hand where scales are delayed
  int64_t elements = 0;
  double saturated = 0;    // share of elements that ended at the format's largest number
  double underflown = 0;   // share that became 0
  int64_t not_finite = 0;  // quantizations of a tensor with an infinity or NaN
  double sqnr = 0;         // signal to quantization noise in dB, with measure_noise()
};

struct Fp8LayerReport {
  std::string name;      // dotted
  std::string excluded;  // why the filter left it out; empty where it takes part
  int64_t fp8_calls = 0;
  std::map<std::string, int64_t> fallbacks = {};  // calls in another precision, by reason
  std::map<std::string, int64_t> dtypes = {};     // the same, by the dtype that they ran in: "bf16"
  std::array<Fp8OperandReport, kNumFp8Roles> operands = {};  // x, W, dy
};

struct Fp8Report {
  Fp8Recipe recipe;
  std::vector<Fp8LayerReport> layers;  // every Linear, in the order of the tree
  int64_t fp8_calls() const;
  int64_t fallbacks() const;  // of layers that take part
  std::string table() const;
};

class Fp8Layer;
struct Fp8Shared;

// Made by apply() (autocast.h); the model must outlive it, or not be called any more.
class Fp8Layers {
 public:
  // Gives every Linear of the model its layer (nn/linear.h). Throws what check(recipe) throws.
  Fp8Layers(nn::ModuleBase& model, const Fp8Recipe& recipe);
  ~Fp8Layers();
  Fp8Layers(const Fp8Layers&) = delete;
  Fp8Layers& operator=(const Fp8Layers&) = delete;

  const Fp8Recipe& recipe() const;
  bool is_delayed() const { return recipe().scaling == Fp8Scaling::kDelayed; }

  // Delayed scales: makes the next step's. If no call was recorded since the last one, on any rank,
  // nothing changes. No effect for other recipes.
  void update();
  // Takes the maximum over ranks, in place. maxima: f32 [3 x layers], on the model's device.
  using Reduction = std::function<void(const Tensor& maxima)>;
  void set_reduction(Reduction reduction) { reduction_ = std::move(reduction); }

  // "NAME.history" f32 [3, steps], the newest first, and "NAME.scale" f32 [3], of x, W and dy.
  // Empty for recipes without state. Loading takes as many steps as are kept. On a mismatch throws
  // one ValueError that lists missing and misshapen names and changes nothing.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

  Fp8Report report() const;
  void reset_counts();
  // Whether sqnr is measured: one more pass over each operand.
  void measure_noise(bool measure);

 private:
  std::shared_ptr<Fp8Shared> shared_;
  std::vector<std::shared_ptr<Fp8Layer>> layers_;
  std::vector<std::shared_ptr<Fp8Layer>> excluded_;
  std::vector<std::pair<bool, size_t>> order_;  // all: whether it takes part, its index there
  Reduction reduction_;
};

// x W^T + bias in fp8 by a recipe, as the first call of a layer, for comparison with other
// implementations: takes any shapes of linear(), whatever a GPU's products need.
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Fp8Recipe& recipe);

}  // namespace tessera::precision
