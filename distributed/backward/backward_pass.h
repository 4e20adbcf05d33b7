// One backward of a model's parameters over a group of ranks: when it begins and ends, which of
// their gradients it brings, by what the sum over the ranks is divided, and whether what lies in
// `.grad` may be added to. How gradients travel is a GradientSchedule's affair.
//
// [Note: unused parameters] The engine of autograd knows from the start which leaves a backward
// reaches. Parameters outside this set count as ready at once with zeros. So a rank that leaves out
// a branch neither hangs nor delays the others, and no option is needed.
//
// [Note: several backwards] Backwards whose plan does not synchronise add up in `.grad`. The one
// that does reduces the sums. A second reduction of the same gradients, with neither a step nor
// zero_grad between, would count the first one twice and is refused, unless the caller says by
// resume_sum() or keep_gradients() what the first is to be.
//
// [Note: hooks of parts] Where ranks hold parts, hooks on a parameter run when its gradient has been
// reduced and divided, with this rank's part: once in each such backward. It holds what was there
// before, too, where the caller said keep_gradients().
//
// [Note: clearing] Where ranks hold parts, what backwards without a reduction add up lies with the
// wholes, and zero_grad() is called for the parts. It clears both, as it does for replicas.
//
// [Note: sums of a step] Where every micro-batch of a step is reduced (plan.sync_gradients, while
// plan.is_last is false) the sums are left undivided, and the next backward goes on with them: rank
// 0 adds to what was summed, the others begin with zeros, and a reduction adds in rank order. So
// the order is that of one process which runs the micro-batches in turn, ((g0 + g1) + g2) + g3 ...,
// and so are the bits. Meanwhile `.grad` is that sum.
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

// By what the sum of the gradients is divided.
enum class GradientAverage : uint8_t {
  kRanks,   // the number of ranks that took part: losses are means over local batches
  kWindow,  // ranks times micro-batches of the step (plan.micro_index + 1)
  kNone,    // nothing: the loss is scaled by the caller
  // The sum of plan.weight over the ranks, which one small reduction finds ("window_weight"):
  // losses are scaled by their samples or tokens. A rank without a batch weighs nothing.
  kWeight,
};

// What happened in one synchronising backward; for tests, reports and benchmarks.
struct BackwardRecord {
  struct Launch {
    int bucket = 0;
    int64_t gradients_before = 0;  // gradients of this rank that had come when it was launched
    double seconds = 0;            // since the backward's first event
  };
  std::vector<Launch> launches;
  int64_t gradients = 0;         // that came in all
  double last_gradient = 0;      // seconds since the backward's first event
  double waited = 0;             // seconds in which only communication was left
  int64_t backwards_before = 0;  // that added to these gradients without reducing them
};

// Whether each parameter had a gradient in a reduction, 0 or 1: on this rank, and on any.
struct UsedParameters {
  std::vector<uint8_t> own, any;
};

// How the gradients of a backward travel. BackwardPass calls, in a backward that synchronises:
// prepare, begin, then ready once for each parameter with launch_ready after some of them, finish.
class GradientSchedule {
 public:
  virtual ~GradientSchedule() = default;
  // Whether what was reduced may be added to: the sums go on where they are. Otherwise a second
  // reduction of them is refused, see [Note: several backwards].
  virtual bool continues_sums() const { return false; }
  // Whether sums of a step that goes on are left undivided, see [Note: sums of a step].
  virtual bool leaves_sums() const { return continues_sums(); }
  // At the begin of any backward, and at its end, whether it synchronises or not.
  virtual void prepare() = 0;
  virtual void end() {}
  // A gradient has come, in any backward.
  virtual void arrived(size_t) {}
  virtual void begin() = 0;
  // Its gradient is in `.grad`, or there is none. `arrived`: it has come in this backward just now.
  virtual void ready(size_t param, bool arrived) = 0;
  // Issues what is complete.
  virtual void launch_ready() = 0;
  // All are ready: issues the rest, and returns when the results are where they belong.
  virtual void finish() = 0;
  // What the ranks have to agree on in this backward, for the tags of calls:
  // requires_grad_changes.h.
  virtual const std::string& changes() const = 0;
  // Whether a rank whose backward has failed tells the others so, who may be in calls that it will
  // never make: fail(), which does not wait. Else it makes what it owes them, with zeros.
  virtual bool tells_failures() const { return false; }
  virtual void fail(const std::string& /*what*/) {}
  // Whether what it does on the device may be repeated by a CUDA graph, and what it does on the
  // host beside each replay: the ranks agree that all of them were here. Throws what finish()
  // throws.
  virtual bool can_be_repeated() const { return false; }
  virtual UsedParameters used() const { return {}; }  // in the last reduction
  virtual void repeat(const UsedParameters&) {}       // DistributedError where others are used now
};

// Ranks come to their first reduction at very different times: data is opened, caches are filled.
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

  // Hooks on the leaves, which do nothing once `owner`, of whom this is a part, is gone.
  void install(std::weak_ptr<void> owner);
  // Other parameters from now on, between backwards: of those that stay what is known is kept.
  void set_parameters(const NamedTensors& parameters);
  // More parameters behind those that are there: places in params() stay. Also when a backward
  // begins.
  void add_parameters(const NamedTensors& parameters);
  // A backward begins with the gradient of one of these, too, if it comes first.
  void watch(const NamedTensors& parameters);

  // ---- Events
  void before_backward();  // the gradient of a module's output has come
  // A rank that has no batch takes part in a reduction with zeros. What lies in the buffers of
  // gradients is lost.
  void shadow_backward();
  // After a backward that threw `what` on this rank: the others, who wait for what it has not sent,
  // raise DistributedError with it. It brings the reduction to its end with zeros
  // (pass_agreement.h), or where units are gathered leaves it at once (tells_failures()). Nothing
  // where the others wait for nothing, as this rank's plan does not synchronise.
  void fail_backward(const std::string& what = "an exception");
  // What lies in `.grad` is reduced by itself: no backward of the step comes to these parameters
  // any more. The plan must synchronise. Collective, and for other ranks as a backward is.
  void reduce_alone();
  // What lies in `.grad`, reduced or not, belongs to no step and goes.
  void drop_sums();
  bool tells_failures() const { return schedule_->tells_failures(); }
  bool in_backward() const { return in_pass_; }
  bool reduces() const { return in_pass_ && synchronises_; }  // the one under way

  // ---- Settings
  StepPlan plan;
  // Before a backward that adds to gradients which were reduced already and belong to the same
  // step: they become contributions again. Rank 0 holds their sum and the others zeros, so that the
  // next reduction counts them once. Nothing to do where there are none.
  void resume_sum();
  // The same of sums that were left undivided, see [Note: sums of a step]. A backward does it by
  // itself where it begins at an output of the model; one that first comes to a parameter is
  // refused (AutogradError), unless this was called before it.
  void resume_undivided();
  // Before a backward that begins another sum and reduces it at once: whatever lies in `.grad` is
  // averaged over the ranks and stays in addition to the mean, as several backwards of one process
  // add up. Without it such a backward is refused. With kWeight the ranks agree on the sum of
  // weights here (the plan must be set), so that what lies there can be given its share of it.
  void keep_gradients();
  // [Note: hooks of parts]: they would see what is kept beside what comes.
  bool has_hooks_of_parts() const;
  // The caller has written to gradients that were reduced; resume_sum() takes them as they are.
  void accept_written();
  // Ranks that bring gradients to the next reduction; 0: all. (join)
  int active_ranks = 0;
  // Every reduction is divided, whatever the plan says: ranks whose steps end in different places
  // have no sum in common that could go on. (join)
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
  // Before a replay whose plan is set: where its backward divides by the sum of weights the ranks
  // agree on it, and it is window_weight(); false where nothing is agreed on. A replay is right
  // where it is the captured one; else the next backward takes it as it is. Collective, as that
  // backward.
  bool agree_on_weight();
  HostState host_state() const;
  void set_host_state(const HostState& state);
  // After a replay: what it left as the captured backward did, and `reductions` more of them.
  void repeat(const HostState& captured, int64_t reductions);
  // Of a backward that threw while nothing ran.
  void abandon_backward();

  // ---- Looking
  Group& ranks() const { return *ranks_; }
  std::vector<ManagedParam>& params() { return params_; }
  const std::vector<ManagedParam>& params() const { return params_; }
  GradientAverage average() const { return average_; }
  int64_t reductions() const { return reductions_; }
  // kWeight: what one reduction sends to find the sum.
  static constexpr int64_t kWindowWeightBytes = 4 * sizeof(double);
  // kWeight: the sum over the ranks at the last reduction.
  double window_weight() const { return window_weight_; }
  bool holds_unreduced() const { return backwards_in_window_ > 0; }
  const BackwardRecord& record() const { return record_; }

  // ---- For the schedule, in a backward that synchronises
  bool is_shadow() const { return shadow_; }               // this rank contributes zeros
  bool failed() const { return failed_; }                  // for it has thrown
  const std::string& failure() const { return failure_; }  // what
  void note_launch(int bucket);                            // it travels now
  // By what the sums are divided. With kWeight it waits for the ranks' weights.
  double sum_divisor() { return divisor_ = divisor(); }
  // Whether the sums are the step's when this backward ends, and are divided then. Of sums that go
  // on only those of the last backward are.
  bool divides() const { return plan.is_last || divides_each || !schedule_->leaves_sums(); }
  void note_waited(double seconds) { record_.waited = seconds; }

 private:
  enum class Begin : uint8_t {
    kAtOutput,    // the gradient of an output has come
    kAtGradient,  // that of a parameter
    kAlone,       // outside of backwards, with what is there
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
  // Whether a reduction adds to the last one's results by itself. With kWeight the caller says what
  // they are to be.
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

  // The backward under way.
  uint64_t pass_ = 0;
  bool synchronises_ = false;
  bool shadow_ = false;
  bool in_pass_ = false;
  bool failed_ = false;  // this rank's backward
  std::string failure_;
  std::chrono::steady_clock::time_point began_;
  BackwardRecord record_;
  // kWeight: f64 [4], under way until weight_work_ has been waited for. Sums over the ranks of the
  // weight, of those that know their batch (1), of its place and of the place's square.
  Tensor weight_;
  Work weight_work_;
  bool weight_begun_ = false;  // before the backward: keep_gradients()
  double window_weight_ = 0;
  double divisor_ = 1;  // of the last reduction

  int64_t backwards_in_window_ = 0;
  int64_t reductions_ = 0;
};

}  // namespace tessera::distributed
