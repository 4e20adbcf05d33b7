// What every mode keeps on a rank, calculated here from shapes alone: to the byte, for odd sizes;
// the share of a model of GPT-2's form; and peaks that follow from the order of the calls.
// ctest labels: threads
#include <chrono>
#include <random>
#include <thread>

#include <tessera/nn/models/gpt2.h>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"
#include "thinned.h"

namespace tessera::distributed::test_shard_memory {
namespace {

constexpr Way kAllWays[] = {Way::kReplicate, Way::kZero1,     Way::kZero2,
                            Way::kFully,     Way::kFullyKept, Way::kZero3};
constexpr int64_t kFloat = sizeof(float);

int64_t held(MemoryCategory category) { return memory_stats()->current(category); }

// ---- The formula -------------------------------------------------------------------------------

// Of one element, of fewer rows than ranks, of rows that do not divide, frozen.
struct Uneven : nn::Module<Uneven> {
  Uneven()
      : first(add<nn::Linear>("first", 8, 35)),
        frozen(add<nn::Linear>("frozen", 35, 35)),
        last(add<nn::Linear>("last", 35, 3)),
        gain(parameter("gain", tessera::ones({1}))) {
    for (const Tensor& tensor : frozen.parameters()) tensor.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x) { return last(relu(frozen(first(x)))) * gain; }
  nn::Linear& first;
  nn::Linear& frozen;
  nn::Linear& last;
  const Tensor& gain;
};

struct Sized {
  int64_t rows, numel;
  bool trains;
};
using SizedUnits = std::vector<std::vector<Sized>>;

SizedUnits units_of(nn::ModuleBase& model) {
  SizedUnits units;
  const auto sizes = [](const NamedTensors& tensors) {
    std::vector<Sized> list;
    for (const auto& [name, tensor] : tensors) {
      list.push_back({tensor.size(0), tensor.numel(), tensor.requires_grad()});
    }
    return list;
  };
  std::vector<Sized> root;
  for (const auto& [name, tensor] : model.named_parameters()) {
    if (name.find('.') == std::string::npos) {
      root.push_back({tensor.size(0), tensor.numel(), tensor.requires_grad()});
    }
  }
  for (const auto& [name, child] : model.named_children()) {
    units.push_back(sizes(child->named_parameters()));
  }
  units.push_back(root);
  return units;
}

// Tensors begin at multiples of 16 bytes.
int64_t room_of(int64_t numel) { return (numel + 3) / 4 * 4; }

struct Owned {
  int64_t parameters = 0, gradients = 0, states = 0;  // bytes
};

// Parts of a run begin at cache lines.
int64_t part_of_run(int64_t numel, int ranks) {
  const int64_t part = (numel + ranks - 1) / ranks;
  return (part + 15) / 16 * 16;
}

// AdamW keeps two states of what a rank updates.
Owned owned_by(Way way, const SizedUnits& units, int ranks, int rank, int64_t bucket_bytes) {
  Owned owned;
  if (way == Way::kReplicate) {
    for (const auto& unit : units) {
      for (const Sized& one : unit) {
        owned.parameters += one.numel * kFloat;
        if (!one.trains) continue;
        owned.gradients += room_of(one.numel) * kFloat;
        owned.states += 2 * one.numel * kFloat;
      }
    }
    return owned;
  }
  if (way != Way::kZero1 && way != Way::kZero2) {
    for (const auto& unit : units) {
      for (const Sized& one : unit) {
        const int64_t chunk = (one.rows + ranks - 1) / ranks, row = one.numel / one.rows;
        const int64_t rows = std::clamp<int64_t>(one.rows - rank * chunk, 0, chunk);
        owned.parameters += room_of(chunk * row) * kFloat;
        if (!one.trains) continue;
        owned.gradients += room_of(chunk * row) * kFloat;
        owned.states += 2 * rows * row * kFloat;
      }
    }
    return owned;
  }
  // Buckets from the last parameter to the first; frozen ones stay whole.
  std::vector<Sized> trained;
  for (const auto& unit : {units.back(), units[0], units[1], units[2]}) {
    for (const Sized& one : unit) {
      if (one.trains) {
        trained.push_back(one);
      } else {
        owned.parameters += one.numel * kFloat;
      }
    }
  }
  std::ranges::reverse(trained);
  int64_t run = 0, bytes = 0, bucket = 0;
  std::vector<std::pair<int64_t, int64_t>> places;  // in the run: begin and end
  const auto close = [&] {
    const int64_t part = part_of_run(run, ranks);
    owned.parameters += part * ranks * kFloat;
    owned.gradients += part * (way == Way::kZero1 ? ranks : 1) * kFloat;
    for (const auto& [begin, end] : places) {
      const int64_t own = std::min(end, (rank + 1) * part) - std::max(begin, rank * part);
      owned.states += 2 * std::max<int64_t>(own, 0) * kFloat;
    }
    places.clear();
    run = bytes = 0, ++bucket;
  };
  for (const Sized& one : trained) {
    places.push_back({run, run + one.numel});
    run += room_of(one.numel), bytes += one.numel * kFloat;
    if (bytes >= (bucket == 0 ? bucket_bytes / 6 : bucket_bytes)) close();
  }
  if (run > 0) close();
  return owned;
}

TEST(ShardMemory, EveryModeKeepsTheBytesOfItsFormula) {
  for (const Way way : kAllWays) {
    for (const int size : tests::thinned({2, 3, 4}, 3)) {
      for (const int64_t bucket_bytes : {600, 6000, 1 << 20}) {
        SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(size) + ", buckets of " +
                     std::to_string(bucket_bytes));
        compared_ranks(size, [&](int rank) {
          const int64_t before = held(MemoryCategory::kParameter);
          Uneven model;
          const Owned owned = owned_by(way, units_of(model), size, rank, bucket_bytes);
          Mesh mesh(world());
          std::unique_ptr<DataParallelModel> parallel;
          if (way == Way::kReplicate) {
            ReplicateOptions options;
            options.first_bucket_bytes = bucket_bytes / 6, options.bucket_bytes = bucket_bytes;
            parallel = std::make_unique<Replica>(replicate(model, mesh, options));
          } else {
            parallel = shard_in(way, model, mesh, {.bucket_bytes = bucket_bytes});
          }
          optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
          for (int step = 0; step < 3; ++step) {
            loss_of(model, step * size + rank).backward();
            EXPECT_EQ(held(MemoryCategory::kParameter) - before, owned.parameters);
            EXPECT_EQ(held(MemoryCategory::kGradient), owned.gradients);
            EXPECT_EQ(held(MemoryCategory::kUnsharded), 0);
            EXPECT_EQ(held(MemoryCategory::kCommunication), 0);
            optimizer.step();
            EXPECT_EQ(held(MemoryCategory::kOptimizer), owned.states);
            optimizer.zero_grad();
          }
        });
      }
    }
  }
}

// ---- The share of a rank -----------------------------------------------------------------------

// Parameters, gradients and states after a step's backward.
int64_t kept_by_a_step(nn::models::Gpt& model, int rank) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
  const Tensor tokens = randint(0, 256, {1, 9}, kI64, RandomStream{7, static_cast<uint64_t>(rank)});
  model(tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous()).loss.backward();
  EXPECT_EQ(held(MemoryCategory::kUnsharded), 0);
  EXPECT_EQ(held(MemoryCategory::kCommunication), 0);
  optimizer.step();
  return held(MemoryCategory::kParameter) + held(MemoryCategory::kGradient) +
         held(MemoryCategory::kOptimizer);
}

TEST(ShardMemory, ARankOfFourKeepsAQuarterOfAGpt) {
  constexpr int kRanks = 4;
  const nn::models::GptConfig config{
      .vocab_size = 256, .context = 8, .width = 384, .layers = 12, .heads = 6};
  int64_t whole = 0;
  for (const bool shards : {false, true}) {
    compared_ranks(kRanks, [&](int rank) {
      nn::models::Gpt model(config);
      Mesh mesh(world());
      std::unique_ptr<DataParallelModel> parallel;
      if (shards) {
        const FullyShardOptions unit{.reshard_after_forward = true};
        for (size_t i = 0; i < model.transformer.h.num_children(); ++i) {
          fully_shard(model.transformer.h.child(i), mesh, unit);
        }
        fully_shard(model, mesh, unit);
        parallel = std::make_unique<ShardedModel>(sharded_model(model));
      } else {
        parallel = std::make_unique<Replica>(replicate(model, mesh));
      }
      const int64_t kept = kept_by_a_step(model, rank);
      if (!shards) {
        EXPECT_EQ(kept, 4 * kFloat * model.num_parameters());
        if (rank == 0) whole = kept;
      } else {
        EXPECT_LE(static_cast<double>(kept), 0.27 * static_cast<double>(whole));
      }
    });
  }
}

// ---- Peaks -------------------------------------------------------------------------------------

// Where ranks and calls are late by chance, in forward, in backward and on the way.
TEST(ShardMemory, TenRunsWithDelaysHaveOnePeakInEveryMode) {
  constexpr int kRanks = 3;
  constexpr MemoryCategory kWatched[] = {MemoryCategory::kUnsharded, MemoryCategory::kGradient,
                                         MemoryCategory::kCommunication,
                                         MemoryCategory::kActivation, MemoryCategory::kParameter};
  for (const Way way : kAllWays) {
    SCOPED_TRACE(name_of(way));
    std::vector<std::vector<int64_t>> expected(kRanks);
    for (unsigned run = 0; run < (tests::sanitized() ? 4U : 10U); ++run) {
      SCOPED_TRACE(run);
      compared_ranks(
          kRanks,
          [&](int rank) {
            const auto random = std::make_shared<std::mt19937>(run * kRanks + rank + 1);
            const auto late = [run, random] {
              if (run == 0) return;
              std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 700));
            };
            // Calls of other threads have a sequence of their own.
            const auto others = std::make_shared<std::mt19937>(run * kRanks + rank + 1000);
            faults().before_start = [run, others](const Call&) {
              if (run > 0) {
                std::this_thread::sleep_for(std::chrono::microseconds((*others)() % 700));
              }
              return true;
            };
            manual_seed(3);
            Odd model;
            model.in_the_middle = [&](const Tensor& h) {
              late();
              register_hook(h, [late](const Tensor&) {
                late();
                return Tensor();
              });
              return h;
            };
            Mesh mesh(world());
            const auto parallel = shard_in(way, model, mesh);
            optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
            std::vector<int64_t> peaks;
            for (int step = 0; step < 3; ++step) {
              if (step == 1) memory_stats()->reset_peak();
              loss_of(model, step * kRanks + rank).backward();
              optimizer.step();
              optimizer.zero_grad();
            }
            peaks.push_back(memory_stats()->peak());
            for (const MemoryCategory one : kWatched) {
              peaks.push_back(memory_stats()->peak(one));
            }
            std::vector<int64_t>& own = expected[static_cast<size_t>(rank)];
            if (run == 0) own = peaks;
            EXPECT_EQ(peaks, own);
            faults().before_start = {};
          },
          {.decorate = with_faults()});
    }
  }
}

}  // namespace
}  // namespace tessera::distributed::test_shard_memory
