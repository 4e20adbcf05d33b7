#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/data_parallel/join_state.h>

namespace tessera::distributed {

Join::~Join() {
  if (state_) state_->close();
}

void Join::finish() {
  TS_CHECK(state_ && state_->open(), "Join::finish", "the scope has ended; begin another one");
  state_->finish();
}

void JoinState::close() {
  open_ = false;
  pass_->active_ranks = 0;
  pass_->divides_each = false;
}

// One reduction that ranks at work and ranks that ended issue alike.
JoinState::Poll JoinState::poll(bool active) {
  const Tensor message = raw::zeros({3}, kI64);
  int64_t* values = message.data_as<int64_t>();
  if (active) {
    values[0] = 1;
    values[1] = pass_->plan.sync_gradients;
    values[2] = pass_->plan.micro_index;
  }
  Group& ranks = pass_->ranks();
  ranks.all_reduce(message, ReduceOp::kSum, {.channel = Channel::kControl, .tag = "join"}).wait();
  const int64_t count = values[0];
  if (options_.throw_on_early_end && count > 0 && count < ranks.size()) {
    close();
    TS_THROW(DistributedError, "join", "rank ", ranks.rank(), active ? " works" : " has ended",
             " while ", count, " of ", ranks.size(),
             " ranks have a batch; give all ranks equally many, or join without "
             "throw_on_early_end");
  }
  return {static_cast<int>(count), count > 0 && values[1] > 0, count > 0 ? values[2] / count : 0};
}

void JoinState::before_forward() {
  const Poll poll = this->poll(true);
  ++forwards_;
  pass_->active_ranks = options_.divide == JoinDivide::kActiveRanks ? poll.active : 0;
}

void JoinState::finish() {
  TS_CHECK(!pass_->holds_unreduced(), "Join::finish",
           "gradients of this rank were never reduced: its last backward ran under no_sync(); "
           "synchronise in the last micro-batch");
  for (const ManagedParam& param : pass_->params()) param.tensor.zero_grad();
  const StepPlan own_plan = pass_->plan;
  for (;;) {
    const Poll poll = this->poll(false);
    if (poll.active == 0) break;
    if (!poll.synchronises) continue;
    synchronise_buffers_();
    pass_->plan.micro_index = poll.micro_index;
    pass_->active_ranks = options_.divide == JoinDivide::kActiveRanks ? poll.active : 0;
    pass_->shadow_backward();
  }
  pass_->plan = own_plan;
  synchronise_all_(last_at_work());
  close();
}

// The rank with the most batches; of several the first.
int JoinState::last_at_work() {
  Group& ranks = pass_->ranks();
  const int64_t size = ranks.size();
  const Tensor message = raw::zeros({1}, kI64);
  int64_t& value = message.data_as<int64_t>()[0];
  value = forwards_ * size + (size - 1 - ranks.rank());
  ranks.all_reduce(message, ReduceOp::kMax, {.channel = Channel::kControl, .tag = "join_last"})
      .wait();
  return static_cast<int>(size - 1 - value % size);
}

}  // namespace tessera::distributed
