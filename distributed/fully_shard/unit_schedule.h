// When the units of a model are gathered, resharded and reduced.
//
// [Note: life of a unit] Before a call of its module a unit is gathered, and the unit that was
// called after it the last time is prefetched. After the call it is resharded, if its mode says so.
// When the gradient of an output comes it is gathered again, and the one that was called before it
// is prefetched: exactly one ahead. When the gradients of all its parameters have come it is
// resharded and its gradients are reduced, while backward goes on.
//
// [Note: three units] In a unit's backward its weights are unsharded and its gradients come. One
// more unit has memory then: at first the previous one, whose gradients are being reduced, then the
// next one, whose weights are gathered. The change comes when a quarter of the gradients has: each
// transfer overlaps with that much of the computation, or the rest of it. If one weight is nearly
// the whole unit there is no such point, and the all-gather begins at once.
//
// [Note: order of reductions] Reductions are issued in one order on all ranks, that of the first
// calls of the last forward in reverse, whatever order gradients come in. A unit that waits for an
// earlier one keeps its gradients meanwhile.
//
// [Note: end of a unit's backward] A unit is resharded when the gradients of its parameters have
// come and backward has passed the inputs of its calls: until then its weights may be read, also if
// they get no gradient (frozen weights, a detached one). If inputs do not require grad this is not
// known; then the weights are read on the way to parameters of units that were called inside of its
// calls, so it waits for their gradients as well.
//
// [Note: backwards that threw] The other ranks may be in an all-gather that this one will never
// call, and it cannot make their calls without knowing how far they are. So it tells them
// (Group::tell()) and does not wait: the next call of each raises with the error. That happens when
// whoever caught the error calls fail_backward(), as the Accelerator does, else when the model is
// called next. With the next call of the model all ranks, which have failed by then, continue alike
// (resume_calls()). If GPUs' calls are not compared no rank can be told in one: there no host waits
// for another in backward, and the rank makes the calls that the others make.
//
// Layers that ranks calculate together (parallelize_module) convert activations in backward, so the
// others may be in a conversion that this rank will never call, whatever the unit keeps: they are
// told as well. No group of such a model need have all ranks that are told, so in each group of it
// the ranks continue by themselves.
//
// [Note: recomputation] A module that runs again inside of a backward (checkpoint()) finds its unit
// gathered for its backward. Such calls neither reshard it nor count for the order. If a part of a
// call runs again, the unit's weights are in the module as in the call.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/distributed/backward/backward_pass.h>
#include <tessera/distributed/backward/requires_grad_changes.h>
#include <tessera/distributed/fully_shard/shard_unit.h>

namespace tessera::distributed {

// A recorded call of a unit's module. The hooks on its outputs own it, and with it those before it
// in the same forward.
struct UnitCall {
  ShardUnit* unit;
  std::shared_ptr<UnitCall> previous;
  std::optional<DType> cast = {};  // of the unit, in it
  bool has_inputs = false;         // that require grad
  uint64_t pass = 0;               // the backward that has begun it
};

class UnitSchedule final : public GradientSchedule {
 public:
  using Options = UnitScheduleOptions;
  // `units`: the root first. `ranks`: all that share batches. They must outlive it.
  UnitSchedule(const std::vector<std::shared_ptr<ShardUnit>>& units, Group& ranks,
               const Options& options);
  ~UnitSchedule() override;
  UnitSchedule(const UnitSchedule&) = delete;
  UnitSchedule& operator=(const UnitSchedule&) = delete;

  void install() { pass_.install(root_); }
  BackwardPass& pass() { return pass_; }
  const BackwardPass& pass() const { return pass_; }
  const std::vector<std::weak_ptr<ShardUnit>>& units() const { return units_; }
  const std::vector<ParamGroup*>& parts() const { return parts_; }
  bool reduces_every_backward() const { return options_.reduces_every_backward; }

  // ---- Calls of modules. `last`: of the unit. `again`: see [Note: recomputation].
  void enter(ShardUnit& unit, bool again = false);
  void after_forward(ShardUnit& unit, nn::TensorRefs inputs, nn::TensorRefs outputs);
  void leave(ShardUnit& unit, bool last, bool failed) noexcept;
  // Backward has reached the inputs of a call.
  void input_arrived(ShardUnit& unit);
  // Asked in each recorded forward of the root, see DataParallelModel.
  std::function<std::function<void()>()> observer;
  // Called when a recorded forward of the root begins.
  std::function<void()> before_root;

  // ---- GradientSchedule
  bool continues_sums() const override { return true; }
  const std::string& changes() const override { return changes_.text(); }
  bool tells_failures() const override;
  void fail(const std::string& what) override;
  void prepare() override;
  void begin() override {}
  void arrived(size_t param) override;
  void ready(size_t param, bool arrived) override;
  void launch_ready() override;
  void finish() override;
  void end() override;
  UsedParameters used() const override { return {.own = {}, .any = used_}; }

 private:
  struct Place {
    ShardUnit* unit;
    ParamGroup* part;
    size_t index;  // in the part
  };
  void before_model();
  void before_backward_of(const std::shared_ptr<UnitCall>& call,
                          const std::function<void()>& observed);
  void end_backward_of(ShardUnit& unit);
  void gather_ahead();
  static bool needs_gather(const ShardUnit& unit);
  void observe_reads(ShardUnit& unit);
  void agree_on_casts(std::span<const uint8_t> flags);
  size_t flags_of_reads() const;
  void launch(ParamGroup& part);
  bool sums_replicas() const { return pass_.plan.all_reduce; }
  void gather_rest();
  std::vector<std::shared_ptr<Group>> compute_groups() const;
  std::vector<std::shared_ptr<Group>> groups() const;
  void resume() const;
  void follow_requires_grad();
  void name_changes();
  NamedTensors all_shards() const;
  NamedTensors wholes_of(const std::vector<std::shared_ptr<ShardUnit>>& units);
  NamedTensors trained_wholes();
  void set_shards();
  void settle() noexcept;
  void raise_failed_transfer();

  Options options_;
  KnownParameters known_;
  std::weak_ptr<const void> mesh_;  // expires with it
  std::weak_ptr<ShardUnit> root_;
  std::vector<std::weak_ptr<ShardUnit>> units_;
  std::vector<ParamGroup*> parts_;  // of all units
  std::vector<Place> places_;       // of each parameter of the pass
  BackwardPass pass_;
  RequiresGradChanges changes_;

  std::vector<ShardUnit*> open_calls_;  // the innermost last
  // Those of the current or last forward, and of the one before: units by their first call.
  std::vector<ShardUnit*> called_, called_before_;
  std::shared_ptr<UnitCall> last_call_;     // of this forward, whose outputs require grad
  std::shared_ptr<UnitCall> current_call_;  // that a backward has begun last
  std::shared_ptr<UnitCall> ahead_;         // to be gathered when `ahead_of_` has come far enough
  const ShardUnit* ahead_of_ = nullptr;
  bool open_backward_ = false;  // begun and not ended
  bool out_of_step_ = false;    // a backward has failed, and with it those of all ranks
  std::exception_ptr failed_transfer_;
  struct Launch {
    const ShardUnit* unit;
    ParamGroup* part;
  };
  std::vector<Launch> launch_order_;
  size_t next_launch_ = 0;
  ParamGroup* last_launched_ = nullptr;
  std::vector<Work> agreements_;  // of parts that do not train, where ranks have to agree on that
  std::vector<uint8_t> used_;     // parameters that this backward brought a gradient: 1

  // see [Note: casts] in param_group.h. How a parameter has been read in calls under autocast.
  class Reads;
  std::unique_ptr<Reads> reads_;
  bool may_cast_ = false;             // of any part
  std::optional<DType> observed_in_;  // the dtype of autocast in the calls that were looked at
  std::optional<DType> agreed_cast_;  // in which all ranks know what is read as casts alone
};

}  // namespace tessera::distributed
