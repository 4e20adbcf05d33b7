// Deliberate bugs of data_parallel and fully_shard, which tests of training must see. This program
// is linked to a second compile of those sources, with the mistakes of mutant.h in them.
// ctest labels: threads
// ctest mutants: shard
#include <atomic>
#include <chrono>
#include <thread>

#include <tessera/distributed/backward/mutant.h>
#include <tessera/precision/autocast.h>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"
#include "parallel/random_program.h"

namespace tessera::distributed::test_shard_mutants {
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

// Whether three steps of two micro-batches on three ranks end with the parameters of one process:
// under mistakes of all ranks, of one where `alone`, and with transfers that take their time.
bool sharded_training_is_right(Way way, Mutant kind, bool alone = false) {
  constexpr int kRanks = 3, kMicro = 2;
  std::map<std::string, std::vector<float>> expected;
  in_one_process([&] {
    Odd model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      accumulate_in_one_process(model, step * kRanks * kMicro, kRanks * kMicro, kRanks * kMicro);
      optimizer.step();
    }
    expected = whole_values(model);
  });
  std::atomic<bool> right{true};
  try {
    compared_ranks(kRanks,
                   [&](int rank) {
                     manual_seed(3);
                     Odd model;
                     Mesh mesh(world());
                     const auto parallel =
                         shard_in(way, model, mesh, {.average = GradientAverage::kWindow});
                     optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
                     // What is read before it is there is seen: a rank lags behind the others.
                     if (kind == Mutant::kSkipWait || kind == Mutant::kSkipReduceWait) {
                       faults().before_start = [rank](const Call&) {
                         if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                         return true;
                       };
                     }
                     if (!alone || rank == 1) mutant = kind;
                     for (int step = 0; step < 3; ++step) {
                       for (int k = 0; k < kMicro; ++k) {
                         StepPlan plan = StepPlan::of(k, kMicro);
                         plan.sync_gradients = true;
                         parallel->set_plan(plan);
                         loss_of(model, (step * kMicro + k) * kRanks + rank).backward();
                       }
                       optimizer.step();
                       optimizer.zero_grad();
                     }
                     mutant = Mutant::kNone;
                     if (whole_values(model) != expected) right = false;
                   },
                   {.timeout_seconds = 10, .decorate = with_faults()});
  } catch (const Error&) {
    right = false;
  }
  return right;
}

// Whether units are asked for in the order in which they are used: a gather for each of a forward
// and a backward, and none of what is not used.
bool units_are_asked_for_in_order(Mutant kind) {
  std::atomic<bool> right{true};
  compared_ranks(2, [&](int rank) {
    mutant = kind;
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    loss_of(model, rank).backward();
    const CommTrace::Scope scope(*rank_context().trace);
    loss_of(model, rank).backward();
    const std::vector<std::string> expected{"G unit first", "G unit second", "G unit third",
                                            "G unit third", "G unit second", "R unit third",
                                            "G unit first", "R unit second", "R unit first"};
    if (unit_events(scope.records()) != expected) right = false;
  });
  return right;
}

// Whether a graph refuses values that came after it.
bool newer_values_are_refused(Mutant kind) {
  std::atomic<bool> right{false};
  compared_ranks(2, [&](int rank) {
    mutant = kind;
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    loss_of(model, rank).backward();
    const Tensor loss = loss_of(model, rank);
    optimizer.step();
    try {
      loss.backward();
    } catch (const AutogradError&) {
      right = true;
    }
  });
  return right;
}

struct TwoDeep : nn::Module<TwoDeep> {
  TwoDeep() : net(add<Net>("net")) {}
  Tensor forward(const Tensor& x) { return net(x) * 1.0; }
  Net& net;
};

// Whether a unit of several layers has its weights until its backward has ended.
bool units_stay_for_their_backward(Mutant kind) {
  std::atomic<bool> right{true};
  compared_ranks(2, [&](int rank) {
    mutant = kind;
    TwoDeep model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    try {
      loss_of(model, rank).backward();
    } catch (const AutogradError&) {
      right = false;
    }
  });
  return right;
}

TEST(ShardMutants, OfShardsAreSeen) {
  for (const Way way : {Way::kZero2, Way::kFully, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    EXPECT_TRUE(sharded_training_is_right(way, Mutant::kNone));
    EXPECT_FALSE(sharded_training_is_right(way, Mutant::kForgetSums));
    EXPECT_FALSE(sharded_training_is_right(way, Mutant::kWrongDivide));
  }
  EXPECT_FALSE(sharded_training_is_right(Way::kZero2, Mutant::kWrongOwner));
  EXPECT_FALSE(sharded_training_is_right(Way::kFully, Mutant::kPaddingCounted));
  EXPECT_TRUE(units_stay_for_their_backward(Mutant::kNone));
  EXPECT_FALSE(units_stay_for_their_backward(Mutant::kFreeEarly));
  EXPECT_FALSE(sharded_training_is_right(Way::kFully, Mutant::kLaunchOutOfOrder, true));
  EXPECT_TRUE(units_are_asked_for_in_order(Mutant::kNone));
  EXPECT_FALSE(units_are_asked_for_in_order(Mutant::kPrefetchWrong));
  EXPECT_TRUE(newer_values_are_refused(Mutant::kNone));
  EXPECT_FALSE(newer_values_are_refused(Mutant::kStaleGather));
}

struct Bytes : nn::Module<Bytes> {
  Bytes()
      : first(add<nn::Linear>("first", 8, 32)),
        second(add<nn::Linear>("second", 32, 48)),
        third(add<nn::Linear>("third", 48, 16)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))).to(kF32); }
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& third;
};

// Whether weights that travel in fp8 end as those of replicas do.
bool fp8_travels_rightly(precision::Fp8Scaling recipe, Mutant kind) {
  std::vector<std::map<std::string, std::vector<float>>> ends(2);
  std::atomic<bool> right{true};
  for (const Way way : {Way::kReplicate, Way::kZero3}) {
    try {
      compared_ranks(2, [&](int rank) {
        manual_seed(3);
        mutant = kind;
        Bytes model;
        Mesh mesh(world());
        const auto applied = precision::apply(
            model,
            precision::Policy::fp8({.scaling = recipe, .filter = precision::Fp8Filter::kAll}));
        applied.fp8()->set_reduction(
            [](const Tensor& maxima) { world().all_reduce(maxima, ReduceOp::kMax).wait(); });
        const auto parallel = shard_in(way, model, mesh);
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
        for (int step = 0; step < 4; ++step) {
          loss_of(model, 2 * step + rank, 16).backward();
          applied.fp8()->update();
          optimizer.step();
          optimizer.zero_grad();
        }
        mutant = Mutant::kNone;
        const auto values = whole_values(model);
        if (rank == 0) ends[way == Way::kZero3] = values;
      });
    } catch (const DistributedError&) {
      right = false;
    }
  }
  return right && ends[0] == ends[1];
}

TEST(ShardMutants, OfFp8AreSeen) {
  using precision::Fp8Scaling;
  for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    EXPECT_TRUE(fp8_travels_rightly(recipe, Mutant::kNone));
    EXPECT_FALSE(fp8_travels_rightly(recipe, Mutant::kStaleBytes));
  }
  EXPECT_FALSE(fp8_travels_rightly(Fp8Scaling::kTensorwise, Mutant::kOwnMaxima));
}

// ---- Models whose layers ranks calculate together -----------------------------------------------

// How many random programs in which a bug could show are right under it.
struct Seen {
  int right = 0, wrong = 0;
};
Seen programs_are_right(Mutant kind, const std::function<bool(const tests::ProgramSpec&)>& concerns,
                        bool by_zero = false) {
  constexpr int kPrograms = 6;
  Seen seen;
  for (uint64_t seed = 1; seen.right + seen.wrong < kPrograms; ++seed) {
    const tests::ProgramSpec spec = tests::program_of(tests::random_numbers(seed));
    const bool whole = spec.vocabulary % spec.tp == 0;  // zero cuts parts of one size
    if (spec.ranks() > 4 || (by_zero && !whole) || !concerns(spec)) continue;
    const tests::Outcome expected = tests::run_alone(spec);
    if (spec.exact && !expected.is_exact()) continue;
    tests::Changes changes{.table = [&](tests::Program&) { mutant = kind; }};
    if (by_zero) {
      changes.sharded = [](nn::ModuleBase& model, Mesh& data) { zero(model, data, {.stage = 1}); };
    }
    const bool right = tests::difference(spec, tests::run_divided(spec, changes), expected).empty();
    ++(right ? seen.right : seen.wrong);
  }
  return seen;
}

TEST(ShardMutants, OfTensorParallelismAreSeen) {
  using tests::PartSpec;
  using tests::ProgramSpec;
  const auto sharded = [](const ProgramSpec& spec) { return spec.dp == 2; };
  const auto has_blocks = [](const ProgramSpec& spec) {
    return std::ranges::any_of(spec.parts, [](const PartSpec& part) { return part.blocks > 1; });
  };
  const auto has_layers = [](const ProgramSpec& spec) {
    return spec.dp == 2 && std::ranges::any_of(spec.parts, [](const PartSpec& part) {
             return part.divided &&
                    (part.kind == PartSpec::Kind::kMlp || part.kind == PartSpec::Kind::kAttention);
           });
  };
  const auto has_copies = [](const ProgramSpec& spec) {
    return spec.sequence && spec.learned_positions;
  };
  const auto alone = [&](const ProgramSpec& spec) { return spec.dp == 1 && has_copies(spec); };
  for (const bool by_zero : {false, true}) {
    SCOPED_TRACE(by_zero ? "zero" : "fsdp");
    const Seen none = programs_are_right(Mutant::kNone, sharded, by_zero);
    EXPECT_EQ(none.wrong, 0);
    EXPECT_EQ(programs_are_right(Mutant::kWrongDivide, sharded, by_zero).right, 0);
  }
  EXPECT_GT(programs_are_right(Mutant::kWrongOwner, has_layers, true).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kOneBlock, has_blocks).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kNoSummands, alone).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kCopiesTwice, alone).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kStridedAsShard, has_layers).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kPaddingCounted, sharded).wrong, 0);
  EXPECT_GT(programs_are_right(Mutant::kFlatOfWhole, has_layers, true).wrong, 0);
}

#if !defined(__SANITIZE_THREAD__)  // which sees them itself, and has the program fail
TEST(ShardMutants, ReadsOfWhatIsUnderWayAreSeen) {
  for (const Way way : {Way::kZero2, Way::kFully, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    EXPECT_FALSE(sharded_training_is_right(way, Mutant::kSkipWait));
    EXPECT_FALSE(sharded_training_is_right(way, Mutant::kSkipReduceWait));
  }
}
#endif

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
}  // namespace tessera::distributed::test_shard_mutants
