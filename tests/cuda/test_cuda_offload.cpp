// Parts of a GPU's model in memory of the host: whatever order streams take, the bits of a training
// that keeps them on the device, no byte of them left there, and over the bus what the report says.
#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/host_transfers.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>

#include "../distributed/fault_backend.h"
#include "../message_of.h"
#include "nccl_fixture.h"
#include "sharded_blocks.h"

namespace tessera::distributed::test_cuda_offload {
namespace {

using CudaOffload = CudaNccl;

enum class Mode { kFsdp, kZero1, kZero2 };
enum class Sync { kEach, kLast };  // which micro-batches of a step are reduced

struct Case {
  std::string name = {};
  Mode mode = Mode::kFsdp;
  int ranks = 2;
  int replicas = 1;
  int micro_batches = 1;
  Sync sync = Sync::kEach;
  MixedPrecisionPolicy precision = {};
  bool autocast = false;
  bool recomputes = false;
  DType dtype = kF32;
  ReshardAfterForward reshard = {};
  ShardPlacement placement = {};
};

Mesh mesh_of(const Case& one) {
  if (one.replicas == 1) return Mesh(world());
  return Mesh(world(), {{"dp_replicate", one.replicas}, {"dp_shard", one.ranks / one.replicas}});
}

ShardedModel shard(Blocks& model, Mesh& mesh, const Case& one, OffloadPolicy offload) {
  const std::optional<DType> gradient_dtype =
      one.dtype == kF32 ? std::nullopt : std::optional(kF32);
  if (one.mode != Mode::kFsdp) {
    return zero(model, mesh,
                {.stage = one.mode == Mode::kZero1 ? 1 : 2,
                 .first_bucket_bytes = 1200,
                 .bucket_bytes = 2000,
                 .gradient_dtype = gradient_dtype,
                 .offload_policy = offload});
  }
  FullyShardOptions options{.mixed_precision = one.precision,
                            .offload_policy = offload,
                            .gradient_dtype = gradient_dtype,
                            .shard_placement = one.placement};
  options.reshard_after_forward = one.reshard;
  for (Block* block : model.blocks) fully_shard(*block, mesh, options);
  fully_shard(model, mesh, options);
  return sharded_model(model);
}

// Collectives begin on a rank when its host comes to them, which takes a drawn time.
void delay_collectives(uint64_t seed, int rank) {
  faults().before_start =
      [random = std::mt19937_64(seed * 8 + static_cast<uint64_t>(rank))](const Call&) mutable {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        return true;
      };
}

constexpr int kSteps = 2;
struct Trained {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values, averages;
  friend bool operator==(const Trained&, const Trained&) = default;
};

std::vector<std::vector<float>> whole_values(const TensorList& tensors) {
  const NoGradGuard no_grad;
  std::vector<std::vector<float>> whole;
  for (const Tensor& tensor : tensors) {
    whole.push_back(values((is_dtensor(tensor) ? full_tensor(tensor) : tensor).to(kF32)));
  }
  return whole;
}

// Of rank 0.
Trained train(const Case& one, OffloadPolicy offload, uint64_t seed) {
  gpu::emulation::set_seed(seed);
  Trained trained;
  const auto body = [&](int rank) {
    delay_collectives(seed, rank);
    manual_seed(3);
    Blocks model(9, 2);
    model.to(cuda(rank));
    if (one.dtype != kF32) model.to(one.dtype);
    Mesh mesh = mesh_of(one);
    const ShardedModel sharded = shard(model, mesh, one, offload);
    if (one.recomputes) {
      for (Block* block : model.blocks) block->checkpoint_calls();
    }
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    optim::EMA average(model.named_parameters(), {.decay = 0.5});
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < one.micro_batches; ++micro) {
        StepPlan plan = StepPlan::of(micro, one.micro_batches);
        if (one.sync == Sync::kEach) plan.sync_gradients = true;
        sharded.set_plan(plan);
        std::optional<AutocastGuard> autocast;
        if (one.autocast) autocast.emplace(kBF16);
        const Tensor loss = loss_of(model, 3 * step + micro, rank).to(kF32);
        autocast.reset();
        loss.backward();
        if (rank == 0) trained.losses.push_back(loss.to(kCpu).item());
      }
      const Tensor norm = optim::clip_grad_norm(model.parameters(), 0.1, {.fold_into = &optimizer});
      optimizer.step();
      optimizer.zero_grad();
      average.update();
      if (rank == 0) trained.norms.push_back(norm.to(kCpu).item());
    }
    for (const auto& [name, parameter] : model.named_parameters()) {
      EXPECT_EQ(parameter.device().is_cpu(), offload != OffloadPolicy::kNone) << name;
      EXPECT_TRUE(parameter.device().is_cuda() || parameter.numel() == 0 || is_pinned(parameter));
    }
    TensorList averages;
    for (const auto& [name, tensor] : average.averages()) averages.push_back(tensor);
    const std::vector<std::vector<float>> whole = whole_values(model.parameters());
    const std::vector<std::vector<float>> of_averages = whole_values(averages);
    if (rank == 0) trained.values = whole, trained.averages = of_averages;
    faults() = {};
  };
  on_gpus(one.ranks, body, {.decorate = with_faults()});
  return trained;
}

std::vector<OffloadPolicy> policies_of(const Case& one) {
  if (one.mode != Mode::kFsdp) return {OffloadPolicy::kOptimizer};
  return {OffloadPolicy::kOptimizer, OffloadPolicy::kParameters};
}

std::optional<Shard> second_dimension(const std::string&, const Tensor& parameter) {
  return parameter.dim() == 2 && parameter.size(1) % 2 == 0 ? std::optional(Shard(1))
                                                            : std::nullopt;
}

TEST_F(CudaOffload, EveryWayOfTrainingHasTheBitsOfPartsOnTheDevice) {
  const MixedPrecisionPolicy bf16{.param_dtype = kBF16, .reduce_dtype = kF32};
  const MixedPrecisionPolicy narrow{.param_dtype = kBF16};
  const std::vector<Case> cases{
      {.name = "one rank", .ranks = 1},
      {.name = "three ranks", .ranks = 3},
      {.name = "zero1", .mode = Mode::kZero1},
      {.name = "zero1, alone", .mode = Mode::kZero1, .ranks = 1},
      {.name = "zero1, accumulating",
       .mode = Mode::kZero1,
       .micro_batches = 2,
       .sync = Sync::kLast},
      {.name = "zero1, sums that go on", .mode = Mode::kZero1, .micro_batches = 2},
      {.name = "zero2", .mode = Mode::kZero2, .ranks = 3},
      {.name = "zero2, accumulating", .mode = Mode::kZero2, .micro_batches = 3},
      {.name = "accumulating", .micro_batches = 3},
      {.name = "no_sync", .micro_batches = 2, .sync = Sync::kLast},
      {.name = "bf16 that travels", .precision = bf16},
      {.name = "bf16 alone", .precision = bf16, .recomputes = true},
      {.name = "bf16 reductions, accumulating", .micro_batches = 2, .precision = narrow},
      {.name = "autocast", .micro_batches = 2, .autocast = true},
      {.name = "bf16 parameters", .dtype = kBF16},
      {.name = "recomputing", .recomputes = true},
      {.name = "kept whole", .reshard = false},
      {.name = "columns", .placement = second_dimension},
      {.name = "pairs of ranks", .ranks = 4, .reshard = 2},
      {.name = "replicas", .ranks = 4, .replicas = 2, .micro_batches = 2},
      {.name = "replicas, bf16 reductions",
       .ranks = 4,
       .replicas = 2,
       .micro_batches = 2,
       .precision = narrow},
  };
  uint64_t seed = 0;
  for (const Case& one : cases) {
    const Trained expected = train(one, OffloadPolicy::kNone, ++seed);
    ASSERT_EQ(expected.norms.size(), static_cast<size_t>(kSteps));
    for (const OffloadPolicy offload : policies_of(one)) {
      SCOPED_TRACE(testing::Message() << one.name << ", policy " << static_cast<int>(offload)
                                      << ", seed " << seed + 1);
      const Trained trained = train(one, offload, ++seed);
      EXPECT_EQ(trained.losses, expected.losses);
      EXPECT_EQ(trained.norms, expected.norms);
      EXPECT_TRUE(trained.values == expected.values);
      EXPECT_TRUE(trained.averages == expected.averages);
    }
  }
}

TEST_F(CudaOffload, EveryOrderOfStreamsHasTheseBits) {
  const std::vector<Case> cases{
      {.name = "bf16", .micro_batches = 2, .precision = {.param_dtype = kBF16}},
      {.name = "zero2", .mode = Mode::kZero2}};
  for (const Case& one : cases) {
    const Trained expected = train(one, OffloadPolicy::kNone, 1);
    for (const OffloadPolicy offload : policies_of(one)) {
      for (uint64_t seed = 100; seed < 104; ++seed) {
        EXPECT_TRUE(train(one, offload, seed) == expected)
            << one.name << ", policy " << static_cast<int>(offload) << ", seed " << seed;
      }
    }
  }
}

// ---- Who may let go ----------------------------------------------------------------------------

// Memory of the device that was downloaded serves again when the download has read it, however late
// that stream is.
TEST_F(CudaOffload, WhatIsLetGoOfIsReadByItsDownloadFirst) {
  constexpr int64_t kElements = 4096;
  int reused = 0;
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    gpu::emulation::set_seed(seed);
    on_gpus(1, [&](int rank) {
      const NoGradGuard no_grad;
      const std::shared_ptr<HostTransfers> copies = HostTransfers::of(cuda(rank));
      std::vector<Tensor> hosts;
      HostTransfers::EventPtr end;
      const auto download = [&](double value) {
        const Tensor source = full({kElements}, value).to(cuda(rank));
        hosts.push_back(HostTransfers::empty({kElements}, kF32, MemoryCategory::kGradient));
        end = copies->on_download_stream(copies->record_here(),
                                         [&] { copies->download(hosts.back(), source); });
        return source.data();
      };
      const void* const first = download(1);
      const void* const second = download(2);
      EXPECT_NE(first, second) << "it is held";
      copies->let_go(true);
      const Tensor next = raw::empty({kElements}, kF32, cuda(rank));
      fill_(next, 3);
      copies->let_go(false);
      const Tensor last = raw::empty({kElements}, kF32, cuda(rank));
      fill_(last, 4);
      reused += (next.data() == first) + (last.data() == second);
      HostTransfers::wait(end);
      for (size_t i = 0; i < hosts.size(); ++i) {
        const std::vector<float> values = hosts[i].to_vector<float>();
        EXPECT_TRUE(
            std::ranges::all_of(values, [&](float x) { return x == static_cast<float>(i + 1); }))
            << "download " << i + 1 << ", seed " << seed;
      }
    });
  }
  EXPECT_GT(reused, 0) << "else nothing could be overwritten";
}

// ---- Who may write -----------------------------------------------------------------------------

// What a call that has returned reads is what the parts held, whatever becomes of them afterwards.
TEST_F(CudaOffload, PartsMayBeWrittenWhenACallHasReturned) {
  for (const OffloadPolicy offload : {OffloadPolicy::kOptimizer, OffloadPolicy::kParameters}) {
    for (const bool bf16 : {false, true}) {
      for (uint64_t seed = 1; seed <= 2; ++seed) {
        gpu::emulation::set_seed(seed);
        on_gpus(2, [&](int rank) {
          manual_seed(3);
          Blocks model(9, 2);
          model.to(cuda(rank));
          Mesh mesh(world());
          Case one;
          if (bf16) one.precision.param_dtype = kBF16;
          const ShardedModel sharded = shard(model, mesh, one, offload);
          const NoGradGuard no_grad;
          const double expected = loss_of(model, 0, rank).to(kCpu).item();
          for (int i = 0; i < 2; ++i) {
            const Tensor loss = loss_of(model, 0, rank);
            TensorList before;
            for (const Tensor& parameter : model.parameters()) {
              const Tensor part = raw::alias(parameter);
              before.push_back(part.clone());
              fill_(part, 1e6);
              parameter.bump_version();
            }
            EXPECT_EQ(loss.to(kCpu).item(), expected);
            EXPECT_NE(loss_of(model, 0, rank).to(kCpu).item(), expected);
            for (size_t p = 0; p < before.size(); ++p) {
              copy_(raw::alias(model.parameters()[p]), before[p]);
              model.parameters()[p].bump_version();
            }
          }
        });
      }
    }
  }
}

TEST_F(CudaOffload, WholeParametersAreReadAndWrittenInAScope) {
  for (const Case& one : {Case{}, Case{.mode = Mode::kZero2}}) {
    for (const OffloadPolicy offload : policies_of(one)) {
      on_gpus(2, [&](int rank) {
        manual_seed(3);
        Blocks model(9, 2);
        model.to(cuda(rank));
        Mesh mesh(world());
        const ShardedModel sharded = shard(model, mesh, one, offload);
        {
          const auto scope = full_parameters(model, {.writes = true});
          const NoGradGuard no_grad;
          for (const Tensor& whole : model.parameters()) {
            EXPECT_EQ(whole.device(), cuda(rank));
            fill_(whole, 0.25);
          }
        }
        for (const std::vector<float>& whole : whole_values(model.parameters())) {
          EXPECT_TRUE(std::ranges::all_of(whole, [](float x) { return x == 0.25f; }));
        }
        const StateDict saved = full_state_dict(model.state_dict());
        EXPECT_EQ(saved.empty(), rank != 0);
        {
          const auto scope = full_parameters(model);
          EXPECT_EQ(values(model.parameters()[0])[0], 0.25f);
        }
      });
    }
  }
}

// A step that finds infinity leaves all as it was, and the next one goes on.
TEST_F(CudaOffload, AnOverflowSkipsTheStep) {
  std::vector<std::vector<float>> of_policy[2];
  for (const OffloadPolicy offload : {OffloadPolicy::kNone, OffloadPolicy::kParameters}) {
    on_gpus(2, [&](int rank) {
      manual_seed(3);
      Blocks model(9, 2);
      model.to(cuda(rank));
      Mesh mesh(world());
      const ShardedModel sharded = shard(model, mesh, {}, offload);
      optim::SGD optimizer(model.named_parameters(), {.lr = 1e-2});
      for (const double scale : {1.0, 1e38, 1.0}) {
        (loss_of(model, 0, rank) * scale * scale).backward();
        const Tensor norm = optim::clip_grad_norm(model.parameters(), 1);
        const bool overflows = !std::isfinite(norm.to(kCpu).item());
        EXPECT_EQ(overflows, scale != 1);
        if (!overflows) optimizer.step();
        optimizer.zero_grad();
      }
      auto whole = whole_values(model.parameters());
      if (rank == 0) of_policy[offload == OffloadPolicy::kNone ? 0 : 1] = std::move(whole);
    });
  }
  EXPECT_TRUE(of_policy[0] == of_policy[1]);
}

// What a backward that threw has left on its way comes to its end, and counts for nothing.
TEST_F(CudaOffload, AFailedBackwardLeavesNothingBehind) {
  std::vector<double> losses[2];
  for (const bool fails : {false, true}) {
    on_gpus(2, [&](int rank) {
      manual_seed(3);
      Blocks model(9, 2);
      model.to(cuda(rank));
      Mesh mesh(world());
      const ShardedModel sharded = shard(model, mesh, {}, OffloadPolicy::kParameters);
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 2; ++step) {
        Tensor x = on_gpu(ones({2, 5}));
        if (fails && step == 1) {
          const Tensor y = model(x);
          const auto mistake =
              register_hook(y, [](const Tensor&) -> Tensor { throw ValueError("on purpose"); });
          EXPECT_THROW((y * y).mean().backward(), ValueError);
          optimizer.zero_grad();
        }
        const Tensor loss = loss_of(model, step, rank);
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        if (rank == 0) losses[fails].push_back(loss.to(kCpu).item());
      }
    });
  }
  EXPECT_EQ(losses[0], losses[1]);
}

// ---- Memory ------------------------------------------------------------------------------------

struct Memory {
  int64_t at_rest = 0;                       // of the device, that somebody owns between two steps
  int64_t unsharded = 0, communication = 0;  // peaks of a step
  std::vector<int64_t> in_use;               // of the device, when each collective was issued
  int64_t parameters = 0, states = 0, pinned = 0;
  friend bool operator==(const Memory&, const Memory&) = default;
};

// Of rank 0, in its second step.
Memory memory_of(const Case& one, OffloadPolicy offload, int width, uint64_t seed) {
  gpu::emulation::set_seed(seed);
  Memory memory;
  on_gpus(
      one.ranks,
      [&](int rank) {
        gpu::DeviceAllocator& allocator = gpu::caching_allocator(rank);
        const int64_t before = allocator.use().in_use;
        const int64_t counted = memory_stats()->current(MemoryCategory::kParameter);
        std::vector<int64_t> in_use;
        faults().before_start = [&,
                                 random = std::mt19937_64(seed * 8 + static_cast<uint64_t>(rank))](
                                    const Call& call) mutable {
          if (call.device.is_cuda()) in_use.push_back(allocator.use().in_use - before);
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          return true;
        };
        {
          Blocks model(width, 2);
          model.to(cuda(rank));
          Mesh mesh = mesh_of(one);
          const ShardedModel sharded = shard(model, mesh, one, offload);
          optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
          for (int step = 0; step < 2; ++step) {
            in_use.clear();
            memory_stats()->reset_peak();
            loss_of(model, step, rank).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          gpu::synchronize(rank);
          if (rank == 0) {
            const auto peak = [](MemoryCategory category) {
              return memory_stats()->peak(category);
            };
            memory = {.at_rest = allocator.use().in_use - before,
                      .unsharded = peak(MemoryCategory::kUnsharded),
                      .communication = peak(MemoryCategory::kCommunication),
                      .in_use = in_use,
                      .parameters = memory_stats()->current(MemoryCategory::kParameter) - counted,
                      .states = optimizer.state_bytes(),
                      .pinned = gpu::pinned_bytes_in_use()};
          }
          barrier(world());
        }
        faults() = {};
      },
      {.decorate = with_faults()});
  return memory;
}

TEST_F(CudaOffload, TheDeviceHoldsNothingBetweenSteps) {
  const int64_t pinned_before = gpu::pinned_bytes_in_use();
  Case one;
  one.ranks = 3;
  const Memory on_device = memory_of(one, OffloadPolicy::kNone, 13, 1);
  const Memory optimizer = memory_of(one, OffloadPolicy::kOptimizer, 13, 1);
  const Memory parameters = memory_of(one, OffloadPolicy::kParameters, 13, 1);
  // Parts, and twice as much of states.
  EXPECT_GE(on_device.at_rest, on_device.parameters + on_device.states);
  EXPECT_EQ(on_device.states, optimizer.states);
  EXPECT_EQ(on_device.states, parameters.states);
  EXPECT_EQ(parameters.at_rest, 0) << "bytes of parameters, gradients or states are left";
  // The device's copy of the parts, in blocks of 512 bytes.
  EXPECT_GE(optimizer.at_rest, optimizer.parameters / 2);
  EXPECT_LE(optimizer.at_rest, optimizer.parameters / 2 + 5 * 512);
  EXPECT_EQ(optimizer.parameters, 2 * parameters.parameters);
  // What moved to the host is counted there.
  EXPECT_EQ(parameters.parameters, on_device.parameters);
  EXPECT_GE(parameters.pinned - pinned_before, parameters.parameters);
  EXPECT_EQ(gpu::pinned_bytes_in_use(), pinned_before);
  // No more is whole at a time than without.
  EXPECT_LE(parameters.unsharded, on_device.unsharded);
  EXPECT_LE(std::ranges::max(parameters.in_use), std::ranges::max(on_device.in_use));
}

TEST_F(CudaOffload, TheDeviceKeepsTheWholeParametersOfZero) {
  Case one;
  one.mode = Mode::kZero2;
  const Memory on_device = memory_of(one, OffloadPolicy::kNone, 13, 1);
  const Memory offloaded = memory_of(one, OffloadPolicy::kOptimizer, 13, 1);
  const int64_t part = on_device.parameters / one.ranks;
  EXPECT_EQ(offloaded.parameters, on_device.parameters + part);
  EXPECT_GE(offloaded.at_rest, on_device.parameters);
  EXPECT_LT(offloaded.at_rest, on_device.parameters + part);
  EXPECT_GE(on_device.at_rest, on_device.parameters + on_device.states);
}

// Memory is given back in the order of the host's calls, as streams wait for one another and not
// the host for them.
TEST_F(CudaOffload, EveryOrderOfStreamsHasOnePeak) {
  for (const OffloadPolicy offload : {OffloadPolicy::kOptimizer, OffloadPolicy::kParameters}) {
    const Memory expected = memory_of({}, offload, 9, 1);
    EXPECT_GE(expected.in_use.size(), 8u);
    for (uint64_t seed = 2; seed <= 3; ++seed) {
      const Memory memory = memory_of({}, offload, 9, seed);
      EXPECT_EQ(memory.in_use, expected.in_use) << "seed " << seed;
      EXPECT_EQ(memory.at_rest, expected.at_rest) << "seed " << seed;
    }
  }
}

// ---- What travels ------------------------------------------------------------------------------

struct BusBytes {
  int64_t up = 0, down = 0, partial = 0, continued = 0;
  gpu::emulation::CopiedBytes first, second;  // counted: of a step of one micro-batch, and of two
};

BusBytes bus_bytes_of(const Case& one, OffloadPolicy offload) {
  BusBytes bytes;
  on_gpus(one.ranks, [&](int rank) {
    Blocks model(9, 2);
    model.to(cuda(rank));
    Mesh mesh = mesh_of(one);
    const ShardedModel sharded = shard(model, mesh, one, offload);
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    const auto step_of = [&](int micro_batches) {
      const auto before = gpu::emulation::copied_beside(rank);
      for (int micro = 0; micro < micro_batches; ++micro) {
        StepPlan plan = StepPlan::of(micro, micro_batches);
        plan.sync_gradients = true;
        sharded.set_plan(plan);
        loss_of(model, micro, rank).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      const auto after = gpu::emulation::copied_beside(rank);
      return gpu::emulation::CopiedBytes{after.to_device - before.to_device,
                                         after.to_host - before.to_host};
    };
    step_of(1);
    const auto first = step_of(1), second = step_of(2);
    if (rank != 0) return;
    bytes.first = first, bytes.second = second;
    for (const UnitReport& unit : sharded.report()) {
      EXPECT_EQ(unit.offload, offload);
      bytes.up += unit.uploaded_bytes;
      bytes.down += unit.downloaded_bytes;
      bytes.partial += unit.partial_downloaded_bytes;
      bytes.continued += unit.continued_bytes;
    }
    const std::string text = sharded.describe();
    EXPECT_TRUE(contains(text, "up " + std::to_string(bytes.up))) << text;
    EXPECT_TRUE(contains(text, "down " + std::to_string(bytes.down))) << text;
  });
  return bytes;
}

TEST_F(CudaOffload, TheReportCountsWhatTravelsOverTheBus) {
  const MixedPrecisionPolicy bf16{.param_dtype = kBF16, .reduce_dtype = kF32};
  const MixedPrecisionPolicy narrow{.param_dtype = kBF16};
  for (const Case& one :
       {Case{.name = "fsdp"}, Case{.name = "bf16", .precision = bf16},
        Case{.name = "bf16 reductions", .precision = narrow},
        Case{.name = "kept whole", .reshard = false},
        Case{.name = "pairs", .ranks = 4, .reshard = 2},
        Case{.name = "replicas", .ranks = 4, .replicas = 2},
        Case{.name = "replicas, bf16 reductions", .ranks = 4, .replicas = 2, .precision = narrow},
        Case{.name = "zero2", .mode = Mode::kZero2}}) {
    SCOPED_TRACE(one.name);
    const BusBytes bytes = bus_bytes_of(one, policies_of(one).back());
    const bool every_gather = one.mode == Mode::kFsdp;
    EXPECT_GT(bytes.up, 0);
    EXPECT_GT(bytes.down, 0);
    EXPECT_EQ(bytes.first.to_device, bytes.up);
    EXPECT_EQ(bytes.first.to_host, bytes.down);
    EXPECT_EQ(bytes.second.to_device, (every_gather ? 2 : 1) * bytes.up + bytes.continued);
    EXPECT_EQ(bytes.second.to_host, bytes.partial + bytes.down);
    EXPECT_EQ(bytes.continued > 0, one.replicas > 1);
  }
  // A device that keeps its parts is told of a step once.
  const BusBytes once = bus_bytes_of({}, OffloadPolicy::kOptimizer);
  EXPECT_EQ(once.first.to_device, once.up);
  EXPECT_EQ(once.second.to_device, once.up);
  // Casts come before the bus: half of it up; reductions in 16 bits, half of it down; but for what each
  // parameter takes to begin at 16 bytes, which are eight numbers and not four.
  const BusBytes wide = bus_bytes_of({}, OffloadPolicy::kParameters);
  const BusBytes cast = bus_bytes_of({.precision = narrow}, OffloadPolicy::kParameters);
  EXPECT_GE(2 * cast.up, wide.up);
  EXPECT_LT(20 * cast.up, 11 * wide.up);
  EXPECT_GE(2 * cast.down, wide.down);
  EXPECT_LT(20 * cast.down, 11 * wide.down);
}

// ---- Mistakes ----------------------------------------------------------------------------------

TEST_F(CudaOffload, WhatCannotBeOffloadedIsSaid) {
  on_gpus(2, [&](int rank) {
    Mesh mesh(world());
    Blocks on_cpu;
    const std::string lies = message_of<UnsupportedError>(
        [&] { fully_shard(on_cpu, mesh, {.offload_policy = OffloadPolicy::kParameters}); });
    EXPECT_TRUE(contains(lies, "'in' is f32[9, 5] cpu, which lies there")) << lies;
    EXPECT_THROW(zero(on_cpu, mesh, {.offload_policy = OffloadPolicy::kOptimizer}),
                 UnsupportedError);
    Blocks model;
    model.to(cuda(rank));
    const std::string whole = message_of<ConfigError>(
        [&] { zero(model, mesh, {.stage = 2, .offload_policy = OffloadPolicy::kParameters}); });
    EXPECT_TRUE(contains(whole, "stage 2 keeps whole parameters")) << whole;
    // Options that differ.
    EXPECT_THROW(fully_shard(model, mesh,
                             {.offload_policy = rank == 0 ? OffloadPolicy::kParameters
                                                          : OffloadPolicy::kOptimizer}),
                 DistributedError);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_offload
