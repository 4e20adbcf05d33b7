// Ranks with different numbers of batches.
//
//     Join join = replica.join();
//     for (auto& batch : loader) {  // this rank's batches, as many as there are
//       model(batch.inputs, batch.targets).loss.backward();
//       optimizer.step(), optimizer.zero_grad();
//     }
//     join.finish();
//
// Each forward in training mode begins with one small reduction that counts the ranks still at
// work. A rank that calls finish() answers all further collectives of the model (buffers,
// gradients, used map, order of buckets) with zeros until no rank is at work. Then the rank that
// worked longest sends its parameters and buffers to all, so they are equal again. Optimizer states
// do not change. A step's last micro-batch must synchronize. Other collectives inside forward or
// backward (synchronized batch norm, sharded layers) are not answered: use throw_on_early_end with
// them.
#pragma once

#include <cstdint>
#include <memory>

namespace tessera::distributed {

// The divisor of a sum of gradients after the first rank has ended.
enum class JoinDivide : uint8_t {
  kActiveRanks,  // the ranks that brought a batch
  kAllRanks,     // the size of the group, as before: late batches weigh less
};

struct JoinOptions {
  JoinDivide divide = JoinDivide::kActiveRanks;
  // As soon as one rank has ended, every rank throws DistributedError in the same step.
  bool throw_on_early_end = false;
};

class JoinState;

class [[nodiscard]] Join {
 public:
  explicit Join(std::shared_ptr<JoinState> state) : state_(std::move(state)) {}
  Join(Join&&) noexcept = default;
  Join& operator=(Join&&) noexcept = default;
  // Leaves the scope without waiting for the others (when an exception passes).
  ~Join();

  // Collective. Throws ValueError if gradients of this rank were not reduced yet, DistributedError
  // in throw_on_early_end mode if another rank still works.
  void finish();

 private:
  std::shared_ptr<JoinState> state_;
};

}  // namespace tessera::distributed
