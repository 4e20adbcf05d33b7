// Bytes of sharded training by category: what stays, what comes and goes, and that delays change
// nothing of it. And the dtypes in which parameters and gradients travel and lie.
// ctest labels: threads
// ctest ranks: 2
#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_fully_shard_memory {
namespace {

// Blocks of one size, and a weight of the root; rows that do not divide by three.
constexpr int kBlocks = 4, kWidth = 40;
struct Blocks : nn::Module<Blocks> {
  Blocks() : in(parameter("in", full({kWidth, 8}, 0.1))) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(&add<nn::Linear>("h" + std::to_string(i), kWidth, kWidth));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor y = matmul(x, in.t());
    for (nn::Linear* block : blocks) y = tanh((*block)(y));
    return y;
  }
  const Tensor& in;
  std::vector<nn::Linear*> blocks;
};

int64_t bytes_of(MemoryCategory category) { return memory_stats()->current(category); }
int64_t peak_of(MemoryCategory category) { return memory_stats()->peak(category); }

struct Sizes {
  int64_t parts = 0, block = 0, root = 0;  // bytes: of this rank's parts; of whole units, padded
};
Sizes sizes_of(const ShardedModel& model) {
  Sizes sizes;
  for (const UnitReport& unit : model.report()) {
    sizes.parts += unit.part_bytes;
    (unit.name.empty() ? sizes.root : sizes.block) = unit.whole_bytes;
  }
  return sizes;
}
// Wholes lie one behind the other at cache lines.
constexpr int64_t kSlack = 2 * 64;

TEST(FullyShardMemory, WhatStaysIsThePartsAlone) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    for (const int size : {2, 3}) {
      on_ranks(size, [&](int rank) {
        const int64_t before = bytes_of(MemoryCategory::kParameter);
        Blocks model;
        const int64_t whole = bytes_of(MemoryCategory::kParameter) - before;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        const auto& sharded = dynamic_cast<const ShardedModel&>(*parallel);
        int64_t parts = 0, wholes = 0;
        for (const UnitReport& unit : sharded.report()) {
          parts += unit.part_bytes;
          wholes += unit.whole_bytes;
        }
        const bool keeps = way == Way::kZero1 || way == Way::kZero2;
        EXPECT_GT(whole, 0);
        EXPECT_GE(wholes, whole);
        EXPECT_LT(wholes, whole + whole / 10);
        EXPECT_EQ(bytes_of(MemoryCategory::kParameter) - before, keeps ? wholes : parts);
        EXPECT_EQ(bytes_of(MemoryCategory::kUnsharded), 0);
        const int64_t homes = way == Way::kZero1 ? wholes : 0;  // gradients add up where they lie
        EXPECT_EQ(bytes_of(MemoryCategory::kGradient), homes);
        optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
        for (int step = 0; step < 2; ++step) {
          loss_of(model, rank).backward();
          EXPECT_EQ(bytes_of(MemoryCategory::kGradient), homes > 0 ? homes : parts);
          EXPECT_EQ(bytes_of(MemoryCategory::kUnsharded), 0);
          EXPECT_EQ(bytes_of(MemoryCategory::kCommunication), 0);
          optimizer.step();
          // Two states, of what is there and not of padding.
          EXPECT_LE(bytes_of(MemoryCategory::kOptimizer), 2 * parts);
          optimizer.zero_grad();
          EXPECT_EQ(bytes_of(MemoryCategory::kGradient), homes);
        }
      });
    }
  }
}

// Forward: the root, this block and the one that is on its way. Backward: these, the gradients of
// this block, and of the one before it what travels.
TEST(FullyShardMemory, AFewUnitsAreWholeAtATime) {
  for (const int size : {2, 3}) {
    on_ranks(size, [&](int rank) {
      Blocks model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      const Sizes sizes = sizes_of(dynamic_cast<const ShardedModel&>(*parallel));
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        memory_stats()->reset_peak();
        const Tensor loss = loss_of(model, rank);
        EXPECT_LE(peak_of(MemoryCategory::kUnsharded), sizes.root + 2 * sizes.block + kSlack);
        EXPECT_EQ(peak_of(MemoryCategory::kGradient), 0);
        EXPECT_EQ(peak_of(MemoryCategory::kCommunication), 0);
        memory_stats()->reset_peak();
        loss.backward();
        EXPECT_LE(peak_of(MemoryCategory::kUnsharded), sizes.root + 2 * sizes.block + kSlack);
        EXPECT_LE(peak_of(MemoryCategory::kGradient), sizes.parts + sizes.block + sizes.root);
        EXPECT_LE(peak_of(MemoryCategory::kCommunication), sizes.block);
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

// Blocks of several weights, beside which activations are little.
constexpr int kWide = 160;
struct Mlps : nn::Module<Mlps> {
  struct Block : nn::Module<Block> {
    Block()
        : up(add<nn::Linear>("up", kWide, 4 * kWide)),
          down(add<nn::Linear>("down", 4 * kWide, kWide)) {}
    Tensor forward(const Tensor& x) { return x + down(relu(up(x))); }
    nn::Linear& up;
    nn::Linear& down;
  };
  Mlps() : in(parameter("in", full({kWide, 8}, 0.1))) {
    for (int i = 0; i < kBlocks; ++i) blocks.push_back(&add<Block>("h" + std::to_string(i)));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = matmul(x, in.t());
    for (Block* block : blocks) y = (*block)(y);
    return y;
  }
  const Tensor& in;
  std::vector<Block*> blocks;
};

// Everything that has memory: parts, their gradients, three blocks and the root. What travels of
// the block behind has ended when the weights of the one ahead come.
TEST(FullyShardMemory, BackwardHasMemoryOfThreeBlocks) {
  for (const int size : {2, 3}) {
    on_ranks(size, [&](int rank) {
      const int64_t before = memory_stats()->current();
      Mlps model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      const Sizes sizes = sizes_of(dynamic_cast<const ShardedModel&>(*parallel));
      // The sums of the first backward are all there in the second.
      loss_of(model, rank).backward();
      const Tensor loss = loss_of(model, rank);
      // And gradients of them, on their way.
      const int64_t activations = 2 * bytes_of(MemoryCategory::kActivation);
      EXPECT_LT(activations, sizes.block / 2);
      memory_stats()->reset_peak();
      loss.backward();
      EXPECT_LE(memory_stats()->peak() - before,
                2 * sizes.parts + 3 * sizes.block + sizes.root + activations + kSlack);
    });
  }
}

// Its weights' gradients come in the reverse of their order.
struct Weighted : nn::Module<Weighted> {
  explicit Weighted(const std::vector<int64_t>& sizes) {
    for (const int64_t size : sizes) {
      weights.push_back(&parameter("w" + std::to_string(weights.size()),
                                   tessera::full({size}, 1 / static_cast<double>(size))));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (const Tensor* weight : weights) {
      const Tensor factor = weight->sum();
      if (factor.requires_grad()) {
        register_hook(factor, [this](const Tensor&) {
          before_gradient();
          return Tensor();
        });
      }
      y = y * factor;
    }
    return y;
  }
  std::vector<const Tensor*> weights;
  std::function<void()> before_gradient = [] {};
};
struct WeightedPair : nn::Module<WeightedPair> {
  explicit WeightedPair(const std::vector<int64_t>& sizes)
      : l0(add<nn::Linear>("l0", 8, 8)), l1(add<Weighted>("l1", sizes)) {}
  Tensor forward(const Tensor& x) { return l1(l0(x)); }
  nn::Linear& l0;
  Weighted& l1;
};

// see [Note: three units]
TEST(FullyShardMemory, BackwardAsksForTheNextUnitWhenAQuarterOfTheElementsHasGradients) {
  const struct {
    std::vector<int64_t> sizes;
    int gradients;    // that have come when the next unit's weights are asked for
    int frozen = -1;  // the place of a weight that gets none
  } rows[] = {
      {{8, 8, 8, 8}, 1},
      {{8, 8, 8, 8, 8}, 2},
      {{8, 8, 8, 8, 8, 8, 8, 8}, 2},
      {{16, 4, 4, 8}, 1},
      {{16, 8, 4, 4}, 2},
      {{24, 8}, 1},
      {{8, 24}, 1},
      {{24, 4, 4}, 2},
      // One weight is more than three quarters: at once.
      {{25, 8}, 0},
      {{8, 25}, 0},
      {{8}, 0},
      {{8, 8, 64, 8, 8}, 1, 2},
      {{8, 8, 8, 8, 8, 8, 8, 8, 64}, 2, 8},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(::testing::PrintToString(row.sizes));
    on_ranks(2, [&](int rank) {
      WeightedPair model(row.sizes);
      if (row.frozen >= 0) {
        model.l1.weights[static_cast<size_t>(row.frozen)]->set_requires_grad(false);
      }
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const CommTrace::Scope scope(*rank_context().trace);
        const auto gathers = [&] {
          return std::ranges::count(unit_events(scope.records()), "G unit l0");
        };
        int gradients = 0;
        const Tensor loss = loss_of(model, rank);
        const auto before = gathers();
        model.l1.before_gradient = [&] { gradients += gathers() == before ? 1 : 0; };
        loss.backward();
        EXPECT_EQ(gradients, row.gradients);
        EXPECT_EQ(gathers(), before + 1);
      }
    });
  }
}

TEST(FullyShardMemory, KeptUnitsCostTheModelAndOneBlockOnItsWay) {
  on_ranks(2, [&](int rank) {
    Blocks model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFullyKept, model, mesh);
    const Sizes sizes = sizes_of(dynamic_cast<const ShardedModel&>(*parallel));
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      memory_stats()->reset_peak();
      loss_of(model, rank).backward();
      EXPECT_LE(peak_of(MemoryCategory::kUnsharded),
                sizes.root + (kBlocks + 1) * sizes.block + kSlack);
    }
  });
}

TEST(FullyShardMemory, ZeroHoldsOneBucketOnItsWay) {
  on_ranks(2, [&](int rank) {
    Blocks model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero2, model, mesh);
    const auto& sharded = dynamic_cast<const ShardedModel&>(*parallel);
    int64_t largest = 0;
    for (const ParamGroup* part : sharded.schedule().parts()) {
      largest = std::max(largest, part->reduced_bytes());
    }
    loss_of(model, rank).backward();
    model.zero_grad();
    memory_stats()->reset_peak();
    loss_of(model, rank).backward();
    EXPECT_LE(peak_of(MemoryCategory::kCommunication), largest);
    EXPECT_EQ(peak_of(MemoryCategory::kUnsharded), 0);
  });
}

// Peaks and bits follow from the order of the calls and not from when they end.
TEST(FullyShardMemory, DelaysChangeNoPeakAndNoBit) {
  NEEDS_THREADS;
  std::vector<int64_t> expected;
  std::map<std::string, std::vector<float>> expected_gradients;
  for (unsigned run = 0; run < 10; ++run) {
    SCOPED_TRACE(run);
    compared_ranks(3,
                   [&](int rank) {
                     auto random =
                         std::make_shared<std::mt19937>(run * 3 + static_cast<unsigned>(rank));
                     if (run > 0) {
                       faults().before_start = [random](const Call&) {
                         std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 1000));
                         return true;
                       };
                     }
                     Blocks model;
                     Mesh mesh(world());
                     const auto parallel = shard_in(Way::kFully, model, mesh);
                     loss_of(model, rank).backward();
                     model.zero_grad();
                     memory_stats()->reset_peak();
                     loss_of(model, rank).backward();
                     std::vector<int64_t> peaks{memory_stats()->peak()};
                     for (const MemoryCategory category :
                          {MemoryCategory::kUnsharded, MemoryCategory::kGradient,
                           MemoryCategory::kCommunication, MemoryCategory::kActivation}) {
                       peaks.push_back(peak_of(category));
                     }
                     const auto gradients = whole_gradients(model);
                     if (run == 0 && rank == 0) {
                       expected = peaks;
                       expected_gradients = gradients;
                     }
                     world().barrier();
                     EXPECT_EQ(gradients, expected_gradients);
                     if (rank == 0) {
                       EXPECT_EQ(peaks, expected);
                     }
                     faults().before_start = {};
                   },
                   {.decorate = with_faults()});
  }
}

// ---- Mixed precision ---------------------------------------------------------------------------

// Two layers whose dtypes show: of inputs, of weights, of outputs.
struct Typed : nn::Module<Typed> {
  Typed() : first(add<nn::Linear>("first", 8, 6)), second(add<nn::Linear>("second", 6, 5)) {}
  Tensor forward(const Tensor& x) {
    seen = {x.dtype()};
    const Tensor h = relu(first(x));
    seen.push_back(h.dtype());
    return second(h);
  }
  std::vector<DType> seen;
  nn::Linear& first;
  nn::Linear& second;
};

// Of one process with a copy of the weights in bf16: contributions of batches 0.. in rank order,
// rounded as they travel.
std::map<std::string, std::vector<float>> reference(int size, int micro, DType reduce) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  manual_seed(3);
  Typed model;
  model.to(kBF16);
  std::map<std::string, Tensor> sums;
  for (int k = 0; k < micro; ++k) {
    std::map<std::string, Tensor> step;
    for (int r = 0; r < size; ++r) {
      model.zero_grad();
      const Tensor x = randn({5, 8}, {}, RandomStream{7, static_cast<uint64_t>(k * size + r)});
      const Tensor y = model(x.to(kBF16)).to(kF32);
      (y * y).mean().backward();
      const NoGradGuard no_grad;
      for (const auto& [name, tensor] : model.named_parameters()) {
        const Tensor gradient = tensor.grad().to(kF32);
        Tensor& sum = reduce == kF32 ? sums[name] : step[name];
        if (sum.defined()) {
          add_(sum, gradient);
        } else {
          sum = gradient.clone();
        }
      }
    }
    const NoGradGuard no_grad;
    for (auto& [name, sum] : step) {  // summed in f32 and rounded, as a reduction of bf16 is
      const Tensor rounded = sum.to(kBF16).to(kF32);
      if (sums[name].defined()) {
        add_(sums[name], rounded);
      } else {
        sums[name] = rounded;
      }
    }
  }
  std::map<std::string, std::vector<float>> values;
  const NoGradGuard no_grad;
  for (auto& [name, sum] : sums) {
    values[name] = (sum * (1.0 / size)).to_vector<float>();
  }
  return values;
}

TEST(FullyShardMemory, MixedPrecisionIsThatOfMasterWeights) {
  constexpr int kMicro = 2;
  for (const DType reduce : {kF32, kBF16}) {
    for (const int size : {1, 2, 3}) {
      SCOPED_TRACE(std::string(name_of(reduce)) + " on " + std::to_string(size));
      const auto expected = reference(size, kMicro, reduce);
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        Typed model;
        Mesh mesh(world());
        const auto parallel = shard_in(
            Way::kZero3, model, mesh,
            {.precision = {.param_dtype = kBF16, .reduce_dtype = reduce, .output_dtype = kF32}});
        model.first.register_forward_hook([&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) {
          EXPECT_EQ(model.first.weight.dtype(), kBF16);
        });
        const CommTrace::Scope scope(*rank_context().trace);
        for (int k = 0; k < kMicro; ++k) {
          StepPlan plan = StepPlan::of(k, kMicro);
          plan.sync_gradients = true;
          parallel->set_plan(plan);
          const Tensor loss = loss_of(model, k * size + rank);
          EXPECT_EQ(model.seen, (std::vector<DType>{kBF16, kF32}));
          EXPECT_EQ(loss.dtype(), kF32);
          loss.backward();
        }
        EXPECT_EQ(model.first.weight.dtype(), kF32);
        EXPECT_EQ(model.first.weight.grad().dtype(), kF32);
        for (const CommRecord& record : scope.records()) {
          if (record.channel != Channel::kParameter && record.channel != Channel::kGradient)
            continue;
          EXPECT_EQ(record.dtype, record.channel == Channel::kParameter ? kBF16 : reduce);
        }
        for (const auto& [name, values] : whole_gradients(model)) {
          EXPECT_EQ(values, expected.at(name)) << name;
        }
      });
    }
  }
}

// Gradients that wait to be reduced add up in the dtype that they will travel in.
TEST(FullyShardMemory, LocalSumsAddUpInTheReduceDtype) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Typed model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh,
                                   {.precision = {.param_dtype = kBF16, .reduce_dtype = kF32}});
    {
      const NoSync local = parallel->no_sync();
      for (int k = 0; k < 3; ++k) {
        loss_of(model, k * 2 + rank).backward();
        const auto& sharded = dynamic_cast<const ShardedModel&>(*parallel);
        for (const ParamGroup* part : sharded.schedule().parts()) {
          for (const ShardedParam& param : part->params()) {
            EXPECT_EQ(param.whole.grad().dtype(), kF32);
            EXPECT_EQ(param.whole.dtype(), kBF16);
          }
        }
      }
    }
    loss_of(model, 6 + rank).backward();
    EXPECT_EQ(model.first.weight.grad().dtype(), kF32);
  });
}

// Inputs then come as they are, which a module may want: here the root's, whose layers cast theirs.
TEST(FullyShardMemory, InputsAreCastUnlessAskedOtherwise) {
  const auto expected = reference(2, 1, kF32);
  on_ranks(2, [&](int rank) {
    const MixedPrecisionPolicy casts{
        .param_dtype = kBF16, .reduce_dtype = kF32, .output_dtype = kF32};
    MixedPrecisionPolicy as_they_are = casts;
    as_they_are.cast_forward_inputs = false;
    Mesh mesh(world());
    for (const bool cast : {true, false}) {
      manual_seed(3);
      Typed model;
      fully_shard(model.first, mesh, {.mixed_precision = casts});
      fully_shard(model.second, mesh, {.mixed_precision = casts});
      fully_shard(model, mesh, {.mixed_precision = cast ? casts : as_they_are});
      loss_of(model, rank).backward();
      EXPECT_EQ(model.seen.front(), cast ? kBF16 : kF32);
      EXPECT_EQ(whole_gradients(model), expected);
    }
    Typed model;
    fully_shard(model, mesh, {.mixed_precision = as_they_are});
    EXPECT_THROW(loss_of(model, rank), DTypeError) << "of a layer that reads bf16";
    model.first.register_forward_pre_hook(
        [](nn::ModuleBase&, nn::TensorRefs inputs) { *inputs[0] = inputs[0]->to(kBF16); });
    const Tensor loss = loss_of(model, rank);
    EXPECT_EQ(model.seen, (std::vector<DType>{kF32, kBF16}));
    loss.backward();
  });
}

TEST(FullyShardMemory, MixedPrecisionIsOfFloatingDtypes) {
  on_ranks(2, [](int) {
    Typed model;
    Mesh mesh(world());
    EXPECT_THROW(fully_shard(model, mesh, {.mixed_precision = {.param_dtype = kI64}}), ConfigError);
    EXPECT_FALSE(is_dtensor(model.first.weight));
  });
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_memory
