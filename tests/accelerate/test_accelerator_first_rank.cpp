// What rank 0 alone has: models with memory there, and files that only it sees.
// ctest labels: threads
#include <filesystem>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/norm.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"

namespace tessera::test_accelerator_first_rank {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kFirstRankModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                        Sharding::kZero3, Sharding::kFsdp};

enum class Made { kEverywhere, kOnRankZero, kNowhere };

AcceleratorOptions asking(Sharding sharding, bool efficient) {
  return {.seed = 5,
          .sharding = sharding,
          .fsdp = {.cpu_ram_efficient_loading = efficient},
          .config_file = ""};
}

template <class Model, class... Args>
std::unique_ptr<Model> made(Made how, int rank, Args... args) {
  const bool real = how == Made::kEverywhere || (how == Made::kOnRankZero && rank == 0);
  const nn::ParameterDefaultsGuard guard({.device = real ? kCpu : kMeta});
  return std::make_unique<Model>(args...);
}

// Rank 0's weights differ from those that a seed gives.
Values trained(const AcceleratorOptions& options, Made how, int rank, int epochs = 1) {
  manual_seed(5);
  const auto model = made<Words>(how, rank);
  if (!model->norm.weight.is_meta() && how != Made::kNowhere) {
    const NoGradGuard no_grad;
    mul_(model->norm.weight, Scalar(rank == 0 ? 0.5 : 7.0));
  }
  Accelerator accelerator(options);
  optim::AdamW optimizer(model->named_parameters(), {.lr = 1e-2});
  data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2, .shuffle = true});
  accelerator.prepare(*model, optimizer, loader);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(*model);
      accelerator.backward(
          cross_entropy((*model)(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
      optimizer.step(), optimizer.zero_grad();
    }
  }
  return whole_values(*model);
}

Values trained_on(int ranks, const AcceleratorOptions& options, Made how) {
  Values values;
  compared_ranks(ranks, [&](int rank) {
    const Values own = trained(options, how, rank);
    if (rank == 0) values = own;
  });
  return values;
}

TEST(FirstRank, AModelThatIsMadeOnRankZeroAloneTrainsAsOneThatIsMadeEverywhere) {
  for (const Sharding sharding : kFirstRankModes) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(sharding) << " on " << ranks);
      const Values expected = trained_on(ranks, asking(sharding, false), Made::kEverywhere);
      EXPECT_TRUE(trained_on(ranks, asking(sharding, true), Made::kEverywhere) == expected);
      EXPECT_TRUE(trained_on(ranks, asking(sharding, true), Made::kOnRankZero) == expected);
    }
  }
}

TEST(FirstRank, ReplicasOfShardsGetRankZerosValuesToo) {
  AcceleratorOptions options = asking(Sharding::kFsdp, true);
  options.dp_replicate_size = 2;
  const Values expected = trained_on(4, options, Made::kEverywhere);
  EXPECT_TRUE(trained_on(4, options, Made::kOnRankZero) == expected);
  const std::string folder = testing::TempDir() + "first_rank_replicas";
  Words saved;
  save_model(saved, folder);
  compared_ranks(4, [&](int rank) {
    Words model;
    Accelerator accelerator(options);
    accelerator.prepare(model);
    accelerator.load_model(model, rank == 0 ? folder : "/nowhere");
    EXPECT_TRUE(whole_values(model) == whole_values(saved));
  });
}

// Running statistics have memory on every rank, and values on rank 0 alone.
struct Standing : nn::Module<Standing> {
  Standing()
      : first(add<nn::Linear>("first", 1, 6)),
        norm(add<nn::BatchNorm1d>("norm", 6)),
        second(add<nn::Linear>("second", 6, 1)) {}
  Tensor forward(const Tensor& x) { return second(norm(first(x))); }
  nn::Linear& first;
  nn::BatchNorm1d& norm;
  nn::Linear& second;
};

TEST(FirstRank, BuffersComeFromRankZeroToo) {
  for (const Sharding sharding : kFirstRankModes) {
    for (const bool frozen : {false, true}) {
      compared_ranks(3, [&](int rank) {
        manual_seed(5);
        Standing plain;
        const auto model = made<Standing>(Made::kOnRankZero, rank);
        for (Standing* one : {&plain, model.get()}) {
          if (frozen) one->requires_grad_(false);
          one->eval();
          const NoGradGuard no_grad;
          for (const auto& [name, buffer] : one->named_buffers()) {
            if (one == &plain || rank == 0) fill_(buffer, 3);
          }
        }
        Accelerator accelerator(asking(sharding, true));
        accelerator.prepare(*model);
        const NoGradGuard no_grad;
        EXPECT_EQ((*model)(ones({2, 1})).to_vector<float>(), plain(ones({2, 1})).to_vector<float>())
            << static_cast<int>(sharding);
      });
    }
  }
}

// f32 masters begin with rank 0's unrounded values.
TEST(FirstRank, MastersBeginUnrounded) {
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kZero2, Sharding::kFsdp}) {
    AcceleratorOptions options = asking(sharding, true);
    options.mixed_precision = Precision::kBF16;
    options.precision_policy = PrecisionPolicy::kPure;
    const Values expected = trained_on(2, options, Made::kEverywhere);
    EXPECT_TRUE(trained_on(2, options, Made::kOnRankZero) == expected)
        << static_cast<int>(sharding);
  }
}

// Without memory on any rank every rank makes the values that one process would have.
TEST(FirstRank, AModelThatIsMadeNowhereGetsItsInitialValues) {
  const auto plain = [](const AcceleratorOptions& options, Made how) {
    Values values;
    compared_ranks(2, [&](int rank) {
      manual_seed(5);
      const auto model = made<Words>(how, rank);
      Accelerator accelerator(options);
      optim::AdamW optimizer(model->named_parameters(), {.lr = 1e-2});
      accelerator.prepare(*model, optimizer);
      const Tokens tokens(4);
      accelerator.backward((*model)(tokens.get(rank)[0].reshape({1, 6})).mean());
      optimizer.step();
      const Values own = whole_values(*model);
      if (rank == 0) values = own;
    });
    return values;
  };
  for (const Sharding sharding : kFirstRankModes) {
    for (const bool pure : {false, true}) {
      AcceleratorOptions options = asking(sharding, false);
      if (pure) {
        options.mixed_precision = Precision::kBF16;
        options.precision_policy = PrecisionPolicy::kPure;
      }
      EXPECT_TRUE(plain(options, Made::kNowhere) == plain(options, Made::kEverywhere))
          << static_cast<int>(sharding) << (pure ? " pure" : "");
    }
  }
}

struct Wide : nn::Module<Wide> {
  struct Part : nn::Module<Part> {
    Part() : fc(add<nn::Linear>("fc", 256, 256)) {}
    Tensor forward(const Tensor& x) { return fc(x); }
    nn::Linear& fc;
  };
  Wide() : parts(add<nn::ModuleList>("parts")) {
    for (int i = 0; i < 8; ++i) parts.append<Part>();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = 0; i < parts.num_children(); ++i) y = parts.child(i).call_tensor(y);
    return y;
  }
  nn::ModuleList& parts;
};

constexpr int64_t kWideBytes = 8 * (256 * 256 + 256) * 4;

TEST(FirstRank, NoOtherRankEverHoldsTheWhole) {
  for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
    compared_ranks(4, [&](int rank) {
      const auto model = made<Wide>(Made::kOnRankZero, rank);
      Accelerator accelerator(asking(sharding, true));
      memory_stats()->reset_peak();
      const int64_t before = memory_stats()->current();
      accelerator.prepare(*model);
      const int64_t unit = kWideBytes / 8;
      // Its parts, which come home from where they were made, and one unit.
      if (rank != 0) {
        EXPECT_LE(memory_stats()->peak() - before, 2 * kWideBytes / 4 + unit + 4096);
      }
      EXPECT_LE(memory_stats()->current() - before, rank == 0 ? 0 : kWideBytes / 4 + 4096)
          << "rank 0's whole has gone";
      model->call_tensor(ones({1, 256}));
    });
  }
}

TEST(FirstRank, ATensorIsWholeOnRankZeroAlone) {
  compared_ranks(4, [&](int rank) {
    distributed::Mesh mesh(distributed::world());
    const Shape shape{512, 256};
    const Tensor values = arange(512 * 256).to(kF32).reshape(shape);
    const Tensor given = rank == 0 ? values : raw::empty(shape, kF32, kMeta);
    for (const distributed::Placements& placements :
         {distributed::Placements{distributed::Shard(0)},
          distributed::Placements{distributed::FlatShard{100, 33000}}}) {
      const Tensor target =
          distributed::distribute_tensor(raw::empty(shape, kF32, kMeta), mesh, placements);
      memory_stats()->reset_peak();
      const int64_t before = memory_stats()->current();
      const Tensor part = distributed::scatter_whole(given, target);
      if (rank != 0) {
        EXPECT_LE(memory_stats()->peak() - before, part.nbytes() + 4096);
      }
      const Tensor whole = distributed::full_tensor(part);
      EXPECT_EQ(whole.to_vector<float>(), values.to_vector<float>());
    }
  });
}

// ---- Mistakes ----------------------------------------------------------------------------------

TEST(FirstRank, MemoryOnRankZeroAloneNeedsTheSetting) {
  for (const Sharding sharding : kFirstRankModes) {
    compared_ranks(2, [&](int rank) {
      const auto model = made<Words>(Made::kOnRankZero, rank);
      Accelerator accelerator(asking(sharding, false));
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(*model); });
      EXPECT_NE(message.find("rank 1 has no elements of 'embedding.weight'"), std::string::npos)
          << message;
      EXPECT_NE(message.find("set fsdp_cpu_ram_efficient_loading"), std::string::npos) << message;
    });
  }
}

TEST(FirstRank, RankZeroHasToHaveWhatOthersHave) {
  for (const bool efficient : {false, true}) {
    compared_ranks(2, [&](int rank) {
      const auto model = made<Words>(Made::kOnRankZero, 1 - rank);
      Accelerator accelerator(asking(Sharding::kFsdp, efficient));
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(*model); });
      EXPECT_NE(message.find("rank 0 has no elements of"), std::string::npos) << message;
    });
  }
}

TEST(FirstRank, ValuesThatNobodyKnowsAreAnErrorOnEveryRank) {
  compared_ranks(2, [&](int) {
    const nn::ParameterDefaultsGuard guard({.device = kMeta, .initialise = false});
    Words model;
    Accelerator accelerator(asking(Sharding::kFsdp, true));
    const std::string message = message_of<ValueError>([&] { accelerator.prepare(model); });
    EXPECT_NE(message.find("no rank has elements of Words"), std::string::npos) << message;
    EXPECT_NE(message.find("make the model on rank 0 with memory"), std::string::npos) << message;
  });
}

TEST(FirstRank, WithoutSynchronisationTheSettingIsAContradiction) {
  AcceleratorOptions options = asking(Sharding::kFsdp, true);
  options.ddp.init_sync = false;
  const std::string message = message_of<ConfigError>([&] { Accelerator accelerator(options); });
  EXPECT_NE(message.find("ddp_init_sync=false"), std::string::npos) << message;
}

// ---- Files -------------------------------------------------------------------------------------

std::string first_rank_folder(const std::string& name) {
  const std::string folder = testing::TempDir() + "first_rank_" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

TEST(FirstRank, FilesThatOnlyRankZeroSeesAreLoadedInEveryMode) {
  const std::string folder = first_rank_folder("files");
  manual_seed(77);
  Words saved;
  save_model(saved, folder, {.max_shard_size = "4KB"});
  const Values expected = whole_values(saved);
  for (const Sharding sharding : kFirstRankModes) {
    for (const int ranks : {1, 2, 3}) {
      compared_ranks(ranks, [&](int rank) {
        manual_seed(5);
        Words model;
        Accelerator accelerator(asking(sharding, true));
        accelerator.prepare(model);
        const std::string own = rank == 0 ? folder : "/nowhere";
        EXPECT_TRUE(accelerator.load_model(model, own).complete());
        EXPECT_TRUE(whole_values(model) == expected) << static_cast<int>(sharding);
        model.call_tensor(Tokens(4).get(1)[0].reshape({1, 6}));
      });
    }
  }
}

TEST(FirstRank, ReadsOfFilesHoldOnePartAtATime) {
  const std::string folder = first_rank_folder("peak");
  save_model(Wide(), folder);
  compared_ranks(4, [&](int) {
    Wide model;
    Accelerator accelerator(asking(Sharding::kFsdp, true));
    accelerator.prepare(model);
    memory_stats()->reset_peak();
    const int64_t before = memory_stats()->current();
    accelerator.load_model(model, folder);
    EXPECT_LE(memory_stats()->peak() - before, kWideBytes / 4 + 256 * 256 * 4 + 4096);
  });
}

TEST(FirstRank, WhatDoesNotFitIsTheSameErrorOnEveryRank) {
  const std::string folder = first_rank_folder("wrong");
  save_model(Wide(), folder);
  compared_ranks(2, [&](int rank) {
    Words model;
    Accelerator accelerator(asking(Sharding::kFsdp, true));
    accelerator.prepare(model);
    const Values before = whole_values(model);
    const std::string own = rank == 0 ? folder : "/nowhere";
    const std::string message = message_of<ValueError>([&] { accelerator.load_model(model, own); });
    EXPECT_NE(message.find("missing in the state"), std::string::npos) << message;
    EXPECT_NE(message.find("parts.0.fc.weight"), std::string::npos) << message;
    EXPECT_FALSE(accelerator.load_model(model, own, {.strict = false}).complete());
    EXPECT_TRUE(whole_values(model) == before);
  });
  compared_ranks(2, [&](int) {
    Words model;
    Accelerator accelerator(asking(Sharding::kZero2, true));
    accelerator.prepare(model);
    EXPECT_THROW(accelerator.load_model(model, "/nowhere"), IoError);
  });
}

}  // namespace
}  // namespace tessera::test_accelerator_first_rank
