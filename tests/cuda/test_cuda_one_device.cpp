// Ranks that share one GPU: every collective has the bits of the CPU's ranks, and trainings in every
// mode have theirs whatever order streams take. test_cuda_sharding compares with a device each.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/fully_shard/zero.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/backend_one_device.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/run_ranks.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "../distributed/compared_ranks.h"
#include "../distributed/fault_backend.h"
#include "../message_of.h"
#include "on_emulation.h"
#include "sharded_blocks.h"

namespace tessera::distributed::test_cuda_one_device {
namespace {

// Where there are several, cuda:0 is not taken for granted.
Device shared_device() { return gpu::last_device(); }

void share(int size, const std::function<void(int rank)>& body) {
  compared_ranks(size, body, {.device = shared_device(), .decorate = with_faults()});
}

std::vector<float> values(const Tensor& x) { return x.to(kCpu).to_vector<float>(); }
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Collectives begin on a rank when its host comes to them, which takes a drawn time.
void delay_collectives(uint64_t seed, int rank) {
  if (gpu::on_emulation()) gpu::emulation::set_seed(seed);
  faults().before_start =
      [random = std::mt19937_64(seed * 8 + static_cast<uint64_t>(rank))](const Call&) mutable {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        return true;
      };
}

// What a rank gets from each collective, on a device.
std::vector<std::vector<double>> collectives(const Device& device, DType dtype, int rank,
                                             int size) {
  std::vector<std::vector<double>> results;
  const auto note = [&](const Tensor& x) { results.push_back(x.to(kCpu).to_vector()); };
  uint64_t number = 0;
  const auto mine = [&](const Shape& shape) {
    const RandomStream stream{5, 100 * ++number + static_cast<uint64_t>(rank)};
    const Tensor x = randn(shape, {}, stream);
    return (is_floating(dtype) ? x : x.abs() * 50).to(dtype).to(device) * 1;  // * 1 is queued
  };
  const auto room = [&](const Shape& shape) { return zeros(shape, {dtype, device}); };
  Group& group = world();
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
    if (op == ReduceOp::kMean && !is_floating(dtype)) continue;
    const Tensor x = mine({301});
    group.all_reduce(x, op).wait();
    note(x);
    const Tensor root = mine({7});
    group.reduce(root, 1, op).wait();
    if (rank == 1) note(root);
    const Tensor part = room({5});
    group.reduce_scatter(part, mine({5 * size}), op).wait();
    note(part);
  }
  // What a GPU's group adds after the others' sum: small numbers, which have one sum.
  const Tensor onto = full({4}, 3, {dtype, device}), piece = full({4}, rank + 1, {dtype, device});
  group.reduce_scatter_onto(onto, std::vector<Tensor>(static_cast<size_t>(size), piece)).wait();
  note(onto);
  const Tensor whole = room({3 * size});
  group.all_gather(whole, mine({3})).wait();
  note(whole);
  for (const Tensor& one : all_gather_ragged(mine({rank + 1, 2}))) note(one);
  const Tensor sent = mine({6});
  group.broadcast(sent, size - 1).wait();
  note(sent);
  std::vector<Tensor> inputs, outputs;
  for (int s = 0; s < size; ++s) {
    inputs.push_back(mine({rank + s + 1}));
    outputs.push_back(room({rank + s + 1}));
  }
  group.all_to_all(outputs, inputs).wait();
  for (const Tensor& output : outputs) note(output);
  const Tensor from = room({4});
  const Work ring = group.send(mine({4}), (rank + 1) % size, 7);
  group.recv(from, (rank + size - 1) % size, 7).wait();
  ring.wait();
  note(from);
  const Tensor transposed = transpose(mine({2, 3}), 0, 1);
  all_reduce(transposed);
  note(transposed);
  const Tensor on_cpu = full({3}, rank);
  all_reduce(on_cpu);
  note(on_cpu);
  all_reduce(room({0}));
  barrier();
  return results;
}

TEST(CudaOneDevice, EveryCollectiveHasTheBitsOfTheCpu) {
  for (const DType dtype : {kF32, kF64, kBF16, kF16, kI64, kI32, kU8}) {
    for (const int size : {2, 3, 4}) {
      std::vector<std::vector<std::vector<double>>> expected(static_cast<size_t>(size)),
          got(static_cast<size_t>(size));
      compared_ranks(size, [&](int rank) {
        expected[static_cast<size_t>(rank)] = collectives(kCpu, dtype, rank, size);
      });
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        share(size, [&](int rank) {
          delay_collectives(seed, rank);
          got[static_cast<size_t>(rank)] = collectives(shared_device(), dtype, rank, size);
        });
        for (size_t rank = 0; rank < got.size(); ++rank) {
          ASSERT_EQ(got[rank].size(), expected[rank].size());
          for (size_t i = 0; i < got[rank].size(); ++i) {
            EXPECT_TRUE(got[rank][i] == expected[rank][i])
                << dtype << ", rank " << rank << " of " << size << ", result " << i << ", seed "
                << seed;
          }
        }
      }
    }
  }
}

// ---- Trainings ---------------------------------------------------------------------------------

enum class Mode { kReplicas, kZero1, kZero2, kFsdp, kHsdp, kKept, kOffload };
constexpr Mode kModes[] = {Mode::kReplicas, Mode::kZero1, Mode::kZero2,  Mode::kFsdp,
                           Mode::kHsdp,     Mode::kKept,  Mode::kOffload};

struct Trained {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
  friend bool operator==(const Trained&, const Trained&) = default;
};

// Of rank 0.
void train(Mode mode, const Device& device, int rank, int size, Trained* trained) {
  manual_seed(3);
  Blocks model(9, 2);
  model.to(device);
  Mesh mesh = mode == Mode::kHsdp ? Mesh(world(), {{"dp_replicate", 2}, {"dp_shard", size / 2}})
                                  : Mesh(world());
  std::unique_ptr<DataParallelModel> parallel;
  if (mode == Mode::kReplicas) {
    parallel = std::make_unique<Replica>(replicate(model, mesh, {.bucket_bytes = 1200}));
  } else if (mode == Mode::kZero1 || mode == Mode::kZero2) {
    parallel = std::make_unique<ShardedModel>(zero(
        model, mesh,
        {.stage = mode == Mode::kZero1 ? 1 : 2, .first_bucket_bytes = 1200, .bucket_bytes = 2000}));
  } else {
    FullyShardOptions options;
    options.reshard_after_forward = mode != Mode::kKept;
    if (mode == Mode::kOffload && device.is_cuda()) {
      options.offload_policy = OffloadPolicy::kParameters;
    }
    for (Block* block : model.blocks) fully_shard(*block, mesh, options);
    fully_shard(model, mesh, options);
    parallel = std::make_unique<ShardedModel>(sharded_model(model));
  }
  optim::SGD optimizer(model.named_parameters(), {.lr = 1, .momentum = 0.9});
  for (int step = 0; step < 2; ++step) {
    const RandomStream stream{7, static_cast<uint64_t>(10 * step + rank)};
    const Tensor y = model(randn({3, 5}, {}, stream).to(device));
    const Tensor loss = (y * y).mean();
    loss.backward();
    const Tensor norm = optim::clip_grad_norm(model.parameters(), 0.1, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    if (rank == 0) {
      trained->losses.push_back(loss.to(kCpu).item());
      trained->norms.push_back(norm.to(kCpu).item());
    }
  }
  const NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) {
    std::vector<float> whole = values(is_dtensor(parameter) ? full_tensor(parameter) : parameter);
    if (rank == 0) trained->values.push_back(std::move(whole));
  }
}

TEST(CudaOneDevice, TrainingsHaveOneResultInEveryModeAndOrder) {
  for (const Mode mode : kModes) {
    for (const int size : {2, 4}) {
      if (mode == Mode::kHsdp ? size == 2 : size == 4 && mode > Mode::kFsdp) continue;
      SCOPED_TRACE(testing::Message() << "mode " << static_cast<int>(mode) << ", " << size);
      Trained first, on_cpu;
      compared_ranks(size, [&](int rank) { train(mode, kCpu, rank, size, &on_cpu); });
      for (uint64_t seed = 1; seed <= 2; ++seed) {
        Trained shared;
        share(size, [&](int rank) {
          delay_collectives(seed, rank);
          train(mode, shared_device(), rank, size, &shared);
        });
        if (seed == 1) first = shared;
        EXPECT_TRUE(shared == first) << "seed " << seed;
        for (size_t i = 0; i < shared.losses.size(); ++i) {
          EXPECT_NEAR(shared.losses[i], on_cpu.losses[i], 1e-5 * std::abs(on_cpu.losses[i]));
        }
      }
    }
  }
}

// ---- Order -------------------------------------------------------------------------------------

enum class Mistake {
  kNone,
  kSkipBegin,  // the transfer does not wait for what was calculated before
  kSkipEnd,    // who waits goes on without the result
};

// How often a sum is read before it is there, or taken before what it adds up is there.
int wrong_sums(Mistake mistake) {
  std::atomic<int> wrong = 0;
  compared_ranks(
      2,
      [&](int rank) {
        delay_collectives(11, rank);
        const auto idle = gpu::make_stream(shared_device().index);
        if (mistake == Mistake::kSkipBegin) {
          faults().around_start = [idle](const auto& start) {
            const gpu::CurrentStream elsewhere(idle);
            start();
          };
        }
        const Tensor one = full({16}, 1.0, {kF32, shared_device()});
        for (int round = 0; round < 30; ++round) {
          const Tensor x = one * 1;
          const Work work = world().all_reduce(x, ReduceOp::kSum, {.channel = Channel::kGradient});
          {
            std::optional<gpu::CurrentStream> elsewhere;  // another stream waits
            if (mistake == Mistake::kSkipEnd) elsewhere.emplace(idle);
            work.wait();
          }
          try {
            if (values(x)[0] != 2) ++wrong;
            gpu::synchronize(shared_device().index);
          } catch (const std::exception&) {  // the emulation refuses what is not there any more
            ++wrong;
          }
        }
        faults() = {};
      },
      {.device = shared_device(), .decorate = with_faults()});
  return wrong;
}

TEST(CudaOneDevice, EventsThatAreMissingShow) {
  TS_NEEDS_EMULATION("draws the order of streams");
  EXPECT_EQ(wrong_sums(Mistake::kNone), 0);
  EXPECT_GT(wrong_sums(Mistake::kSkipBegin), 0);
  EXPECT_GT(wrong_sums(Mistake::kSkipEnd), 0);
}

// What comes to lie where its tensor was is written after the transfer.
TEST(CudaOneDevice, ACallThatNobodyWaitsForKeepsItsMemory) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    share(2, [&](int rank) {
      delay_collectives(seed, rank);
      const Tensor one = full({64}, 1.0, {kF32, shared_device()});
      for (int i = 0; i < 5; ++i) {
        {
          const Tensor x = one * 1;
          const Work dropped = world().all_reduce(x);
        }
        const Tensor other = one * 777;
        EXPECT_EQ(values(other), std::vector<float>(64, 777)) << "seed " << seed;
      }
      barrier();
    });
  }
}

TEST(CudaOneDevice, MistakesAreErrorsOnEveryRankAtOnce) {
  const std::string devices = message_of([&] {
    failing_ranks("they call unlike", 2,
                  [&](int rank) {
                    const Tensor x = rank == 0 ? zeros({4}) : zeros({4}, {kF32, shared_device()});
                    all_reduce(x);
                  },
                  {.device = shared_device()});
  });
  EXPECT_TRUE(contains(devices, "ranks gave tensors of different devices")) << devices;
  const std::string sizes = message_of([&] {
    failing_ranks("they call unlike", 2,
                  [&](int rank) {
                    all_reduce(zeros({4 + rank}, {kF32, shared_device()}));
                  },
                  {.device = shared_device()});
  });
  EXPECT_TRUE(contains(sizes, "f32[5]")) << sizes;
  const std::string none = message_of([&] {
    failing_ranks("none of them calls", 2, [&](int) {
      all_reduce(zeros({4}, {kF32, shared_device()}));
    });
  });
  EXPECT_TRUE(contains(none, "does not carry tensors of cuda")) << none;
}

}  // namespace
}  // namespace tessera::distributed::test_cuda_one_device
