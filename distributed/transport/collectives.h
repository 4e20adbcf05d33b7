// Collectives that wait, for plain tensors and for objects.
//
//     all_reduce(loss, ReduceOp::kMean);                        // of world()
//     auto settings = broadcast_object(settings_of_rank_0, 0);  // any JSON
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <vector>

#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum, Group& group = world(),
                const CollectiveOptions& options = {});
void broadcast(const Tensor& tensor, int root = 0, Group& group = world(),
               const CollectiveOptions& options = {});
// Returns the inputs of all ranks, equal in shape, concatenated along dimension 0 (a scalar counts
// as one row).
Tensor all_gather(const Tensor& input, Group& group = world(),
                  const CollectiveOptions& options = {});
// Numbers of rows may differ (other dimensions not): rank r's tensor is at [r].
std::vector<Tensor> all_gather_ragged(const Tensor& input, Group& group = world(),
                                      const CollectiveOptions& options = {});
// Returns this rank's rows of the sum. Dimension 0 must be divisible by the number of ranks.
Tensor reduce_scatter(const Tensor& input, ReduceOp op = ReduceOp::kSum, Group& group = world(),
                      const CollectiveOptions& options = {});
// Returns the input of the rank whose target this one is; see Group::permute. All ranks' inputs are
// equal in shape.
Tensor permute_ranks(const Tensor& input, std::span<const int> targets, Group& group = world(),
                     const CollectiveOptions& options = {});
void barrier(Group& group = world(), const CollectiveOptions& options = {});

// Objects are sent as CBOR, which preserves NaN and bytes. FormatError on invalid bytes.
nlohmann::json broadcast_object(const nlohmann::json& object, int root = 0, Group& group = world(),
                                const CollectiveOptions& options = {});
std::vector<nlohmann::json> all_gather_objects(Group& group, const nlohmann::json& object,
                                               const CollectiveOptions& options = {});
// At root: every rank's object; elsewhere empty.
std::vector<nlohmann::json> gather_objects(const nlohmann::json& object, int root = 0,
                                           Group& group = world(),
                                           const CollectiveOptions& options = {});
nlohmann::json scatter_objects(const std::vector<nlohmann::json>& objects, int root = 0,
                               Group& group = world(), const CollectiveOptions& options = {});

// ---- After a failure that does not end the job
// This rank's world group and all existing groups made of it.
std::vector<std::shared_ptr<Group>> groups_of_rank();
// Calls Group::tell() on each channel of each group whose ranks compare their calls, except those
// of send and recv and the channel of `meeting` by which the ranks meet again (kControl).
void tell_groups(Group& meeting, std::span<const std::shared_ptr<Group>> groups,
                 const std::string& reason) noexcept;
// Called when all ranks of `meeting` know that some have left their work: ranks with fewer calls
// catch up, so that the next calls of all match. Collective.
void resume_calls(Group& meeting, std::span<const std::shared_ptr<Group>> groups);

// Whether any rank passes true. Collective.
bool any_rank(bool own, Group& group = world());

// Merges calls: between construction and finish() they are collected; consecutive ones with the
// same operation, dtype, reduction and root are sent as one.
//
//     CoalescedScope calls(group);
//     for (const Tensor& t : tensors) calls.all_reduce(t);
//     calls.finish().wait();
class CoalescedScope {
 public:
  explicit CoalescedScope(Group& group, const CollectiveOptions& options = {});
  ~CoalescedScope();  // unfinished calls are dropped
  CoalescedScope(const CoalescedScope&) = delete;
  CoalescedScope& operator=(const CoalescedScope&) = delete;

  void all_reduce(const Tensor& tensor, ReduceOp op = ReduceOp::kSum);
  void broadcast(const Tensor& tensor, int root);
  // As in Group. Results are in the tensors after finish().wait().
  void all_gather(const Tensor& output, const Tensor& input);
  void reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::kSum);
  Work finish();

 private:
  struct Item;
  Work issue(const Item& item);
  Work issue(std::span<const Item> items, std::vector<std::pair<Tensor, Tensor>>* copy_back);
  Group& group_;
  const CollectiveOptions options_;
  std::vector<Item> items_;
};

// Compares the calls of all ranks of the group since `scope` began, channel by channel and group by
// group, sends and receives separately. DistributedError on every rank names the first difference.
// Collective.
void check_equal_traces(const CommTrace::Scope& scope, Group& group = world());

}  // namespace tessera::distributed
