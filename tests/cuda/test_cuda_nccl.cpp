// Groups of GPUs, and training on them: what the nccl backend does with streams, memory and errors.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "../distributed/fault_backend.h"
#include "../message_of.h"
#include "nccl_fixture.h"

namespace tessera::distributed::test_cuda_nccl {
namespace {

TEST_F(CudaNccl, EveryCollectiveCarriesTensorsOfTheDevice) {
  on_gpus(3, [](int rank) {
    Group& group = world();
    const auto mine = [&](const Shape& shape) { return on_gpu(full(shape, rank + 1.0)); };
    const auto room = [&](const Shape& shape) { return on_gpu(zeros(shape)); };
    Tensor x = mine({7});
    all_reduce(x);
    EXPECT_EQ(values(x), std::vector<float>(7, 6));
    x = mine({2, 3});
    all_reduce(x, ReduceOp::kMean);
    EXPECT_EQ(values(x), std::vector<float>(6, 2));
    x = mine({5});
    group.reduce(x, 2, ReduceOp::kMax).wait();
    EXPECT_TRUE(rank != 2 || values(x) == std::vector<float>(5, 3));
    x = mine({5});
    broadcast(x, 1);
    EXPECT_EQ(values(x), std::vector<float>(5, 2));
    EXPECT_EQ(values(all_gather(mine({1, 2}))), (std::vector<float>{1, 1, 2, 2, 3, 3}));
    EXPECT_EQ(values(reduce_scatter(mine({6}))), std::vector<float>(2, 6));
    const Tensor slice = mine({2}), columns = transpose(mine({2, 3}), 0, 1);
    group.reduce_scatter_onto(slice, mine({6})).wait();
    EXPECT_EQ(values(slice), std::vector<float>(2, static_cast<float>(rank + 7)));
    group.reduce_scatter_onto(columns, std::vector<Tensor>(3, mine({6}))).wait();
    EXPECT_EQ(values(columns), std::vector<float>(6, static_cast<float>(rank + 7)));
    x = mine({6});
    group.reduce_scatter(x.slice(0, 2 * rank, 2 * rank + 2), x).wait();
    EXPECT_EQ(values(x)[static_cast<size_t>(2 * rank + 1)], 6);
    group.all_gather(x, x.slice(0, 2 * rank, 2 * rank + 2)).wait();
    EXPECT_EQ(values(x), std::vector<float>(6, 6));
    const std::vector<Tensor> ragged = all_gather_ragged(mine({rank + 1, 1}));
    ASSERT_EQ(ragged.size(), 3u);
    EXPECT_EQ(values(ragged[2]), std::vector<float>(3, 3));

    // Rank r sends r + s + 1 elements to rank s.
    std::vector<Tensor> inputs, outputs;
    for (int s = 0; s < 3; ++s) {
      inputs.push_back(mine({rank + s + 1}));
      outputs.push_back(room({rank + s + 1}));
    }
    group.all_to_all(outputs, inputs).wait();
    for (int s = 0; s < 3; ++s) {
      EXPECT_EQ(values(outputs[static_cast<size_t>(s)]),
                std::vector<float>(static_cast<size_t>(rank + s + 1), static_cast<float>(s + 1)));
    }
    std::vector<Tensor> parts;
    for (int r = 0; rank == 0 && r < 3; ++r) parts.push_back(room({2}));
    group.gather(parts, mine({2}), 0).wait();
    EXPECT_TRUE(rank != 0 || values(parts[1]) == std::vector<float>(2, 2));
    const Tensor part = room({2});
    group.scatter(part, parts, 0).wait();
    EXPECT_EQ(values(part), std::vector<float>(2, static_cast<float>(rank + 1)));

    // A ring, a transposed tensor, an empty one, and one of the CPU between them.
    const Tensor from = room({4});
    const Work sent = group.send(mine({4}), (rank + 1) % 3, 7);
    group.recv(from, (rank + 2) % 3, 7).wait();
    sent.wait();
    EXPECT_EQ(values(from), std::vector<float>(4, static_cast<float>((rank + 2) % 3 + 1)));
    const Tensor transposed = transpose(mine({2, 3}), 0, 1);
    all_reduce(transposed);
    EXPECT_EQ(values(transposed), std::vector<float>(6, 6));
    const Tensor on_cpu = full({3}, 1.0);
    all_reduce(on_cpu);
    EXPECT_EQ(on_cpu.to_vector<float>(), std::vector<float>(3, 3));
    all_reduce(room({0}));
    barrier();
  });
}

// Longer messages than the library sends ahead end when the peer's stream has come to their
// receipt.
TEST_F(CudaNccl, TheNormOfPartsIsThatOfTheWhole) {
  on_gpus(3, [](int rank) {
    Mesh mesh(world());
    const Tensor gradient = randn({8, 5}, {}, RandomStream{1, 2});
    const auto part = [&](const Tensor& x) {
      return distribute_tensor(on_gpu(x), mesh, {Shard(0)});
    };
    // The norm, and the weights after a step that the clipping went into.
    const auto step = [](const Tensor& w, const Tensor& of_w, double p) {
      w.set_requires_grad();
      w.set_grad(of_w);
      optim::SGD optimizer({{"w", w}}, {.lr = 0.5});
      optimizer.scale_next_step(0.25);
      if (w.device().is_cuda())
        optimizer.scale_next_step(tensor({2.0}, kF64).to(w.device()));
      else
        optimizer.scale_next_step(2.0);
      const Tensor norm =
          optim::clip_grad_norm({w}, 0.25, {.norm_type = p, .fold_into = &optimizer});
      optimizer.step();
      return norm.to(kCpu).item();
    };
    for (const double p : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      const Tensor w = part(zeros({8, 5})), plain = zeros({8, 5});
      const double norm = step(w, part(gradient), p), expected = step(plain, gradient, p);
      EXPECT_NEAR(norm, expected, p == 1 ? expected * 40 * 0x1p-53 : 0) << "p = " << p;
      const std::vector<float> got = values(full_tensor(w).detach());
      const std::vector<float> wanted = plain.detach().to_vector<float>();
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], wanted[i], 4 * std::abs(wanted[i]) * 0x1p-24) << "p = " << p;
      }
    }
    const Tensor w = part(zeros({8, 5})).set_requires_grad();
    w.set_grad(part(gradient));
    if (rank == 1) raw::alias(w.grad()).fill_(std::nan(""));
    for (const double p : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_TRUE(std::isnan(optim::clip_grad_norm({w}, 1, {.norm_type = p}).item())) << p;
    }
  });
}

TEST_F(CudaNccl, AClipThatNoStepFollowsIsAppliedToParts) {
  on_gpus(2, [](int) {
    Mesh mesh(world());
    Accelerator accelerator;
    const Tensor w =
        distribute_tensor(on_gpu(full({4}, 1.0)), mesh, {Shard(0)}).set_requires_grad();
    optim::SGD optimizer({{"w", w}}, {.lr = 1});
    accelerator.prepare(optimizer);
    accelerator.backward(sum(full_tensor(w)));
    EXPECT_EQ(accelerator.clip_grad_norm({w}, 1).item(), 2);
    EXPECT_EQ(values(full_tensor(w.grad())), std::vector<float>(4, 1)) << "left to the step";
    accelerator.backward(sum(full_tensor(w)));
    EXPECT_NEAR(values(full_tensor(w.grad()))[3], 1 + 1 / (2 + 1e-6), 0x1p-22);
  });
}

TEST_F(CudaNccl, LongMessagesAreExchangedWhereASendBeforeARecvOnBothWouldWaitForEver) {
  on_gpus(2, [&](int rank) {
    Group& group = world();
    const int peer = 1 - rank;
    const Tensor mine = on_gpu(full({5000}, rank + 1.0)), theirs = on_gpu(zeros({5000}));
    const Tensor host = full({3}, rank), from_host = zeros({3});
    const Tensor second = on_gpu(zeros({4}));
    group
        .exchange({{peer, mine}, {peer, host, 1}, {peer, on_gpu(full({4}, rank)), 2}},
                  {{peer, second, 2}, {peer, from_host, 1}, {peer, theirs}},
                  {.channel = Channel::kPeer, .timeout_seconds = 60})
        .wait();
    EXPECT_EQ(values(theirs), std::vector<float>(5000, static_cast<float>(peer + 1)));
    EXPECT_EQ(values(second), std::vector<float>(4, static_cast<float>(peer)));
    EXPECT_EQ(from_host.to_vector<float>(), std::vector<float>(3, static_cast<float>(peer)));
  });
}

TEST_F(CudaNccl, WaitHoldsTheStreamAndNotTheThread) {
  std::promise<void> waited;
  on_gpus(2, [&](int rank) {
    const Tensor x = on_gpu(full({64}, rank + 1.0));
    if (rank == 1) waited.get_future().wait_for(std::chrono::minutes(1));
    const Work work = world().all_reduce(x);
    if (rank == 0) {
      EXPECT_FALSE(work.completed());
      work.wait();  // rank 1 comes only after this has returned
      EXPECT_FALSE(work.completed());
      waited.set_value();
    }
    work.wait();
    // What the stream does next comes behind the sum.
    EXPECT_EQ(values(x * 2), std::vector<float>(64, 6));
  });
}

enum class Mistake {
  kNone,
  kSkipWait,         // Work::wait() returns at once
  kSkipStreamOrder,  // a collective does not wait for what was calculated before
  kOtherStream,      // a result lies in memory of another stream, which nobody tells of it
};

// How often a sum is read before it is there, or taken before what it adds up is there.
int wrong_sums(Mistake mistake) {
  std::atomic<int> wrong = 0;
  on_gpus(2,
          [&](int rank) {
            faults().skip_wait = mistake == Mistake::kSkipWait;
            if (mistake == Mistake::kSkipStreamOrder) {
              faults().around_start = [idle = gpu::make_stream(rank)](const auto& start) {
                const gpu::CurrentStream elsewhere(idle);
                start();
              };
            }
            const Tensor one = on_gpu(full({16}, 1.0));
            for (int round = 0; round < 30; ++round) {
              const Tensor x = one * 1;  // queued: a stream that does not wait finds older bytes
              const Work work =
                  world().all_reduce(x, ReduceOp::kSum, {.channel = Channel::kGradient});
              work.wait();
              if (values(x)[0] != 2) ++wrong;
              gpu::synchronize(rank);
            }
            faults() = {};
          },
          {.decorate = with_faults()});
  return wrong;
}

// How often a result is overwritten by what another stream does with memory of its own, or is read
// when its memory has gone, which the emulation refuses. The rows are gathered into a buffer of the
// call, as the tensor is not contiguous.
int lost_results(Mistake mistake) {
  std::atomic<int> lost = 0;
  // It shows sooner or later, on a busy machine later.
  const int rounds = mistake == Mistake::kNone ? 30 : 3000;
  for (int round = 0; round < rounds && lost == 0; ++round) {
    on_gpus(2, [&](int rank) {
      const auto other_stream = gpu::make_stream(rank);
      const Tensor rows = on_gpu(full({1, 64}, 1.0)), all = on_gpu(zeros({64, 2})).transpose(0, 1);
      Work work;
      {
        std::optional<gpu::CurrentStream> elsewhere;
        if (mistake == Mistake::kOtherStream) elsewhere.emplace(other_stream);
        work = world().all_gather(all, rows);
      }
      work.wait();
      Tensor other;
      {
        const gpu::CurrentStream elsewhere(other_stream);
        other = full({2, 64}, 777.0, {kF32, cuda(rank)});
      }
      try {
        if (values(all) != std::vector<float>(128, 1)) ++lost;
        gpu::synchronize(rank);
      } catch (const Error&) {
        ++lost;
      }
    });
  }
  return lost;
}

TEST_F(CudaNccl, EventsThatAreMissingAndMemoryOfOtherStreamsAreSeen) {
  EXPECT_EQ(wrong_sums(Mistake::kNone), 0);
  EXPECT_EQ(lost_results(Mistake::kNone), 0);
#if !defined(__SANITIZE_ADDRESS__)  // which sees the early read itself and ends the program
  EXPECT_GT(wrong_sums(Mistake::kSkipWait), 0);
  EXPECT_GT(wrong_sums(Mistake::kSkipStreamOrder), 0);
  EXPECT_GT(lost_results(Mistake::kOtherStream), 0);
#endif
}

TEST_F(CudaNccl, GroupsAreSplitWithCommunicatorsOfTheirOwn) {
  on_gpus(4, [](int rank) {
    const std::shared_ptr<Group> parity = world().split(rank % 2);
    Tensor x = on_gpu(full({3}, rank + 1.0));
    all_reduce(x, ReduceOp::kSum, *parity);
    EXPECT_EQ(values(x)[0], rank % 2 == 0 ? 4 : 6);
    const std::vector<int> members = {1, 2, 3};
    const std::shared_ptr<Group> three =
        world().subgroup(rank == 0 ? std::span<const int>() : std::span<const int>(members));
    EXPECT_EQ(three == nullptr, rank == 0);
    if (three) {
      x = on_gpu(full({3}, rank + 1.0));
      all_reduce(x, ReduceOp::kSum, *three);
      EXPECT_EQ(values(x)[0], 9);
      three->shutdown();
    }
    parity->shutdown();
  });
  EXPECT_GE(calls("ncclCommSplit"), 8);
}

TEST_F(CudaNccl, TensorsOfAnotherDeviceAreRefused) {
  on_gpus(2, [](int) {
    const Tensor x = full({3}, 1.0).to(cuda(2));
    const std::string message = message_of<DeviceError>([&] { world().all_reduce(x); });
    EXPECT_TRUE(contains(message, "does not carry tensors of cuda:2")) << message;
  });
}

TEST_F(CudaNccl, CallsAreComparedBeforeDataMovesWhereAsked) {
  const GpuRanks compared{.backend = {.compare_calls = true}, .fails = true};
  on_gpus(
      2,
      [](int rank) {
        const Tensor x = on_gpu(full({3}, rank + 1.0));
        all_reduce(x);
        EXPECT_EQ(values(x)[0], 3);
        const std::string message = message_of<DistributedError>([&] {
          if (rank == 0) {
            all_reduce(x);
          } else {
            broadcast(x, 0);
          }
        });
        EXPECT_TRUE(contains(message, "ranks call different things here")) << message;
        EXPECT_TRUE(contains(message, "broadcast #2")) << message;
        const Tensor slice = on_gpu(full({2}, 7.0)), input = on_gpu(full({4}, 1.0));
        const std::string other = message_of<DistributedError>([&] {
          (rank == 0 ? world().reduce_scatter_onto(slice, input)
                     : world().reduce_scatter(slice, input))
              .wait();
        });
        EXPECT_TRUE(contains(other, "reduce_scatter #3 (sum onto, f32[4])")) << other;
        EXPECT_EQ(values(slice), std::vector<float>(2, 7));
      },
      compared);
  EXPECT_EQ(calls("ncclBroadcast"), 0);
  EXPECT_EQ(calls("ncclReduceScatter"), 0);
}

TEST_F(CudaNccl, TheFingerprintOfCallsTellsASumThatGoesOn) {
  const auto fingerprint = [](bool onto) {
    std::optional<uint64_t> found;
    on_gpus(2, [&](int rank) {
      const Tensor slice = on_gpu(full({2}, 7.0)), input = on_gpu(full({4}, 1.0));
      const CollectiveOptions options{.channel = Channel::kGradient};
      (onto ? world().reduce_scatter_onto(slice, input, options)
            : world().reduce_scatter(slice, input, ReduceOp::kSum, options))
          .wait();
      EXPECT_EQ(values(slice), std::vector<float>(2, onto ? 9 : 2));
      if (rank == 0) found = world().backend().fingerprint();
    });
    return found;
  };
  EXPECT_EQ(fingerprint(true), fingerprint(true));
  EXPECT_NE(fingerprint(true), fingerprint(false));
}

TEST_F(CudaNccl, WhatWaitsTooLongAbortsTheGroupAndTheNextCallSaysSo) {
  on_gpus(2,
          [](int rank) {
            const Tensor x = on_gpu(full({3}, rank + 1.0));
            all_reduce(x);  // the channel's communicator needs both
            if (rank == 1) return;
            Work work = world().all_reduce(x, ReduceOp::kSum, {.timeout_seconds = 0.05});
            work.wait();
            gpu::synchronize(rank);  // the stream goes on when the watcher has aborted
            const std::string message = message_of<DistributedError>([&] { all_reduce(x); });
            EXPECT_TRUE(contains(message, "all_reduce #2")) << message;
            EXPECT_TRUE(contains(message, "s on the GPU")) << message;
          },
          {.fails = true});
}

TEST_F(CudaNccl, AnAbortedGroupQuotesItsReason) {
  on_gpus(2,
          [](int rank) {
            const Tensor x = on_gpu(full({3}, rank + 1.0));
            all_reduce(x);
            gpu::synchronize(rank);
            barrier();
            world().abort("enough");
            const std::string message = message_of<DistributedError>([&] { all_reduce(x); });
            EXPECT_TRUE(contains(message, "enough")) << message;
          },
          {.fails = true});
  EXPECT_GE(calls("ncclCommAbort"), 2);
}

struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 8, 32)),
        second(add<nn::Linear>("second", 32, 16)),
        third(add<nn::Linear>("third", 16, 4)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))); }
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& third;
};

// The gradients of rank 0 after three steps of plain descent.
std::vector<std::vector<float>> train(bool on_devices,
                                      const std::optional<PowerSgdOptions>& compressed = {}) {
  std::vector<std::vector<float>> gradients;
  const auto body = [&](int rank) {
    const Device device = on_devices ? cuda(rank) : kCpu;
    manual_seed(static_cast<uint64_t>(11 + rank));  // rank 0's parameters are everybody's
    Net model;
    model.to(device);
    Mesh mesh(world());
    Replica replica = replicate(model, mesh, {.first_bucket_bytes = 1024, .bucket_bytes = 1200});
    if (compressed) {
      replica.set_communication_hook(std::make_shared<PowerSgdHook>(*compressed));
    }
    for (uint64_t step = 0; step < 3; ++step) {
      const RandomStream stream{5, 10 * step + static_cast<uint64_t>(rank)};
      const Tensor y = model(randn({6, 8}, {}, stream).to(device));
      if (step > 0) model.zero_grad();
      (y * y).mean().backward();
      const NoGradGuard no_grad;
      for (const Tensor& parameter : model.parameters()) {
        copy_(parameter, parameter - parameter.grad() * 0.1);
      }
    }
    if (rank != 0) return;
    for (const Tensor& parameter : model.parameters()) {
      gradients.push_back(values(parameter.grad()));
    }
  };
  if (on_devices) {
    on_gpus(2, body);
  } else {
    compared_ranks(2, body);
  }
  return gradients;
}

TEST_F(CudaNccl, ReplicatedTrainingHasTheGradientsOfTheCpus) {
  const std::vector<std::optional<PowerSgdOptions>> hooks{
      std::nullopt, PowerSgdOptions{.rank = 2, .start_step = 1},
      PowerSgdOptions{.rank = 2, .start_step = 1, .batched = true}};
  for (size_t hook = 0; hook < hooks.size(); ++hook) {
    const auto& compressed = hooks[hook];
    const auto expected = train(false, compressed), got = train(true, compressed);
    ASSERT_EQ(expected.size(), got.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(expected[i].size(), got[i].size());
      for (size_t j = 0; j < expected[i].size(); ++j) {
        EXPECT_NEAR(got[i][j], expected[i][j], 1e-6 + 1e-5 * std::abs(expected[i][j]))
            << "parameter " << i << " element " << j << ", hook " << hook;
      }
    }
  }
  EXPECT_GE(calls("ncclAllReduce"), 2 * 3 * 2);  // several buckets in each step of each rank
}

enum class Sharded { kNot, kZero1, kZero2, kFully };

// The parameters of all ranks after three clipped steps with momentum, of two micro-batches each.
std::vector<std::vector<float>> train_in_parts(bool on_devices, Sharded sharded) {
  std::vector<std::vector<float>> parameters;
  const auto body = [&](int rank) {
    const Device device = on_devices ? cuda(rank) : kCpu;
    manual_seed(static_cast<uint64_t>(11 + rank));
    Net model;
    model.to(device);
    Mesh mesh(world());
    std::unique_ptr<DataParallelModel> parallel;
    constexpr auto kAverage = GradientAverage::kWindow;
    if (sharded == Sharded::kNot) {
      parallel = std::make_unique<Replica>(replicate(model, mesh, {.average = kAverage}));
    } else if (sharded == Sharded::kFully) {
      for (const auto& [name, child] : model.named_children()) fully_shard(*child, mesh);
      fully_shard(model, mesh, {.average = kAverage});
      parallel = std::make_unique<ShardedModel>(sharded_model(model));
    } else {
      parallel = std::make_unique<ShardedModel>(zero(model, mesh,
                                                     {.stage = sharded == Sharded::kZero1 ? 1 : 2,
                                                      .first_bucket_bytes = 1024,
                                                      .bucket_bytes = 1200,
                                                      .average = kAverage}));
    }
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1, .momentum = 0.9});
    for (uint64_t step = 0; step < 3; ++step) {
      for (int64_t micro = 0; micro < 2; ++micro) {
        StepPlan plan = StepPlan::of(micro, 2);
        plan.sync_gradients = plan.sync_gradients || parallel->reduces_every_backward();
        parallel->set_plan(plan);
        const RandomStream stream{5, 10 * step + static_cast<uint64_t>(2 * micro + rank)};
        const Tensor y = model(randn({6, 8}, {}, stream).to(device));
        (y * y).mean().backward();
      }
      optim::clip_grad_norm(model.parameters(), 0.1, {.fold_into = &optimizer});
      optimizer.step();
      optimizer.zero_grad();
    }
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) {
      std::vector<float> all = values(is_dtensor(parameter) ? full_tensor(parameter) : parameter);
      if (rank == 0) parameters.push_back(std::move(all));
    }
  };
  if (on_devices) {
    on_gpus(2, body);
  } else {
    compared_ranks(2, body);
  }
  return parameters;
}

TEST_F(CudaNccl, ShardedTrainingHasTheParametersOfTheCpus) {
  const auto expected = train_in_parts(false, Sharded::kNot);
  for (const Sharded sharded : {Sharded::kNot, Sharded::kZero1, Sharded::kZero2, Sharded::kFully}) {
    const auto got = train_in_parts(true, sharded);
    ASSERT_EQ(expected.size(), got.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(expected[i].size(), got[i].size());
      for (size_t j = 0; j < expected[i].size(); ++j) {
        EXPECT_NEAR(got[i][j], expected[i][j], 1e-6 + 1e-5 * std::abs(expected[i][j]))
            << "parameter " << i << " element " << j << ", mode " << static_cast<int>(sharded);
      }
    }
  }
  EXPECT_GT(calls("ncclReduceScatter"), 0);
  EXPECT_GT(calls("ncclAllGather"), 0);
}

struct Rows : data::Dataset<std::array<Tensor, 2>> {
  int64_t size() const override { return 26; }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {randn({8}, {}, RandomStream{3, static_cast<uint64_t>(index)}),
            full({}, static_cast<double>(index % 4)).to(kI64)};
  }
};

// The losses of two epochs with the facade, averaged over two ranks; on rank 0.
std::vector<double> accelerated(bool on_devices) {
  std::vector<double> losses;
  const auto body = [&](int rank) {
    manual_seed(static_cast<uint64_t>(5 + rank));
    Accelerator accelerator({.gradient_accumulation_steps = 2, .cpu = !on_devices});
    Net model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    const Rows rows;
    data::DataLoader loader(rows, {.batch_size = 4, .shuffle = true, .workers = 1});
    accelerator.prepare(model, optimizer, loader);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const auto& [inputs, targets] : loader) {
        EXPECT_EQ(inputs.device(), on_devices ? cuda(rank) : kCpu);
        const auto micro = accelerator.accumulate(model);
        const Tensor loss = cross_entropy(model(inputs), targets);
        accelerator.backward(loss);
        accelerator.clip_grad_norm(model.parameters(), 1);
        optimizer.step();
        optimizer.zero_grad();
        const double mean = accelerator.reduce(loss.detach()).item();
        if (rank == 0) losses.push_back(mean);
      }
    }
  };
  if (on_devices) {
    on_gpus(2, body);
  } else {
    compared_ranks(2, body);
  }
  return losses;
}

TEST_F(CudaNccl, TheAcceleratorTrainsRanksWithAGpuEach) {
  const std::vector<double> expected = accelerated(false), got = accelerated(true);
  ASSERT_EQ(expected.size(), 8u);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << i;
}

TEST_F(CudaNccl, CallsThatDifferWithoutAnErrorOfNcclAreSeenAtTheEndOfBackward) {
  on_gpus(2,
          [](int rank) {
            Net model;
            model.to(cuda(rank));
            Mesh mesh(world());
            const Replica replica = replicate(model, mesh);
            EXPECT_EQ(replica.report().used_map.bytes, 6 + 1 + 16);
            const auto backward = [&] {
              model.zero_grad();
              const Tensor y = model(on_gpu(ones({6, 8})));
              (y * y).mean().backward();
            };
            const Tensor x = on_gpu(full({3}, rank + 1.0));
            const auto reduce = [&](ReduceOp op, Channel channel) {
              world().all_reduce(x, op, {.channel = channel}).wait();
            };
            backward();
            reduce(ReduceOp::kMax, Channel::kModule);
            backward();
            // NCCL reduces with the operation of whoever comes last.
            reduce(rank == 0 ? ReduceOp::kSum : ReduceOp::kMax, Channel::kModule);
            const std::string message = message_of<DistributedError>(backward);
            EXPECT_TRUE(contains(message, "must call the same collectives of GPUs")) << message;
            gpu::synchronize(rank);
          },
          {.fails = true});
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_nccl
