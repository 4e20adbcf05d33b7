// L-BFGS (Liu, Nocedal 1989), for full batches and few parameters; it estimates curvature from the
// last gradients.
//
//     optim::LBFGS lbfgs(model.named_parameters(), {.line_search =
//     optim::LineSearch::kStrongWolfe}); for (int64_t i = 0; i < 20; ++i) {
//       lbfgs.step([&] {
//         lbfgs.zero_grad();
//         Tensor loss = model(ids, targets).loss;
//         loss.backward();
//         return loss;
//       });
//     }
//
// A step runs up to max_iter iterations, each of which moves along -H g, where H is the inverse
// Hessian estimated from the last history_size pairs of steps and gradient differences by the
// two-loop recursion (Nocedal, Wright, "Numerical Optimization", algorithm 7.4). Without a line
// search the step length is lr (in the first iteration min(1, 1 / |g|_1) lr). kStrongWolfe searches
// for a length with lower loss and slope (algorithms 3.5 and 3.6, with cubic interpolation) and
// calls the closure for each trial. Iterations, limits and stopping tests are those of
// torch.optim.LBFGS 2.15.
//
// The closure clears gradients, returns the loss at the current parameters and calls backward. It
// is called at least once, with recording on, and must be deterministic. Losses and dot products
// are read on the host. Memory: (2 history_size + 4) times the parameters, in f32, or f64 if one of
// them is. 16-bit parameters are updated in their own precision, so small steps are lost. It is not
// an Optimizer, whose step() has no closure: schedules must set options().lr by hand, and it does
// not train under the Accelerator. Sharded parameters: UnsupportedError.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::optim {

enum class LineSearch { kNone, kStrongWolfe };

struct LbfgsOptions {
  double lr = 1;
  int64_t max_iter = 20;                 // of a step
  std::optional<int64_t> max_eval = {};  // calls of the closure in a step; 5 / 4 of max_iter
  double tolerance_grad = 1e-7;          // ends a step where no gradient is larger
  double tolerance_change = 1e-9;        // or parameters or loss change by less
  int64_t history_size = 100;
  LineSearch line_search = LineSearch::kNone;
  bool maximize = false;
};

class LBFGS {
 public:
  explicit LBFGS(const NamedTensors& parameters, const LbfgsOptions& options = {});

  // Returns the closure's first loss. Throws ShapeError unless it has one element.
  Tensor step(const std::function<Tensor()>& closure);
  void zero_grad(bool set_to_none = true);

  LbfgsOptions& options() { return options_; }
  const LbfgsOptions& options() const { return options_; }
  int64_t iterations() const { return iterations_; }    // of all steps
  int64_t evaluations() const { return evaluations_; }  // calls of the closure

  // Numbers and vectors of the history: "n_iter", "old_dirs.0"... Options are not included.
  StateDict state_dict() const;
  // Copies the state. Throws ValueError for a state of other parameters and then changes nothing.
  void load_state_dict(const StateDict& state);

 private:
  struct Pair {
    Tensor gradient_change;  // y
    Tensor step;             // s
    double rho;              // 1 / (y . s)
  };
  struct Evaluation {
    double loss;
    Tensor gradient;
  };
  struct Trial;
  Evaluation evaluate(const std::function<Tensor()>& closure, Tensor* loss = nullptr);
  Tensor flat_gradient() const;
  void move(double length, const Tensor& direction) const;
  void choose_direction(const Tensor& gradient);
  Trial search(const std::function<Tensor()>& closure, const Trial& start, double length,
               int64_t max_trials, int64_t* calls);

  NamedTensors parameters_;
  LbfgsOptions options_;
  DType dtype_;  // of flat vectors
  int64_t numel_ = 0;
  int64_t iterations_ = 0, evaluations_ = 0;
  std::vector<Pair> history_;  // the oldest first
  Tensor direction_, previous_gradient_;
  double length_ = 0, scale_ = 1;  // of the last step; of the initial H
};

}  // namespace tessera::optim
