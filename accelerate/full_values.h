// Whole f32 values of a model in training, one at a time, whatever each rank holds of them: a
// parameter, its gradient, its optimizer states. DeepSpeed's safe_get_full_fp32_param(),
// safe_get_full_grad(), safe_get_full_optimizer_state() and their safe_set_ forms.
//
//     const FullValues values = accelerator.full_values(model);
//     const Tensor weight = values.parameter("head.weight");    // its f32 master, where it has one
//     const Tensor gradient = values.gradient("head.weight");   // between backward() and step()
//     const Tensor moment = values.state("head.weight", "exp_avg");
//     values.set_parameter("head.weight", weight * 0.5);        // alike on all ranks
//
// A parameter is said by its name in the model, or as the tensor itself. What is read is a copy,
// f32 (f64 of f64), on every rank; reading is collective where ranks hold parts, in every mode of
// sharding alike, and nothing stays behind. What is written must be alike on all ranks, of which
// each keeps what it holds: nothing travels. Steps go on with it, from masters and states that were
// written to as from any other.
//
// Errors: ValueError for a name that is none (with the nearest), a parameter without a gradient, a
// parameter that no optimizer has, a state that is not there yet or never (with those that are);
// AutogradError for a gradient that is a sum so far, since ranks have no such sum in common;
// ShapeError for a value of another shape. They are the same on all ranks, before anything is sent.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizer.h>

namespace tessera::accelerate {

// A parameter of a model: by its dotted name, or itself.
class ParameterName {
 public:
  ParameterName(const char* name) : name_(name) {}
  ParameterName(std::string name) : name_(std::move(name)) {}
  ParameterName(const Tensor& parameter) : parameter_(parameter) {}

 private:
  friend class FullValues;
  std::string name_;
  Tensor parameter_;
};

struct FullValuesOptions {
  std::vector<optim::Optimizer*> optimizers = {};  // that hold the parameters; they outlive this
  // What gradients are multiplied by until their step: the scale of losses.
  std::function<double()> gradient_scale = {};
  // Why gradients are no means yet; empty: they are.
  std::function<std::string()> sum_so_far = {};
  // Called after a gradient was written.
  std::function<void()> written = {};
};

// The Accelerator makes it. Of a model of fully_shard(), zero() or replicate() without one:
//
//     FullValues values(model, {.optimizers = {&optimizer}});
class FullValues {
 public:
  explicit FullValues(nn::ModuleBase& model, FullValuesOptions options = {});

  Tensor parameter(const ParameterName& name) const;
  // What the next step would read, but for a clip that it applies itself, without the scale of the
  // loss.
  Tensor gradient(const ParameterName& name) const;
  // "exp_avg" and so on: the names are the optimizer's (optim/optimizers.h).
  Tensor state(const ParameterName& name, std::string_view state) const;
  std::vector<std::string> state_names(const ParameterName& name) const;  // that are there

  // The master and, rounded, the parameter.
  void set_parameter(const ParameterName& name, const Tensor& value) const;
  void set_gradient(const ParameterName& name, const Tensor& value) const;
  void set_state(const ParameterName& name, std::string_view state, const Tensor& value) const;

 private:
  NamedTensor find(std::string_view where, const ParameterName& name) const;
  // The optimizer that has it, and its name there; null: none.
  struct Held {
    optim::Optimizer* optimizer = nullptr;
    std::string name = {};
  };
  Held holder_of(const Tensor& parameter) const;
  Tensor gradient_of(std::string_view where, const NamedTensor& parameter) const;
  Tensor state_of(std::string_view where, const NamedTensor& parameter,
                  std::string_view state) const;
  double scale() const { return options_.gradient_scale ? options_.gradient_scale() : 1; }

  nn::ModuleBase* model_;
  FullValuesOptions options_;
};

}  // namespace tessera::accelerate
