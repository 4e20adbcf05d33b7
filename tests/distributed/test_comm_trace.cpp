// What groups keep of their calls: records, their comparison, counts without data.
// ctest labels: threads
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_comm_trace {
namespace {

CommRecord numbered(int64_t sequence, int ranks = 2) {
  CommRecord record;
  record.group = "world";
  record.group_size = ranks;
  record.sequence = sequence;
  return record;
}

TEST(Mistakes, DifferentOrdersAreSeenByTheTraces) {
  failing_ranks("a trace is made to differ", 2, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    const auto sub = world().split(rank);  // groups of one issue nothing
    all_reduce(zeros({2}));
    check_equal_traces(scope);
    // A rank that records something that the other does not.
    if (rank == 1) world().trace().add(numbered(9));
    const std::string message = message_of([&] { check_equal_traces(scope); });
    EXPECT_NE(
        message.find("on 'world user' rank 0 called nothing more where rank 1 called barrier #9"),
        std::string::npos)
        << message;
  });
}

TEST(Mistakes, ARankThatCalledNothingIsSeenByTheTraces) {
  failing_ranks("a trace is made to differ", 3, [](int rank) {
    const CommTrace::Scope scope(world().trace());
    const auto pair = world().split(rank < 2 ? 0 : -1);
    if (pair) all_reduce(zeros({2}), ReduceOp::kSum, *pair);
    check_equal_traces(scope);  // who is not in a group need not call
    if (rank == 1) world().trace().add(numbered(1, 3));
    const std::string message = message_of([&] { check_equal_traces(scope); });
    EXPECT_NE(message.find("on 'world user' rank 1 called barrier #1 where 2 of 3 ranks called "
                           "nothing"),
              std::string::npos)
        << message;
  });
}

TEST(Trace, RecordsSayWhatWasCalledWhereAndFor) {
  compared_ranks(2, [](int) {
    const PhaseScope phase("backward");
    const CommTrace::Scope scope(world().trace());
    all_reduce(zeros({1000}), ReduceOp::kMean, world(),
               {.channel = Channel::kGradient, .tag = "bucket 3"});
    world().all_gather(zeros({8}), zeros({4})).wait();
    const auto records = scope.records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].describe(), "all_reduce #1 (mean, f32[1000]) 'bucket 3'");
    EXPECT_EQ(records[0].phase, "backward");
    EXPECT_EQ(records[0].bytes, 4000);
    EXPECT_EQ(records[0].wire_bytes(), 4000);  // 2 (N - 1) / N
    EXPECT_EQ(records[1].wire_bytes(), 16);
    EXPECT_TRUE(records[0].place().starts_with("test_comm_trace.cpp:")) << records[0].place();
    EXPECT_EQ(records[0].state, CommRecord::State::kDone);
    EXPECT_GE(records[0].done, records[0].queued);
    EXPECT_EQ(count(records, Operation::kAllReduce, Channel::kGradient), 1);
    EXPECT_EQ(bytes(records, Operation::kAllReduce), 4000);
  });
}

// What is counted of records: by operation, by channel, and how much of their time nobody waited.
TEST(Trace, RecordsAreCountedByOperationAndChannel) {
  const auto record = [](Operation operation, Channel channel, int64_t bytes, double queued,
                         double done, double wait_begin, double wait_end) {
    CommRecord made;
    made.operation = operation, made.channel = channel, made.bytes = bytes, made.queued = queued;
    made.done = done, made.wait_begin = wait_begin, made.wait_end = wait_end;
    return made;
  };
  const auto sum = Operation::kAllReduce, copy = Operation::kBroadcast;
  const auto gradient = Channel::kGradient, control = Channel::kControl;
  const std::vector<CommRecord> records = {
      record(sum, control, 3, 0, 100, 0, 100),     // of another channel
      record(sum, gradient, 5, 0, -1, -1, -1),     // under way
      record(copy, gradient, 7, 0, 4, 3, 4),       // a quarter of it was waited for
      record(sum, gradient, 11, 10, 14, -1, -1),   // nobody waited
      record(sum, gradient, 13, 20, 24, 30, 31),   // waited for when it was done
      record(sum, gradient, 17, 40, 44, 42, 50)};  // half of it
  EXPECT_EQ(count(records, sum), 5);
  EXPECT_EQ(count(records, copy), 1);
  EXPECT_EQ(count(records, sum, gradient), 4);
  EXPECT_EQ(count(records, copy, control), 0);
  EXPECT_EQ(bytes(records, sum), 3 + 5 + 11 + 13 + 17);
  EXPECT_EQ(bytes(records, copy), 7);
  EXPECT_DOUBLE_EQ(hidden_share(records, gradient), 1 - 3.0 / 16);
  EXPECT_EQ(hidden_share(records, control), 0);
  EXPECT_EQ(hidden_share(records, Channel::kParameter), 1);
  EXPECT_EQ(hidden_share({}, gradient), 1);
}

TEST(Trace, SecondsAreWholeWhereTheyAreMany) {
  EXPECT_EQ(describe_seconds(0.20345), "0.203 s");
  EXPECT_EQ(describe_seconds(30), "30 s");
  EXPECT_EQ(describe_seconds(99.94), "99.9 s");
  EXPECT_EQ(describe_seconds(100), "100 s");
  EXPECT_EQ(describe_seconds(1800.4), "1800 s");
}

TEST(Trace, TheRingForgetsTheOldestUnlessAScopeIsOpen) {
  CommTrace trace(4);
  for (int i = 1; i <= 10; ++i) trace.add(numbered(i));
  EXPECT_EQ(trace.records().size(), 4u);
  EXPECT_EQ(trace.records().front().sequence, 7);
  trace.finish(0, false, 1.0);  // of one that is gone
  {
    const CommTrace::Scope scope(trace);
    for (int i = 11; i <= 20; ++i) trace.add(numbered(i));
    EXPECT_EQ(scope.records().size(), 10u);
  }
  EXPECT_EQ(trace.records().size(), 4u);
}

TEST(Fake, CountsAtAThousandRanksWithoutData) {
  Context own;
  const ContextGuard guard(own);
  RankContext& context = rank_context();
  std::vector<int> ranks(1024);
  for (int r = 0; r < 1024; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto group = std::make_shared<Group>("world", make_fake_backend(5, 1024), ranks);
  const CommTrace::Scope scope(*context.trace);
  const Tensor parameter = empty({8192, 8192}, {kBF16, kMeta});
  group->all_reduce(parameter).wait();
  const Tensor shard = empty({8, 8192}, {kBF16, kMeta});
  group->all_gather(parameter, shard).wait();
  const Tensor other = empty({8, 8192}, {kBF16, kMeta});
  group->exchange({{6, shard}, {4, shard}}, {{4, other}}).wait();
  const auto records = scope.records();
  EXPECT_EQ(records[0].bytes, int64_t{2} * 8192 * 8192);
  EXPECT_EQ(records[0].wire_bytes(), 2.0 * 1023 / 1024 * 2 * 8192 * 8192);
  EXPECT_EQ(records[1].wire_bytes(), 1023.0 * 2 * 8 * 8192);
  ASSERT_EQ(records.size(), 5u);
  EXPECT_EQ(records[2].operation, Operation::kSend);
  EXPECT_EQ(records[2].root, 6);
  EXPECT_EQ(records[4].operation, Operation::kRecv);
  EXPECT_EQ(records[4].bytes, int64_t{2} * 8 * 8192);
  const std::vector<int> row = {4, 5, 6, 7};
  EXPECT_EQ(group->subgroup(row)->rank(), 1);
}

}  // namespace
}  // namespace tessera::distributed::test_comm_trace
