// fsdp_state_dict_type=full: checkpoints whose models are whole, in the files of HuggingFace, from
// every mode into every other on any number of ranks.
// ctest labels: threads
#include <filesystem>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/error.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/fully_shard/fully_shard.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"

namespace tessera::test_accelerator_whole_state {
namespace {

using accelerate::Sharding;
using accelerate::StateDictType;
using distributed::compared_ranks;

constexpr Sharding kStateModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                    Sharding::kZero3, Sharding::kFsdp};

std::string state_folder(const std::string& name) {
  const std::string folder = testing::TempDir() + "whole_state_" + name;
  std::filesystem::remove_all(folder);
  return folder;
}

struct Trip {
  Sharding sharding = Sharding::kDdp;
  int ranks = 2;
  StateDictType type = StateDictType::kFull;
  std::string load = {}, save = {};
  std::optional<PrecisionPolicy> policy = {};
};

// Six micro-batches of all ranks make a window; two windows, or the next two of what is loaded.
Values travel(const Trip& trip) {
  Values values;
  compared_ranks(trip.ranks, [&](int rank) {
    manual_seed(5);
    Words model;
    Accelerator accelerator({.mixed_precision = trip.policy ? Precision::kBF16 : Precision::kNo,
                             .precision_policy = trip.policy,
                             .gradient_accumulation_steps = 6 / trip.ranks,
                             .seed = 5,
                             .sharding = trip.sharding,
                             .fsdp = {.state_dict_type = trip.type},
                             .config_file = ""});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
    data::DataLoader loader(std::make_shared<Tokens>(72), {.batch_size = 2, .shuffle = true});
    accelerator.prepare(model, optimizer, loader);
    if (!trip.load.empty()) accelerator.load_state(trip.load);
    int windows = 0;
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(
          cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
      optimizer.step(), optimizer.zero_grad();
      if (micro.sync_gradients() && ++windows == 2) break;
    }
    if (!trip.save.empty()) accelerator.save_state(trip.save);
    const Values own = whole_values(model);
    if (rank == 0) values = own;
  });
  return values;
}

// Without files of its own: into a plain model of one process, and into parts.
TEST(WholeState, TheModelOfACheckpointIsLoadedAsItLies) {
  for (const StateDictType type : {StateDictType::kSharded, StateDictType::kFull}) {
    for (const Sharding from : kStateModes) {
      SCOPED_TRACE(static_cast<int>(from));
      const std::string folder = state_folder("straight");
      const Values saved = travel({.sharding = from, .ranks = 3, .type = type, .save = folder});
      Words plain;
      EXPECT_TRUE(load_model(plain, folder).complete());
      EXPECT_TRUE(whole_values(plain) == saved);
      for (const bool first_rank_reads : {false, true}) {
        compared_ranks(2, [&](int) {
          Words model;
          Accelerator accelerator({.sharding = Sharding::kFsdp, .config_file = ""});
          accelerator.prepare(model);
          accelerator.load_model(model, folder, {.first_rank_reads = first_rank_reads});
          EXPECT_TRUE(whole_values(model) == saved);
        });
      }
      EXPECT_TRUE(mentions(
          message_of<ValueError>([&] { load_model(plain, folder, {.prefix = "model.1."}); }),
          "has no tensor whose name begins with 'model.1.'"));
    }
  }
}

// One sum over ranks and micro-batches, whatever number of each: the bits of a training that was
// not interrupted.
TEST(WholeState, GoesOnInEveryModeOnAnyNumberOfRanks) {
  for (const Sharding from : {Sharding::kZero2, Sharding::kFsdp}) {
    const std::string parts = state_folder("parts"), whole = state_folder("whole");
    travel({.sharding = from, .ranks = 3, .type = StateDictType::kSharded, .save = parts});
    travel({.sharding = from, .ranks = 3, .save = whole});
    for (const Sharding into : {Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp}) {
      for (const int ranks : {1, 2, 3}) {
        const Values expected = travel({.sharding = into, .ranks = ranks, .load = parts});
        // The setting is that of saving; loading sees what there is.
        for (const StateDictType type : {StateDictType::kFull, StateDictType::kSharded}) {
          EXPECT_TRUE(travel({.sharding = into, .ranks = ranks, .type = type, .load = whole}) ==
                      expected)
              << static_cast<int>(from) << " into " << static_cast<int>(into) << " of " << ranks;
        }
      }
    }
  }
}

TEST(WholeState, OfEveryModeHoldsTheFilesOfItsModel) {
  for (const Sharding sharding : kStateModes) {
    SCOPED_TRACE(static_cast<int>(sharding));
    const std::string folder = state_folder("files");
    const Values values = travel({.sharding = sharding, .save = folder});
    Words plain;
    EXPECT_TRUE(load_model(plain, folder + "/model").complete());
    EXPECT_TRUE(whole_values(plain) == values);
    // And is exported as one in parts is.
    const std::string exported = state_folder("exported");
    accelerate::export_checkpoint(folder, exported);
    Words again;
    EXPECT_TRUE(load_model(again, exported).complete());
    EXPECT_TRUE(whole_values(again) == values);
    // Its chunks hold no model.
    distributed::CheckpointReader reader(folder);
    for (const auto& [name, tensor] : reader.tensors()) {
      EXPECT_FALSE(name.starts_with("model.")) << name;
    }
  }
}

TEST(WholeState, MastersOfSixteenBitParametersStayInParts) {
  const std::string folder = state_folder("pure"), parts = state_folder("pure_parts");
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kFsdp}) {
    const Trip trip{.sharding = sharding, .policy = PrecisionPolicy::kPure};
    Trip save = trip, load = trip;
    save.save = folder;
    travel(save);
    save.save = parts;
    save.type = StateDictType::kSharded;
    travel(save);
    load.load = parts;
    const Values expected = travel(load);
    load.load = folder;
    EXPECT_TRUE(travel(load) == expected) << static_cast<int>(sharding);
  }
}

struct Large : nn::Module<Large> {
  Large() {
    for (int i = 0; i < 6; ++i) add<nn::Linear>("l" + std::to_string(i), 256, 256);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = 0; i < num_children(); ++i) y = child(i).call_tensor(y);
    return y;
  }
};

TEST(WholeState, RankZeroHoldsOneTensorAtATimeAndTheOthersNone) {
  compared_ranks(4, [&](int rank) {
    Accelerator accelerator(
        {.sharding = Sharding::kFsdp,
         .fsdp = {.wrap_modules = {{"Linear"}}, .state_dict_type = StateDictType::kFull},
         .config_file = ""});
    Large model;
    accelerator.prepare(model);
    const std::string folder = testing::TempDir() + "whole_state_peak";
    if (rank == 0) std::filesystem::remove_all(folder);
    accelerator.wait_for_everyone();
    memory_stats()->reset_peak();
    const int64_t before = memory_stats()->current();
    accelerator.save_state(folder);
    // The rows that come and the whole of them.
    EXPECT_LE(memory_stats()->peak() - before, (rank == 0 ? 2 : 1) * 256 * 256 * 4 + 65536);
  });
}

// The models are on the disk when save_state() returns, all else when the save has ended.
TEST(WholeState, AnAsynchronousSaveHoldsWhatTheModelsWereAtTheCall) {
  compared_ranks(2, [&](int rank) {
    const std::string folder = testing::TempDir() + "whole_state_asynchronous";
    if (rank == 0) std::filesystem::remove_all(folder);
    Accelerator accelerator({.project_dir = folder,
                             .automatic_checkpoint_naming = true,
                             .asynchronous_checkpoints = true,
                             .sharding = Sharding::kFsdp,
                             .fsdp = {.state_dict_type = StateDictType::kFull},
                             .config_file = ""});
    Words model;
    accelerator.prepare(model);
    const Values saved = whole_values(model);
    accelerator.save_state();
    {
      const auto scope = distributed::full_parameters(model, {.writes = true});
      const NoGradGuard no_grad;
      for (const Tensor& parameter : model.parameters()) fill_(parameter, 3);
    }
    accelerator.state_io().wait();
    accelerator.load_state();
    EXPECT_TRUE(whole_values(model) == saved);
  });
}

// What a program adds by hooks, and a model that one takes off the list.
TEST(WholeState, HooksSeeWeightsAndModelsAsEver) {
  compared_ranks(2, [&](int rank) {
    Accelerator accelerator({.sharding = Sharding::kFsdp,
                             .fsdp = {.state_dict_type = StateDictType::kFull},
                             .config_file = ""});
    Words first, second;
    accelerator.prepare(first, second);
    const std::string folder = testing::TempDir() + "whole_state_hooks";
    if (rank == 0) std::filesystem::remove_all(folder);
    accelerator.wait_for_everyone();
    auto saving = accelerator.state_io().register_save_state_pre_hook(
        [](std::vector<accelerate::ModelWeights>& models, const std::string&) {
          models.erase(models.begin());
        });
    auto loading = accelerator.state_io().register_load_state_pre_hook(
        [](std::vector<nn::ModuleBase*>& models, const std::string&) {
          models.erase(models.begin());
        });
    accelerator.save_state(folder);
    EXPECT_FALSE(std::filesystem::exists(folder + "/model"));
    EXPECT_TRUE(std::filesystem::exists(folder + "/model_1/model.safetensors"));
    const Values kept = whole_values(second);
    {
      const auto scope = distributed::full_parameters(second, {.writes = true});
      const NoGradGuard no_grad;
      for (const Tensor& parameter : second.parameters()) fill_(parameter, 3);
    }
    accelerator.load_state(folder);
    EXPECT_TRUE(whole_values(second) == kept);
  });
}

// A file that was cut short is found before anything is loaded.
TEST(WholeState, DamagedFilesAreAnErrorOnEveryRank) {
  const std::string folder = state_folder("damaged");
  travel({.sharding = Sharding::kFsdp, .save = folder});
  std::filesystem::resize_file(folder + "/model/model.safetensors", 100);
  EXPECT_THROW(travel({.sharding = Sharding::kFsdp, .load = folder}), FormatError);
}

}  // namespace
}  // namespace tessera::test_accelerator_whole_state
