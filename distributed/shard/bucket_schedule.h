// When gradients are reduced: the part of data-parallel training that follows backward.
//
// [Note: launch order] Collectives must be issued in one sequence on all ranks. Gradients become
// ready in an order that may differ (branches, unused parameters, timing), so buckets are launched
// strictly by index: a complete bucket waits until all before it are launched. The order comes from
// rank 0: at first the parameters from last to first, after the first reduction the order in which
// rank 0's gradients came.
//
// [Note: unused parameters] The engine of autograd knows from the start which leaves a backward
// reaches. Parameters outside this set count as ready at once with zeros. So a rank that leaves out
// a branch neither hangs nor delays the others, and no option is needed. Which parameters any rank
// has used is agreed on at the end by one small reduction ("used_map"): a parameter that no rank
// used keeps the `.grad` that it had, none as a rule.
//
// [Note: several backwards] Backwards whose plan does not synchronise add up in `.grad`, which lies
// in the buckets. The one that does reduces the sums. A second reduction of the same gradients,
// with neither a step nor zero_grad between, would count the first one twice and is refused, unless
// the caller says by resume_sum() or keep_gradients() what the first is to be.
//
// [Note: fingerprint] NCCL does not compare what ranks call, and may carry out calls that differ. A
// hash of the calls so far (Backend::fingerprint) and its complement travel behind the used map:
// their maximum is this rank's own on all ranks only where all hashes are equal.
//
// [Note: failed backward] A backward that throws on one rank would leave the others waiting for its
// buckets. fail_backward() brings the reduction to its end with zeros, and a byte in the used map
// tells the others who it was: their backward throws too, at once.
//
// The first reduction waits for Timeouts::first_step where that is longer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/core/state_dict.h>
#include <tessera/distributed/shard/buckets.h>
#include <tessera/distributed/shard/communication_hook.h>
#include <tessera/distributed/shard/gradient_bucket.h>
#include <tessera/distributed/shard/plan.h>
#include <tessera/distributed/transport/group.h>

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

struct EngineOptions {
  ShardingMode mode = kDataParallel;
  int64_t first_bucket_bytes = kFirstBucketBytes;
  int64_t bucket_bytes = kBucketBytes;
  bool gradient_as_bucket_view = true;
  bool rebuild_buckets = true;
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
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

class BucketSchedule : public std::enable_shared_from_this<BucketSchedule> {
 public:
  // `parameters` in the order of the module; those that do not require grad are passed over.
  // `ranks` must outlive the engine.
  BucketSchedule(const NamedTensors& parameters, Group& ranks, const EngineOptions& options);
  ~BucketSchedule();
  BucketSchedule(const BucketSchedule&) = delete;
  BucketSchedule& operator=(const BucketSchedule&) = delete;

  // Hooks on the leaves. They hold the engine weakly.
  void install();

  // ---- Events
  void before_forward();   // buckets may be made anew
  void before_backward();  // the gradient of a module's output has come
  // A rank that has no batch takes part in a reduction with zeros. What lies in the buckets is
  // lost.
  void shadow_backward();
  // After a backward that threw on this rank: see [Note: failed backward]. Nothing where this
  // rank's plan does not synchronise.
  void fail_backward();
  bool in_backward() const { return in_pass_; }

  // ---- Settings
  StepPlan plan;
  // Before a backward that adds to gradients which were reduced already and belong to the same
  // step: they become contributions again. Rank 0 holds their sum and the others zeros, so that the
  // next reduction counts them once. Nothing to do where there are none.
  void resume_sum();
  // Before a backward that begins another sum and reduces it at once: whatever lies in `.grad` is
  // averaged over the ranks and stays in addition to the mean, as several backwards of one process
  // add up. Without it such a backward is refused. With kWeight the ranks agree on the sum of
  // weights here (the plan must be set), so that what lies there can be given its share of it.
  void keep_gradients();
  // The caller has written to gradients that were reduced; resume_sum() takes them as they are.
  void accept_written();
  // Ranks that bring gradients to the next reduction; 0: all. (join)
  int active_ranks = 0;
  void set_hook(std::shared_ptr<CommunicationHook> hook) { hook_ = std::move(hook); }
  CommunicationHook& hook() const { return *hook_; }

  // ---- Looking
  Group& ranks() const { return *ranks_; }
  // With the failure's byte, and the fingerprint where there is one.
  int64_t used_map_bytes() const;
  const EngineOptions& options() const { return options_; }
  const std::vector<ManagedParam>& params() const { return params_; }
  const std::vector<std::unique_ptr<GradientBucket>>& groups() const { return groups_; }
  int rebuilds() const { return rebuilds_; }
  int64_t reductions() const { return reductions_; }
  // kWeight: what one reduction sends to find the sum.
  static constexpr int64_t kWindowWeightBytes = 4 * sizeof(double);
  // kWeight: the sum over the ranks at the last reduction.
  double window_weight() const { return window_weight_; }
  bool holds_unreduced() const { return backwards_in_window_ > 0; }
  const BackwardRecord& last_backward() const { return record_; }

 private:
  void begin_pass(bool shadow);
  void end_pass();
  void gradient_arrived(size_t param);
  void mark_ready(size_t param);
  void launch_complete();
  void launch(GradientBucket& group);
  void finish_reduction();
  void check_cleared();
  void begin_weight();
  void check_batches();
  double divisor();
  int contributors() const { return active_ranks > 0 ? active_ranks : ranks_->size(); }
  void make_groups(const std::vector<size_t>& order);
  void agree_on_order();
  void rebuild_if_due();
  double seconds() const;

  Group* ranks_;
  EngineOptions options_;
  std::shared_ptr<CommunicationHook> hook_;
  std::vector<ManagedParam> params_;
  struct Place {
    GradientBucket* group;
    size_t slot;
  };
  std::vector<Place> places_;  // of each parameter
  std::vector<std::unique_ptr<GradientBucket>> groups_;
  std::vector<HookHandle> handles_;

  // The backward under way.
  uint64_t pass_ = 0;
  bool synchronises_ = false;
  bool shadow_ = false;
  bool in_pass_ = false;
  bool failed_ = false;  // this rank's backward
  size_t next_launch_ = 0;
  int64_t began_ = 0;  // nanoseconds
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
  bool learning_order_ = false;
  std::vector<size_t> arrival_order_, next_order_;
  int rebuilds_ = 0;
};

}  // namespace tessera::distributed
