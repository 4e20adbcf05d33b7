// Deliberate bugs of distributed/shard, which tests of training must see. This program is linked to
// a second compile of those sources, with the mistakes of mutant.h in them.
// ctest labels: threads
// ctest mutants: shard
#include <atomic>

#include <tessera/distributed/shard/mutant.h>

#include "replicate_fixture.h"

namespace tessera::distributed {
namespace {

// Whether two ranks end with the gradients of one process, under a deliberate bug of both or, where
// it concerns the order, of rank 1.
bool trains_rightly(Mutant kind) {
  Gradients expected;
  {
    Context context;
    const ContextGuard guard(context);
    manual_seed(3);
    Net net;
    expected = accumulate_in_one_process(net, 0, 2, 2);
  }
  std::atomic<bool> right{true};
  try {
    compared_ranks(2, [&](int rank) {
      manual_seed(3);
      Net net;
      Mesh mesh(world());
      ReplicateOptions options;
      options.first_bucket_bytes = options.bucket_bytes = 1;
      const Replica replica = replicate(net, mesh, options);
      if (rank == 1 || kind != Mutant::kLaunchOutOfOrder) mutant = kind;
      loss_of(net, rank).backward();
      if (gradients_of(net).values != expected.values) right = false;
    });
  } catch (const DistributedError&) {
    right = false;
  }
  return right;
}

// Three steps in which the ranks take the layers in orders of their own, and of which rank 1 leaves
// out some layers in the last (buckets are made anew before the second): whether both end with the
// gradients of one process.
bool control_flow_trains_rightly(Mutant kind) {
  constexpr unsigned kSwapped[] = {0, 0xf};  // of each rank
  constexpr int kLast = 2;
  const auto loss = [&](Pairs& model, int step, int rank) {
    const RandomStream stream{static_cast<uint64_t>(step), static_cast<uint64_t>(rank)};
    return model(randn({2, 8}, {}, stream), kSwapped[rank], step == kLast && rank == 1 ? 0x5 : 0)
        .sum();
  };
  Gradients expected;
  {
    Context context;
    const ContextGuard guard(context);
    manual_seed(3);
    Pairs model;
    for (int rank = 0; rank < 2; ++rank) loss(model, kLast, rank).backward();
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) mul_(parameter.grad(), 0.5);
    expected = gradients_of(model);
  }
  std::atomic<bool> right{true};
  try {
    compared_ranks(2, [&](int rank) {
      manual_seed(static_cast<uint64_t>(3 + rank));
      mutant = kind;
      Pairs model;
      Mesh mesh(world());
      ReplicateOptions options;
      options.first_bucket_bytes = 300, options.bucket_bytes = 600;
      const Replica replica = replicate(model, mesh, options);
      for (int step = 0; step <= kLast; ++step) {
        model.zero_grad();
        loss(model, step, rank).backward();
      }
      if (gradients_of(model).values != expected.values) right = false;
    });
  } catch (const DistributedError&) {
    right = false;
  }
  return right;
}

struct Shifted : nn::Module<Shifted> {
  Shifted() : linear(add<nn::Linear>("linear", 8, 2)), shift(buffer("shift", zeros({2}))) {}
  Tensor forward(const Tensor& x) { return linear(x) + shift; }
  nn::Linear& linear;
  Tensor shift;
};

// Whether a forward begins with rank 0's buffers, and a backward under no_sync reduces nothing.
bool buffers_and_local_steps_are_right(Mutant kind) {
  std::atomic<bool> right{true};
  compared_ranks(2, [&](int rank) {
    mutant = kind;
    Shifted model;
    Mesh mesh(world());
    Replica replica = replicate(model, mesh);
    fill_(model.shift, rank + 1.0);
    loss_of(model, rank).backward();
    if (model.shift.to_vector()[0] != 1) right = false;
    model.zero_grad();
    const int64_t before = gradient_collectives();
    {
      const NoSync local = replica.no_sync();
      loss_of(model, rank).backward();
    }
    if (gradient_collectives() != before) right = false;
  });
  return right;
}

TEST(ShardMutants, OfReplicasAreSeen) {
  EXPECT_TRUE(trains_rightly(Mutant::kNone));
  EXPECT_FALSE(trains_rightly(Mutant::kWrongDivide));
  EXPECT_FALSE(trains_rightly(Mutant::kLaunchOutOfOrder));

  EXPECT_TRUE(control_flow_trains_rightly(Mutant::kNone));
  EXPECT_FALSE(control_flow_trains_rightly(Mutant::kOwnBucketOrder));
  EXPECT_FALSE(control_flow_trains_rightly(Mutant::kStaleBucket));
  EXPECT_FALSE(control_flow_trains_rightly(Mutant::kOwnUsedMap));
  EXPECT_FALSE(control_flow_trains_rightly(Mutant::kSkipInitSync));

  EXPECT_TRUE(buffers_and_local_steps_are_right(Mutant::kNone));
  EXPECT_FALSE(buffers_and_local_steps_are_right(Mutant::kSkipBuffers));
  EXPECT_FALSE(buffers_and_local_steps_are_right(Mutant::kReduceAlways));
}

}  // namespace
}  // namespace tessera::distributed
