// Exponential moving averages of parameters.
//
//     optim::EMA average(model.named_parameters(), {.decay = 0.999});
//     ... optimizer.step(); average.update();
//     { optim::EMA::Scope scope(average); evaluate(model); }  // with the averaged values
#pragma once

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::optim {

struct EMAOptions {
  double decay = 0.999;
};

// average = decay * average + (1 - decay) * parameter. Averages are f32 for 16-bit parameters and
// begin as the parameters' values. For sharded parameters (DTensors) each rank averages its own
// shard, without communication; UnsupportedError for a Partial. Averages follow parameters that
// prepare() shards or moves later, with each rank's own values; if the ranks begin with different
// parameters, make the EMA after prepare().
class EMA {
 public:
  explicit EMA(const NamedTensors& parameters, const EMAOptions& options = {});
  EMA(const EMA&) = delete;
  EMA& operator=(const EMA&) = delete;

  void update();  // one pass
  void copy_to_parameters() const;
  const NamedTensors& averages() const {
    follow_parameters();
    return averages_;
  }

  StateDict state_dict() const;                  // the averages, and how many updates were made
  void load_state_dict(const StateDict& state);  // throws ValueError, ShapeError
  void rebind(const NamedTensors& parameters);   // other tensors under the same names
  int64_t num_updates() const { return num_updates_; }

  // In the scope the parameters hold the averages; afterwards they have their own values again.
  class Scope {
   public:
    explicit Scope(EMA& average);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    EMA& average_;
    TensorList own_values_;
  };

 private:
  void follow_parameters() const;

  EMAOptions options_;
  NamedTensors parameters_;
  mutable NamedTensors averages_;  // on the parameters' device, sharded as they are
  int64_t num_updates_ = 0;
};

}  // namespace tessera::optim
