// One backward of a model's parameters over a group of ranks: when it begins and ends, which
// gradients it brings, the divisor of the sum over the ranks, and whether `.grad` may be added to.
// A GradientSchedule reduces the gradients.
//
// [Note: unused parameters] The engine of autograd knows from the start which leaves a backward
// reaches. Parameters outside this set count as ready at once with zeros. So a rank that skips a
// branch neither hangs nor delays the others, and no option is needed.
//
// [Note: several backwards] Backwards whose plan does not synchronize accumulate in `.grad`; the
// one that does reduces the sums. A second reduction of the same gradients, with neither a step nor
// zero_grad between, would count the first one twice and is refused, unless the caller chooses by
// resume_sum() or keep_gradients() how the first one counts.
//
// [Note: hooks of parts] If ranks hold shards, hooks on a parameter run when its gradient has been
// reduced and divided, with this rank's shard: once in each such backward. The shard includes
// earlier gradients if the caller used keep_gradients().
//
// [Note: clearing] If ranks hold shards, backwards without a reduction accumulate in the unsharded
// gradients, while zero_grad() is called for the shards. It clears both, as it does for replicas.
//
// [Note: sums of a step] If every micro-batch of a step is reduced (plan.sync_gradients, while
// plan.is_last is false) the sums are left undivided, and the next backward continues them: rank 0
// adds to the previous sum, the others begin with zeros, and a reduction adds in rank order. So
// order and bits are those of one process which runs the micro-batches in turn, ((g0 + g1) + g2) +
// g3 ... Meanwhile `.grad` is that sum.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/backward/managed_param.h>
#include <tessera/distributed/backward/step_plan.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera::distributed {

// The divisor of the sum of gradients.
enum class GradientAverage : uint8_t {
  kRanks,   // the number of ranks that took part: losses are means over local batches
  kWindow,  // ranks times micro-batches of the step (plan.micro_index + 1)
  kNone,    // 1: the caller scales the loss
  // The sum of plan.weight over the ranks, which one small reduction finds ("window_weight"):
  // losses are scaled by their samples or tokens. A rank without a batch has weight 0.
  kWeight,
};

// Record of one synchronizing backward, for tests, reports and benchmarks.
struct BackwardRecord {
  struct Launch {
    int bucket = 0;
    int64_t gradients_before = 0;  // this rank's gradients that had come at its launch
    double seconds = 0;            // since the backward's first event
  };
  std::vector<Launch> launches;
  int64_t gradients = 0;         // gradients that came
  double last_gradient = 0;      // seconds since the backward's first event
  double waited = 0;             // seconds in which only communication was left
  int64_t backwards_before = 0;  // that added to these gradients without reducing them
};

// Whether each parameter had a gradient in a reduction, 0 or 1: on this rank, and on any.
struct UsedParameters {
  std::vector<uint8_t> own, any;
};

// Reduces the gradients of a backward. In a backward that synchronizes BackwardPass calls: prepare,
// begin, then ready once for each parameter with launch_ready after some of them, finish.
class GradientSchedule {
 public:
  virtual ~GradientSchedule() = default;
  // Whether further backwards may add to reduced gradients, which continue as sums. Otherwise a
  // second reduction of them is refused, see [Note: several backwards].
  virtual bool continues_sums() const { return false; }
  // Whether unfinished sums of a step are left undivided, see [Note: sums of a step].
  virtual bool leaves_sums() const { return continues_sums(); }
  // Called at the beginning of any backward, and at its end with whether it synchronizes.
  virtual void prepare() = 0;
  virtual void end() {}
  // A gradient has come, in any backward.
  virtual void arrived(size_t) {}
  virtual void begin() = 0;
  // Its gradient is in `.grad`, or there is none. `arrived`: it has come in this backward.
  virtual void ready(size_t param, bool arrived) = 0;
  // Issues what is complete.
  virtual void launch_ready() = 0;
  // All are ready: issues the rest, and returns when the results are in place.
  virtual void finish() = 0;
  // What the ranks have to agree on in this backward, for the tags of calls:
  // requires_grad_changes.h.
  virtual const std::string& changes() const = 0;
  // Whether a rank whose backward has failed reports it by fail(), which does not wait, to others
  // that may be in calls that it will never make. Otherwise it completes its calls with zeros.
  virtual bool tells_failures() const { return false; }
  virtual void fail(const std::string& /*what*/) {}
  // Whether a CUDA graph may repeat its device work, and its host work at each replay: the ranks
  // agree that all of them took part. Throws what finish() throws.
  virtual bool can_be_repeated() const { return false; }
  virtual UsedParameters used() const { return {}; }  // in the last reduction
  virtual void repeat(const UsedParameters&) {}       // DistributedError if others are used now
};

// Ranks reach their first reduction at very different times, while data is opened and caches are
// filled.
class FirstStepTimeout {
 public:
  explicit FirstStepTimeout(int64_t reductions) {
    if (reductions == 0) scope_.emplace(&Timeouts::first_step);
  }

 private:
  std::optional<TimeoutScope> scope_;
};

class BackwardPass {
 public:
  // `parameters`, in the order of the module, require grad. `ranks` and `schedule` must outlive it.
  // DeviceError for a parameter without memory.
  BackwardPass(const NamedTensors& parameters, Group& ranks, GradientAverage average,
               GradientSchedule& schedule);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  // Installs hooks on the leaves, which do nothing once their `owner` is destroyed.
  void install(std::weak_ptr<void> owner);
  // Replaces the parameters, between backwards; the state of those that stay is kept.
  void set_parameters(const NamedTensors& parameters);
  // Appends parameters; positions in params() stay. Also at the beginning of a backward.
  void add_parameters(const NamedTensors& parameters);
  // The gradient of one of these may be the first event of a backward, too.
  void watch(const NamedTensors& parameters);

  // ---- Events
  void before_backward();  // the gradient of a module's output has come
  // A rank without a batch takes part in a reduction with zeros. Gradients in the buffers are lost.
  void shadow_backward();
  // Called after a backward that threw `what` on this rank: the others, who wait for its calls,
  // raise DistributedError with it. It completes the reduction with zeros (pass_agreement.h), or if
  // units are gathered leaves it at once (tells_failures()). No effect if this rank's plan does not
  // synchronize, since the others do not wait.
  void fail_backward(const std::string& what = "an exception");
  // Reduces `.grad` without a backward, when no backward of the step will reach these parameters.
  // The plan must synchronize. Collective, like a backward.
  void reduce_alone();
  // Discards `.grad`, reduced or not, since it belongs to no step.
  void drop_sums();
  bool tells_failures() const { return schedule_->tells_failures(); }
  bool in_backward() const { return in_pass_; }
  bool reduces() const { return in_pass_ && synchronises_; }  // the current one

  // ---- Settings
  StepPlan plan;
  // Called before a backward that adds to gradients of the same step that were reduced already:
  // they become contributions again. Rank 0 holds their sum and the others zeros, so that the next
  // reduction counts them once. No effect if there are none.
  void resume_sum();
  // The same for sums that were left undivided, see [Note: sums of a step]. A backward that begins
  // at an output of the model does it itself; one that first reaches a parameter is refused
  // (AutogradError), unless this was called before it.
  void resume_undivided();
  // Called before a backward that begins another sum and reduces it at once: `.grad` is averaged
  // over the ranks and stays in addition to the new mean, as several backwards of one process add
  // up. Otherwise such a backward is refused. With kWeight the ranks agree on the sum of weights
  // here (the plan must be set), so that `.grad` can be scaled by its share of it.
  void keep_gradients();
  // See [Note: hooks of parts]: the hooks would also see the kept gradients.
  bool has_hooks_of_parts() const;
  // The caller has written to reduced gradients; resume_sum() accepts them.
  void accept_written();
  // The number of ranks that bring gradients to the next reduction; 0: all. (join)
  int active_ranks = 0;
  // Divides every reduction, whatever the plan: ranks whose steps end at different batches have no
  // common sum to continue. (join)
  bool divides_each = false;

  // ---- A backward that a CUDA graph repeats
  struct HostState {
    int64_t reductions = 0, backwards_in_window = 0;
    double window_weight = 0, divisor = 1;
    struct OfParameter {
      bool reduced, undivided;
      GradientState gradient;
      uint32_t parameter_version;
    };
    std::vector<OfParameter> parameters = {};
    UsedParameters used = {};
  };
  bool can_be_repeated() const { return schedule_->can_be_repeated(); }
  // Called before a replay whose plan is set: if its backward divides by the sum of weights, the
  // ranks agree on it, and it is window_weight(); false if there is no such agreement. A replay is
  // valid if the sum is the captured one; else the next backward uses it. Collective, as that
  // backward.
  bool agree_on_weight();
  HostState host_state() const;
  void set_host_state(const HostState& state);
  // Called after a replay: sets the state that the captured backward leaves, and counts
  // `reductions`.
  void repeat(const HostState& captured, int64_t reductions);
  // Called for a backward that threw while no pass was running.
  void abandon_backward();

  // ---- Looking
  Group& ranks() const { return *ranks_; }
  std::vector<ManagedParam>& params() { return params_; }
  const std::vector<ManagedParam>& params() const { return params_; }
  GradientAverage average() const { return average_; }
  int64_t reductions() const { return reductions_; }
  // kWeight: the traffic of one reduction to find the sum.
  static constexpr int64_t kWindowWeightBytes = 4 * sizeof(double);
  // kWeight: the sum over the ranks at the last reduction.
  double window_weight() const { return window_weight_; }
  bool holds_unreduced() const { return backwards_in_window_ > 0; }
  const BackwardRecord& record() const { return record_; }

  // ---- For the schedule, in a backward that synchronizes
  bool is_shadow() const { return shadow_; }               // this rank contributes zeros
  bool failed() const { return failed_; }                  // its backward has thrown
  const std::string& failure() const { return failure_; }  // the message
  void note_launch(int bucket);                            // the bucket is being reduced
  // The divisor of the sums. With kWeight it waits for the ranks' weights.
  double sum_divisor() { return divisor_ = divisor(); }
  // Whether the sums are complete when this backward ends, and are divided then. Of continued sums
  // only those of the last backward are.
  bool divides() const { return plan.is_last || divides_each || !schedule_->leaves_sums(); }
  void note_waited(double seconds) { record_.waited = seconds; }

 private:
  enum class Begin : uint8_t {
    kAtOutput,    // the gradient of an output has come
    kAtGradient,  // that of a parameter
    kAlone,       // outside of backwards, with existing gradients
    kShadow,      // with zeros
  };
  void begin(Begin how);
  void end();
  void append(const std::string& name, const Tensor& tensor);
  void hook_leaves(size_t first);
  void hook_clearing();
  void run_hooks_of_parts();
  void gradient_arrived(size_t param);
  void make_ready(size_t param, bool arrived);
  void reduce_rest();
  void check_cleared();
  void go_on(bool gradients_came);
  // Whether a reduction adds to the last one's results without a call. With kWeight the caller
  // chooses how they count.
  bool sums_go_on() const {
    return schedule_->continues_sums() && average_ != GradientAverage::kWeight;
  }
  void continue_sums();
  double divisor();
  void begin_weight();
  void check_batches();
  int contributors() const { return active_ranks > 0 ? active_ranks : ranks_->size(); }
  double seconds() const;

  Group* ranks_;
  GradientAverage average_;
  GradientSchedule* schedule_;
  std::weak_ptr<void> owner_;
  std::vector<ManagedParam> params_;
  std::vector<HookHandle> handles_;
  std::vector<HookHandle> watch_handles_;
  std::vector<HookHandle> clearing_handles_;  // see [Note: clearing]

  // The current backward.
  uint64_t pass_ = 0;
  bool synchronises_ = false;
  bool shadow_ = false;
  bool in_pass_ = false;
  bool failed_ = false;  // this rank's backward
  std::string failure_;
  std::chrono::steady_clock::time_point began_;
  BackwardRecord record_;
  // kWeight: f64 [4], being reduced until weight_work_ has been waited for. Sums over the ranks of
  // the weight, of those that know their batch (1), of its place and of the place's square.
  Tensor weight_;
  Work weight_work_;
  bool weight_begun_ = false;  // before the backward: keep_gradients()
  double window_weight_ = 0;
  double divisor_ = 1;  // of the last reduction

  int64_t backwards_in_window_ = 0;
  int64_t reductions_ = 0;
};

}  // namespace tessera::distributed
