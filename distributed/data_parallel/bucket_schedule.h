// Reduces the gradients of replicas in buckets, each by one collective, while backward runs.
//
// [Note: launch order] Collectives must be issued in one sequence on all ranks. Gradients become
// ready in an order that may differ (branches, unused parameters, timing), so buckets are launched
// strictly by index: a complete bucket waits until all before it are launched. The order comes from
// rank 0: at first the parameters from last to first, after the first reduction the order in which
// rank 0's gradients came.
//
// [Note: used map] At the end one small reduction ("used_map") finds which parameters any rank has
// used: a parameter that no rank used keeps its previous `.grad`, usually none.
//
// [Note: more parameters] A parameter that requires grad only after the schedule was made gets into
// a bucket when a forward or a backward finds it; one that is frozen later keeps its place and
// counts as unused. All ranks do so alike: requires_grad_changes.h.
//
// The first reduction waits for Timeouts::first_step if that is longer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/backward/backward_pass.h>
#include <tessera/distributed/backward/buckets.h>
#include <tessera/distributed/backward/gradient_bucket.h>
#include <tessera/distributed/backward/requires_grad_changes.h>
#include <tessera/distributed/data_parallel/communication_hook.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct BucketScheduleOptions {
  int64_t first_bucket_bytes = kFirstBucketBytes;
  int64_t bucket_bytes = kBucketBytes;
  bool gradient_as_bucket_view = true;
  bool rebuild_buckets = true;
  std::optional<DType> gradient_dtype = {};
  GradientAverage average = GradientAverage::kRanks;
};

class BucketSchedule final : public GradientSchedule,
                             public std::enable_shared_from_this<BucketSchedule> {
 public:
  // See BackwardPass.
  BucketSchedule(const NamedTensors& parameters, Group& ranks,
                 const BucketScheduleOptions& options);
  ~BucketSchedule() override;
  BucketSchedule(const BucketSchedule&) = delete;
  BucketSchedule& operator=(const BucketSchedule&) = delete;

  // During the lifetime of this object backwards of the parameters reduce.
  void install();
  void before_forward();

  BackwardPass& pass() { return pass_; }
  const BackwardPass& pass() const { return pass_; }
  void set_hook(std::shared_ptr<CommunicationHook> hook) { hook_ = std::move(hook); }
  CommunicationHook& hook() const { return *hook_; }

  // ---- Looking
  int64_t used_map_bytes() const;  // of the used map's message
  const std::vector<std::unique_ptr<GradientBucket>>& buckets() const { return buckets_; }
  int rebuilds() const { return rebuilds_; }

  // ---- GradientSchedule
  bool leaves_sums() const override { return hook_->leaves_sums(); }
  const std::string& changes() const override { return changes_.text(); }
  void prepare() override;
  void begin() override;
  void ready(size_t param, bool arrived) override;
  void launch_ready() override;
  void finish() override;
  bool can_be_repeated() const override;
  UsedParameters used() const override { return used_; }
  void repeat(const UsedParameters& captured) override;

 private:
  void launch(GradientBucket& bucket);
  void make_buckets(const std::vector<size_t>& order);
  void agree_on_order();
  void rebuild_if_due();
  void follow_requires_grad();

  BucketScheduleOptions options_;
  NamedTensors parameters_;  // including those that do not require grad
  RequiresGradChanges changes_;
  BackwardPass pass_;
  std::shared_ptr<CommunicationHook> hook_;
  struct Place {
    GradientBucket* bucket;
    size_t slot;
  };
  std::vector<Place> places_;  // of each parameter
  std::vector<std::unique_ptr<GradientBucket>> buckets_;
  size_t next_launch_ = 0;
  UsedParameters used_;

  bool learning_order_ = false;
  std::vector<size_t> arrival_order_, next_order_;
  int rebuilds_ = 0;
};

}  // namespace tessera::distributed
