// The Linears of a model that a recipe put into fp8: what they do, counted, and the scales that
// they share over steps.
//
//     AppliedPolicy applied = apply(model, Policy::fp8(Fp8Recipe::named("delayed")));
//     ...
//     optimizer.step();
//     applied.fp8()->update();                      // delayed: once, after the steps of all
//     std::cout << applied.fp8()->report().table();
//
// In place: types, names, parameters and state dicts of the model stay. A call of such a Linear
// runs as autograd/fp8/layer.h says; adapters beside it (nn/lora/lora.h) are Linears of their own.
// A call that cannot runs as it would under bf16, and is counted with the reason; `strict` makes it
// an UnsupportedError. Calls of Linears that the filter leaves out are counted as well, and are
// none of those. Reasons: rows or dimensions that are no multiples of 16 (what a GPU's products
// need, and so the same on every machine), an f64 operand, autocast that is off, evaluation where
// the recipe leaves that out.
//
// [Note: delayed scales] In a step, the largest magnitudes of x, W and dy of each layer are noted,
// over all of its calls and micro-batches. update() puts them at the head of a history and makes
// the scales of the next step from it. A maximum that is 0, infinite or NaN tells nothing: it goes
// into the history as 0, and where there is no other the scale stays. The first scales are 1, as in
// TransformerEngine. Calls without grad and recomputations note nothing.
//
// This floor knows no ranks: set_reduction() gets what takes the maximum over them, called once in
// each update(), on every rank.
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

// Of one operand of a layer, since the beginning or reset_counts().
struct Fp8OperandReport {
  float amax = 0;  // of the last quantisation; on a GPU the largest since the beginning, or of the
                   // step at hand where scales are delayed
  int64_t elements = 0;
  double saturated = 0;    // share of elements that ended at the format's largest number
  double underflown = 0;   // share that became 0
  int64_t not_finite = 0;  // quantisations of a tensor with an infinity or NaN
  double sqnr = 0;         // signal to quantisation noise in dB, where measure_noise() was asked
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
  // Every Linear of the model gets its layer (nn/linear.h). Throws what check(recipe) throws.
  Fp8Layers(nn::ModuleBase& model, const Fp8Recipe& recipe);
  ~Fp8Layers();
  Fp8Layers(const Fp8Layers&) = delete;
  Fp8Layers& operator=(const Fp8Layers&) = delete;

  const Fp8Recipe& recipe() const;
  bool is_delayed() const { return recipe().scaling == Fp8Scaling::kDelayed; }

  // Delayed scales: the next step's. Where no call noted anything since the last one, on any rank,
  // nothing changes. Nothing for other recipes.
  void update();
  // The maximum over ranks, in place. maxima: f32 [3 x layers], where the model computes.
  using Reduction = std::function<void(const Tensor& maxima)>;
  void set_reduction(Reduction reduction) { reduction_ = std::move(reduction); }

  // "NAME.history" f32 [3, steps], the newest first, and "NAME.scale" f32 [3], of x, W and dy.
  // Empty for recipes without state. Loading takes as many steps as it keeps. Throws one ValueError
  // that lists what is missing or misshapen; then nothing was changed.
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
  std::vector<std::pair<bool, size_t>> order_;  // of all: whether it takes part, its index there
  Reduction reduction_;
};

// x W^T + bias in fp8 by a recipe, as a layer that is called for the first time, for comparison
// with another implementation: any shapes that linear() takes, whatever a GPU's products need.
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Fp8Recipe& recipe);

}  // namespace tessera::precision
