// Sharded training on GPUs: whatever order streams take, the bits of replicas, one peak of memory,
// and no more of it than on CPUs.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "../distributed/fault_backend.h"
#include "nccl_fixture.h"
#include "sharded_blocks.h"

namespace tessera::distributed::test_cuda_sharding {
namespace {

using CudaSharding = CudaNccl;

enum class Units { kOne, kBlocks, kPairs };
struct Way {
  Units units = Units::kBlocks;
  ReshardAfterForward reshard = {};
  bool recomputes = false;
};

FullyShardedModule shard(Blocks& model, Mesh& mesh, const Way& way) {
  FullyShardOptions options;
  options.reshard_after_forward = way.reshard;
  if (way.units == Units::kBlocks) {
    for (Block* block : model.blocks) fully_shard(*block, mesh, options);
  } else if (way.units == Units::kPairs) {
    for (size_t i = 0; i < model.blocks.size(); i += 2) {
      fully_shard({model.blocks[i], model.blocks[i + 1]}, mesh, options);
    }
  }
  return fully_shard(model, mesh, options);
}

constexpr int kSteps = 2;
struct Trained {
  std::vector<double> losses;
  std::vector<std::vector<float>> values;
  friend bool operator==(const Trained&, const Trained&) = default;
};

// Of rank 0. Collectives begin on a rank when its host comes to them, which takes a drawn time.
// `shared`: all ranks have one device.
Trained train(int size, const std::optional<Way>& way, uint64_t seed, bool shared = false) {
  gpu::emulation::set_seed(seed);
  Trained trained;
  const auto body = [&](int rank) {
    std::mt19937_64 random(seed * 8 + static_cast<uint64_t>(rank));
    faults().before_start = [&](const Call&) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      return true;
    };
    manual_seed(3);
    Blocks model;
    const Device device = cuda(shared ? 0 : rank);
    model.to(device);
    Mesh mesh(world());
    std::unique_ptr<DataParallelModel> parallel;
    if (way) {
      shard(model, mesh, *way);
      parallel = std::make_unique<ShardedModel>(sharded_model(model));
    } else {
      parallel = std::make_unique<Replica>(replicate(model, mesh, {.bucket_bytes = 1200}));
    }
    if (way && way->recomputes) {
      for (Block* block : model.blocks) block->checkpoint_calls();
    }
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    for (int step = 0; step < kSteps; ++step) {
      const Tensor loss = loss_of(model, step, rank, device);
      loss.backward();
      optim::clip_grad_norm(model.parameters(), 0.1, {.fold_into = &optimizer});
      optimizer.step();
      optimizer.zero_grad();
      if (rank == 0) trained.losses.push_back(loss.to(kCpu).item());
    }
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) {
      std::vector<float> whole = values(is_dtensor(parameter) ? full_tensor(parameter) : parameter);
      if (rank == 0) trained.values.push_back(std::move(whole));
    }
    faults() = {};
  };
  if (shared) {
    compared_ranks(size, body, {.device = cuda(0), .decorate = with_faults()});
  } else {
    on_gpus(size, body, {.decorate = with_faults()});
  }
  return trained;
}

TEST_F(CudaSharding, EveryOrderOfStreamsHasTheBitsOfReplicas) {
  uint64_t seed = 0;
  for (const int size : {2, 4}) {
    const Trained expected = train(size, std::nullopt, ++seed);
    ASSERT_EQ(expected.losses.size(), static_cast<size_t>(kSteps));
    std::vector<ReshardAfterForward> reshards{true, false};
    if (size == 4) reshards = {2};  // pairs of ranks keep parts
    for (const Units units : {Units::kOne, Units::kBlocks, Units::kPairs}) {
      for (size_t reshard = 0; reshard < reshards.size(); ++reshard) {
        for (const bool recomputes : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << size << " ranks, units " << static_cast<int>(units) << ", reshard "
                       << reshard << ", recomputes " << recomputes << ", seed " << seed + 1);
          const Way way{units, reshards[reshard], recomputes};
          EXPECT_TRUE(train(size, way, ++seed) == expected);
          if (recomputes) continue;
          EXPECT_TRUE(train(size, way, seed, /*shared=*/true) == expected);
        }
      }
    }
  }
}

// ---- Memory ------------------------------------------------------------------------------------

struct Memory {
  // Marks of the second backward: all, and those of a category.
  int64_t peak = 0, unsharded = 0, gradients = 0, communication = 0, activations = 0;
  // Bytes of the device that somebody owned when each collective was issued.
  std::vector<int64_t> in_use;
  friend bool operator==(const Memory&, const Memory&) = default;
};
struct Sizes {
  int64_t parts = 0, block = 0, root = 0, before = 0;
};

// Of rank 0.
std::pair<Memory, Sizes> memory_of_training(int width, uint64_t seed) {
  gpu::emulation::set_seed(seed);
  Memory memory;
  Sizes sizes;
  on_gpus(3,
          [&](int rank) {
            std::mt19937_64 random(seed * 8 + static_cast<uint64_t>(rank));
            gpu::DeviceAllocator& allocator = gpu::caching_allocator(rank);
            const int64_t owned = allocator.use().in_use;
            std::vector<int64_t> in_use;
            faults().before_start = [&](const Call& call) {
              if (call.device.is_cuda()) in_use.push_back(allocator.use().in_use - owned);
              std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
              return true;
            };
            const int64_t before = memory_stats()->current();
            Blocks model(width);
            model.to(cuda(rank));
            Mesh mesh(world());
            shard(model, mesh, {});
            const ShardedModel parallel = sharded_model(model);
            loss_of(model, 0, rank).backward();
            const Tensor loss = loss_of(model, 1, rank);
            gpu::synchronize(rank);
            in_use.clear();
            memory_stats()->reset_peak();
            loss.backward();
            if (rank == 0) {
              for (const UnitReport& unit : parallel.report()) {
                sizes.parts += unit.part_bytes;
                (unit.name.empty() ? sizes.root : sizes.block) = unit.whole_bytes;
              }
              sizes.before = before;
              const auto peak = [](MemoryCategory category) {
                return memory_stats()->peak(category);
              };
              memory = {memory_stats()->peak(),
                        peak(MemoryCategory::kUnsharded),
                        peak(MemoryCategory::kGradient),
                        peak(MemoryCategory::kCommunication),
                        peak(MemoryCategory::kActivation),
                        in_use};
            }
            faults().before_start = {};
          },
          {.decorate = with_faults()});
  return {memory, sizes};
}

// As on CPUs (test_fully_shard_memory): parts, their gradients, three blocks and the root.
TEST_F(CudaSharding, BackwardHasMemoryOfThreeBlocks) {
  const auto [memory, sizes] = memory_of_training(101, 1);
  // Wholes lie one behind the other at cache lines; packing reads a table of 40 bytes a piece.
  constexpr int64_t kSlack = 2 * 64, kTable = 2048;
  EXPECT_LE(memory.unsharded, sizes.root + 2 * sizes.block + kSlack);
  EXPECT_LE(memory.gradients, sizes.parts + sizes.block + sizes.root);
  EXPECT_LE(memory.communication, sizes.block + kTable);
  EXPECT_LT(memory.activations, sizes.block);
  EXPECT_LE(memory.peak - sizes.before,
            2 * sizes.parts + 3 * sizes.block + sizes.root + memory.activations + kSlack + kTable);
}

// Memory is given back in the order of the host's calls, as streams wait for one another and not
// the host for them.
TEST_F(CudaSharding, EveryOrderOfStreamsHasOnePeak) {
  const Memory expected = memory_of_training(33, 1).first;
  EXPECT_GE(expected.in_use.size(), 8u);  // gathers and reductions of four blocks, and the root's
  for (uint64_t seed = 2; seed <= 10; ++seed) {
    EXPECT_TRUE(memory_of_training(33, seed).first == expected) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_sharding
