// Reads and writes whole f32 values of a model in training by name, one at a time, whatever the
// sharding: a parameter, its gradient, its optimizer states. The counterparts of DeepSpeed's
// safe_get_full_fp32_param(), safe_get_full_grad(), safe_get_full_optimizer_state() and their
// safe_set_ forms.
//
//     const FullValues values = accelerator.full_values(model);
//     const Tensor weight = values.parameter("head.weight");    // its f32 master, where it has one
//     const Tensor gradient = values.gradient("head.weight");   // between backward() and step()
//     const Tensor moment = values.state("head.weight", "exp_avg");
//     values.set_parameter("head.weight", weight * 0.5);        // alike on all ranks
//
// A parameter is given by its name in the model, or as the tensor itself. Reading returns a copy,
// f32 (f64 for f64), on every rank; it is collective if the model is sharded, in every mode alike,
// and keeps nothing. Values written must be the same on all ranks, each of which keeps its shard;
// nothing is sent. Training continues from written masters and states as from any others.
//
// Errors: ValueError for an unknown name (with the nearest), a parameter without a gradient, a
// parameter that no optimizer has, a state that does not exist (with those that do); AutogradError
// for a gradient that is an unfinished sum, which the ranks do not share; ShapeError for a value of
// another shape. All ranks throw the same, before anything is sent.
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

// A parameter of a model, by its dotted name or as the tensor.
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
  std::vector<optim::Optimizer*> optimizers = {};  // that hold the parameters; must outlive this
  // The factor of gradients until their step: the loss scale.
  std::function<double()> gradient_scale = {};
  // The reason why gradients are not means yet; empty if they are.
  std::function<std::string()> sum_so_far = {};
  // Called after a gradient was written.
  std::function<void()> written = {};
};

// The Accelerator makes it. For a model of fully_shard(), zero() or replicate() without an
// Accelerator:
//
//     FullValues values(model, {.optimizers = {&optimizer}});
class FullValues {
 public:
  explicit FullValues(nn::ModuleBase& model, FullValuesOptions options = {});

  Tensor parameter(const ParameterName& name) const;
  // The gradient that the next step would read, without the loss scale, and before a clip that the
  // step applies itself.
  Tensor gradient(const ParameterName& name) const;
  // "exp_avg" and so on, the optimizer's names (optim/optimizers.h).
  Tensor state(const ParameterName& name, std::string_view state) const;
  std::vector<std::string> state_names(const ParameterName& name) const;  // that are there

  // Writes the master and, rounded, the parameter.
  void set_parameter(const ParameterName& name, const Tensor& value) const;
  void set_gradient(const ParameterName& name, const Tensor& value) const;
  void set_state(const ParameterName& name, std::string_view state, const Tensor& value) const;

 private:
  NamedTensor find(std::string_view where, const ParameterName& name) const;
  // The optimizer that has it, and its name there; null if none has.
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
