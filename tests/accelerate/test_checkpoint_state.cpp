// save_state and load_state: a training that was ended and loaded goes on with the bits that it
// would have had.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>

#include <tessera/accelerate/state/state_io.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/manifest.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/optim/ema.h>

#include "accelerate/checkpoint_training.h"
#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "message_of.h"

namespace tessera::accelerate::test_checkpoint_state {
namespace {

namespace fs = std::filesystem;
using distributed::compared_ranks;
using Training = CheckpointTraining;

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

class StateCheckpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    set_num_threads(1);
    manual_seed(1);
  }
  std::string path(const std::string& name) const { return folder_.path(name); }
  StateIoOptions automatic(int64_t limit = 0) {
    StateIoOptions options;
    options.project_dir = path("run");
    options.automatic_naming = true;
    options.total_limit = limit;
    options.warn = [this](const std::string& text) { warnings_ += text + "\n"; };
    return options;
  }
  std::vector<int64_t> saved_numbers() const {
    std::vector<int64_t> numbers;
    for (const NumberedCheckpoint& one : list_checkpoints(path("run")))
      numbers.push_back(one.number);
    return numbers;
  }
  void damage(const std::string& folder) const {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() != ".bin") continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(70);
      const auto old = static_cast<char>(file.get());
      file.seekp(70);
      file.put(static_cast<char>(old ^ 4));
    }
  }
  using Numbers = std::vector<int64_t>;
  TestFolder folder_;
  std::string warnings_;
};

// ---- CKP-1: names and rotation -----------------------------------------------------------------

TEST_F(StateCheckpoints, CKP1ALimitOfOneLeavesOneFolderOfCheckpoints) {
  Training training(1);
  StateIo io(automatic(1));
  for (int i = 0; i < 3; ++i) io.save_state(training.state());
  EXPECT_EQ(saved_numbers(), Numbers{2});
  EXPECT_EQ(std::distance(fs::directory_iterator(path("run/checkpoints")), {}), 1);
}

TEST_F(StateCheckpoints, CKP1ElevenSavesWithALimitOfTwoLeaveNineAndTen) {
  Training training(1);
  StateIo io(automatic(2));
  for (int i = 0; i < 11; ++i) io.save_state(training.state());
  EXPECT_EQ(saved_numbers(), (Numbers{9, 10})) << "by number, not by spelling";
}

// Each one says which number comes next, wherever it lies by then; a folder by name uses none up.
TEST_F(StateCheckpoints, WhatIsLoadedSaysWhichNumberComesNext) {
  Training training(1);
  StateIo io(automatic(0));
  EXPECT_EQ(io.iteration(), 0);
  std::vector<std::string> folders;
  for (int i = 0; i < 3; ++i) folders.push_back(io.save_state(training.state()));
  EXPECT_EQ(io.iteration(), 3);
  const std::string named = io.save_state(training.state(), folders[0] + "-by-name");
  EXPECT_EQ(io.iteration(), 3);
  for (size_t i = 0; i < 3; ++i) {
    StateIo other(automatic(0));
    other.load_state(training.state(), folders[i]);
    EXPECT_EQ(other.iteration(), static_cast<int64_t>(i) + 1);
  }
  StateIo other(automatic(0));
  other.load_state(training.state(), named);
  EXPECT_EQ(other.iteration(), 3);
  EXPECT_THROW(other.set_iteration(-1), ValueError);
}

// Trap 11: rotation deletes before the new checkpoint is written.
TEST_F(StateCheckpoints, TrapRotationComesAfterTheCommit) {
  Training training(1);
  StateIo io(automatic(1));
  io.save_state(training.state());
  Numbers seen;
  StateIoOptions options = automatic(1);
  options.at_stage = [&](distributed::SaveStage stage) {
    if (stage == distributed::SaveStage::kRenamed) seen = saved_numbers();
    if (stage == distributed::SaveStage::kManifestWritten) {
      EXPECT_EQ(saved_numbers(), Numbers{0});
    }
  };
  {
    StateIo second(options);
    second.load_state(training.state());
    second.save_state(training.state());
  }
  EXPECT_EQ(seen, (Numbers{0, 1}));
  EXPECT_EQ(saved_numbers(), Numbers{1});
}

// Trap: an entry without digits breaks the sort.
TEST_F(StateCheckpoints, TrapOnlyFoldersOfTheRightNameCount) {
  Training training(1);
  StateIo io(automatic(1));
  io.save_state(training.state());
  for (const char* name : {"checkpoint_best", "checkpoint_07", "checkpoint_", "notes",
                           "checkpoint_99999999999999999999", "my_checkpoint_5"}) {
    fs::create_directories(path("run/checkpoints/" + std::string(name)));
  }
  folder_.write("run/checkpoints/checkpoint_9", "a file");
  io.save_state(training.state());
  EXPECT_EQ(saved_numbers(), Numbers{1});
  EXPECT_TRUE(fs::exists(path("run/checkpoints/checkpoint_07")));
  EXPECT_EQ(std::distance(fs::directory_iterator(path("run/checkpoints")), {}), 8);
  EXPECT_EQ(io.load_state(training.state()).iteration, 2);
}

// By number alone the new run's would be the oldest: removed one after the other, and the newest
// to load another run's.
TEST_F(StateCheckpoints, ARunThatBeginsAnewInAnothersFolderNumbersOnAndLetsItsCheckpointsStay) {
  for (const int ranks : {1, 2}) {
    fs::remove_all(path("run"));
    compared_ranks(ranks, [&](int rank) {
      Training training(2);
      StateIoOptions options = automatic();
      {
        StateIo first(options);
        for (int i = 0; i < 3; ++i) first.save_state(training.state());
      }
      options.total_limit = 1;
      options.keep_best = 1;
      StateIo second(options);
      for (const double metric : {1.0, 3.0, 2.0}) {
        second.save_state(training.state(), "", {.metric = metric});
      }
      if (rank == 0) {
        EXPECT_EQ(saved_numbers(), (Numbers{0, 1, 2, 3, 5}));
      }
      EXPECT_EQ(second.load_state(training.state()).folder, path("run/checkpoints/checkpoint_5"));
    });
  }
  EXPECT_EQ(warnings_, "");
}

TEST_F(StateCheckpoints, ARunThatLoadedGoesOnWithWhatTheOtherSavedAndRotatesThatAlone) {
  Training training(1);
  {
    StateIo first(automatic()), second(automatic());
    first.save_state(training.state());
    second.save_state(training.state());
    first.save_state(training.state());
    // Each its own.
    EXPECT_EQ(second.load_state(training.state()).folder, path("run/checkpoints/checkpoint_1"));
    EXPECT_EQ(second.save_state(training.state()), path("run/checkpoints/checkpoint_3"));
    EXPECT_EQ(first.load_state(training.state()).folder, path("run/checkpoints/checkpoint_2"));
  }
  EXPECT_EQ(warnings_, "");
  // A folder in the middle: numbers go on behind all.
  StateIo resumed(automatic(1));
  resumed.load_state(training.state(), path("run/checkpoints/checkpoint_0"));
  EXPECT_EQ(resumed.save_state(training.state()), path("run/checkpoints/checkpoint_4"));
  EXPECT_EQ(saved_numbers(), (Numbers{1, 3, 4}));
  // Whoever has not begun takes what was saved last, and hears of the others.
  StateIo fresh(automatic());
  EXPECT_EQ(fresh.load_state(training.state()).folder, path("run/checkpoints/checkpoint_4"));
  expect_in("has 2 checkpoints of other runs; loaded is", warnings_);
  // A damaged one is not replaced by another run's.
  damage(path("run/checkpoints/checkpoint_4"));
  expect_in("(2 more are of other runs",
            message_of<FormatError>([&] { StateIo(automatic()).load_state(training.state()); }));
}

TEST_F(StateCheckpoints, EveryThirdAndTheTwoBestStayBesidesTheNewest) {
  Training training(1);
  StateIoOptions options = automatic(2);
  options.keep_every = 3;
  options.keep_best = 2;
  const double losses[] = {9, 8, 3, 7, 2, NAN, 6, 5};
  {
    StateIo io(options);
    for (int i = 0; i < 5; ++i) io.save_state(training.state(), "", {.metric = losses[i]});
  }
  // Another process knows the metrics from the folders.
  StateIo io(options);
  io.load_state(training.state());
  for (int i = 5; i < 8; ++i) io.save_state(training.state(), "", {.metric = losses[i]});
  EXPECT_EQ(saved_numbers(), (Numbers{0, 2, 3, 4, 6, 7}));
}

// A loss that is NaN is neither the least nor the largest.
TEST_F(StateCheckpoints, AMetricThatIsNoNumberIsNeverTheBest) {
  for (const bool larger : {false, true}) {
    fs::remove_all(path("run"));
    Training training(1);
    StateIoOptions options = automatic(1);
    options.keep_best = 1;
    options.larger_is_better = larger;
    StateIo io(options);
    for (const double metric : {double{NAN}, 5.0, 6.0, double{-NAN}, double{NAN}}) {
      io.save_state(training.state(), "", {.metric = metric});
    }
    EXPECT_EQ(saved_numbers(), (larger ? Numbers{2, 4} : Numbers{1, 4}));
  }
}

// ---- CKP-2: all state --------------------------------------------------------------------------

void train_save_perturb_load(const std::string& folder, const StateIoOptions& options) {
  const int64_t epoch = Training::kSamples / Training::kBatch;
  manual_seed(1);
  Training reference(1);
  EarlyStopping reference_stop;
  reference.train(3 * epoch);
  const std::string expected = reference.bits();
  const Tensor expected_draw = randn({4});

  manual_seed(1);
  Training training(1);
  StateIo io(options);
  EarlyStopping stop{.best = 0.25, .bad_epochs = 2};
  optim::EMA average(training.model.named_parameters());
  auto pointer = std::make_unique<EarlyStopping>();
  io.register_for_checkpointing(stop, average, pointer);
  training.train(epoch);
  const std::string saved = training.bits();
  const std::string where = io.save_state(training.state(), folder);
  training.perturb();
  stop = {};
  ASSERT_NE(training.bits(), saved);
  const LoadedState loaded = io.load_state(training.state(), folder);
  EXPECT_EQ(loaded.folder, where);
  EXPECT_TRUE(training.bits() == saved) << "parameters, moments, schedule, cursor, random numbers";
  EXPECT_EQ(stop.best, 0.25);
  EXPECT_EQ(stop.bad_epochs, 2);
  training.train(3 * epoch);
  EXPECT_TRUE(training.bits() == expected) << "as if it had not been interrupted";
  EXPECT_EQ(randn({4}).to_vector(), expected_draw.to_vector());
}

TEST_F(StateCheckpoints, CKP2AThirdOfATrainingLoadedGoesOnBitForBitFromAnExplicitFolder) {
  train_save_perturb_load(path("epoch_1"), {});
}
TEST_F(StateCheckpoints, CKP2AThirdOfATrainingLoadedGoesOnBitForBitFromAnAutomaticName) {
  train_save_perturb_load("", automatic());
}
TEST_F(StateCheckpoints, CKP2AThirdOfATrainingLoadedGoesOnBitForBitFromARelativePath) {
  const fs::path before = fs::current_path();
  fs::current_path(path("."));
  train_save_perturb_load("some/epoch_1/", {});
  fs::current_path(before);
  EXPECT_TRUE(distributed::is_checkpoint(path("some/epoch_1")));
}
TEST_F(StateCheckpoints, CKP2AThirdOfATrainingLoadedGoesOnBitForBitFromAnAsynchronousSave) {
  StateIoOptions options = automatic(1);
  options.asynchronous = true;
  train_save_perturb_load("", options);
}

TEST_F(StateCheckpoints, TheMiddleOfAnEpochIsAsGoodAPlaceAsItsEnd) {
  std::string expected;
  {
    Training reference(1);
    reference.train(20);
    expected = reference.bits();
  }
  for (const int64_t at : {1, 7, 15, 16, 17}) {
    manual_seed(1);
    {
      Training training(1);
      training.train(at);
      StateIo().save_state(training.state(), path("mid"));
    }
    manual_seed(99);
    Training training(1);
    StateIo().load_state(training.state(), path("mid"));
    training.train(20);
    EXPECT_TRUE(training.bits() == expected) << "saved after " << at << " of 16 batches";
  }
}

// AC-K1, and mid-epoch: N ranks go on where M ranks were, with the bits of either alone.
TEST_F(StateCheckpoints, ACK1AnotherNumberOfRanksGoesOnWithTheSameBits) {
  struct Change {
    int from, to, micro;
  };
  for (const auto& [from, to, micro] :
       {Change{2, 1, 2}, Change{1, 2, 2}, Change{1, 4, 4}, Change{4, 1, 4}, Change{2, 2, 2}}) {
    const std::string name = std::to_string(from) + " to " + std::to_string(to);
    std::string expected;
    manual_seed(1);
    {
      Training reference(micro);  // one process makes all micro-batches
      reference.train(11);
      expected = reference.bits();
    }
    compared_ranks(from, [&, micro = micro](int) {
      manual_seed(1);
      Training training(micro);
      training.train(5);
      StateIo().save_state(training.state(), path(name));
    });
    compared_ranks(to, [&, micro = micro, from = from](int rank) {
      manual_seed(2);
      Training training(micro);
      const LoadedState loaded = StateIo().load_state(training.state(), path(name));
      EXPECT_EQ(loaded.saved_by_ranks, from);
      training.train(11);
      EXPECT_TRUE(training.bits() == expected) << name << ", rank " << rank;
    });
  }
}

// Trap 12: a load only logs that it could not restore random numbers.
TEST_F(StateCheckpoints, TrapEveryRanksRandomNumbersComeBackAndAreNotGuessedForAnotherNumber) {
  compared_ranks(2, [&](int rank) {
    Training training(2);
    manual_seed(static_cast<uint64_t>(100 + rank));
    next_random_stream();
    StateIo io;
    io.save_state(training.state(), path("a"));
    manual_seed(5);
    io.load_state(training.state(), path("a"));
    EXPECT_EQ(random_state().seed, static_cast<uint64_t>(100 + rank));
    EXPECT_EQ(random_state().next_stream, 1u);
  });
  Training training(1);
  StateIo io;
  expect_in("2 ranks whose random numbers differed",
            message_of<ConfigError>([&] { io.load_state(training.state(), path("a")); }));
  manual_seed(6);
  io.load_state(training.state(), path("a"), {.random = RandomNumbers::kKeep});
  EXPECT_EQ(random_state().seed, 6u);
}

// Trap 13: without a barrier a rank loads before others have written. Trap 14: ranks that
// write one file.
TEST_F(StateCheckpoints, TrapEveryRankMayLoadAsSoonAsItsOwnSaveReturns) {
  compared_ranks(4, [&](int rank) {
    manual_seed(1);
    Training training(4);
    training.train(1);
    StateIoOptions options;
    options.at_stage = [rank](distributed::SaveStage stage) {  // the main rank is late
      if (rank == 0 && stage == distributed::SaveStage::kManifestWritten) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    };
    StateIo io(options);
    const std::string bits = training.bits();
    io.save_state(training.state(), path("a"));
    EXPECT_TRUE(distributed::is_checkpoint(path("a")));
    training.perturb();
    io.load_state(training.state(), path("a"));
    EXPECT_TRUE(training.bits() == bits);
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(fs::exists(path("a/" + distributed::record_name(rank))));
  }
}

// ---- CKP-3 and loading -------------------------------------------------------------------------

TEST_F(StateCheckpoints, CKP3SchedulesResumeAndTheNewestIsTaken) {
  Training training(1);
  StateIo io(automatic());
  std::vector<double> rates;
  for (int i = 0; i < 12; ++i) {
    training.train(i + 1);
    rates.push_back(training.optimizer.lr());
    io.save_state(training.state());
  }
  Training other(1);
  StateIo again(automatic());
  EXPECT_EQ(again.load_state(other.state()).folder, path("run/checkpoints/checkpoint_11"));
  EXPECT_EQ(other.schedule.current_step(), 12);
  EXPECT_EQ(other.optimizer.lr(), rates.back());
  // Trap: a job that resumes knows its iteration.
  EXPECT_EQ(again.iteration(), 12);
  EXPECT_EQ(again.save_state(other.state()), path("run/checkpoints/checkpoint_12"));
}

TEST_F(StateCheckpoints, CKP3MapLocationIsTheCpuOrTheDeviceAndNothingElse) {
  EXPECT_EQ(parse_map_location("cpu"), MapLocation::kCpu);
  EXPECT_EQ(parse_map_location("on_device"), MapLocation::kOnDevice);
  expect_in("cpu or on_device; got 'disk'",
            message_of<ConfigError>([] { parse_map_location("disk"); }));
  Training training(1);
  StateIo io;
  const std::string bits = training.bits();
  io.save_state(training.state(), path("a"));
  for (const MapLocation location : {MapLocation::kCpu, MapLocation::kOnDevice}) {
    training.perturb();
    io.load_state(training.state(), path("a"), {.map_location = location});
    EXPECT_TRUE(training.bits() == bits);
  }
}

TEST_F(StateCheckpoints, CKP3InvalidRegistrationsAreErrorsWithTheirPositions) {
  static_assert(kRegistrable<EarlyStopping&, optim::AdamW&, std::unique_ptr<EarlyStopping>&>);
  static_assert(!kRegistrable<EarlyStopping&, int&>);
  static_assert(!kRegistrable<std::string&>);
  StateIo io;
  EarlyStopping stop;
  std::unique_ptr<EarlyStopping> none;
  EarlyStopping* nothing = nullptr;
  expect_in("positions 0, 2 (",
            message_of<ValueError>([&] { io.register_for_checkpointing(none, stop, nothing); }));
}

TEST_F(StateCheckpoints, AnUndefinedTensorOfAStateIsNamed) {
  struct Unfinished {
    StateDict state_dict() const {
      StateDict state;
      state.set("momentum", Tensor());
      return state;
    }
    void load_state_dict(const StateDict&) {}
  };
  Training training(1);
  StateIo io;
  Unfinished unfinished;
  io.register_for_checkpointing(unfinished);
  expect_in("momentum' is undefined",
            message_of<ValueError>([&] { io.save_state(training.state(), path("a")); }));
}

// A validation loader that was added, an optimizer that an evaluation has not.
TEST_F(StateCheckpoints, WhatIsThereIsLoadedAndTheRestIsNamed) {
  for (const int ranks : {1, 2}) {
    warnings_.clear();
    fs::remove_all(path("a"));
    compared_ranks(ranks, [&](int rank) {
      Training training(2);
      StateIo io(automatic());
      training.train(3);
      io.save_state(training.state(), path("a"));
      const std::string bits = training.bits();

      Training other(2), second(2);
      TrainingState more = other.state();
      more.loaders.push_back(&second.loader);
      more.models.push_back(&second.model);
      EarlyStopping stop{.best = 3, .bad_epochs = 4};
      io.register_for_checkpointing(stop);
      const auto untouched = second.model.parameters()[0].to_vector();
      other.perturb();
      const LoadedState loaded = io.load_state(more, path("a"));
      EXPECT_EQ(loaded.missing, (std::vector<std::string>{"loader.1", "model.1", "object.0"}));
      EXPECT_TRUE(loaded.unused.empty());
      EXPECT_TRUE(other.bits() == bits);
      EXPECT_EQ(second.model.parameters()[0].to_vector(), untouched);
      EXPECT_EQ(stop.best, 3);

      // The model alone.
      Training evaluated(2);
      StateIo reader(automatic());
      const LoadedState part = reader.load_state({.models = {&evaluated.model}}, path("a"));
      EXPECT_EQ(part.unused,
                (std::vector<std::string>{"counters", "loader.0", "optimizer.0", "schedule.0"}));
      for (const auto& [name, tensor] : training.model.state_dict()) {
        EXPECT_EQ(evaluated.model.state_dict().at(name).to_vector(), tensor.to_vector()) << name;
      }
      if (rank == 0) {
        expect_in("has no loader.1, model.1, object.0 of this program", warnings_);
        expect_in("this program has no counters, loader.0, optimizer.0, schedule.0 of", warnings_);
      }
    });
  }
}

TEST_F(StateCheckpoints, TheBestIsNamedOnEveryRankAndByAnotherProcess) {
  for (const bool larger : {false, true}) {
    for (const int ranks : {1, 2}) {
      fs::remove_all(path("run"));
      compared_ranks(ranks, [&](int) {
        Training training(2);
        StateIoOptions options = automatic(1);
        options.keep_best = 1;
        options.larger_is_better = larger;
        {
          StateIo io(options);
          EXPECT_EQ(io.best_checkpoint(), std::nullopt);
          io.save_state(training.state());
          EXPECT_EQ(io.best_checkpoint(), std::nullopt);
          for (const double metric : {4.0, 1.0, 7.0, 3.0}) {
            io.save_state(training.state(), "", {.metric = metric});
          }
          EXPECT_EQ(io.best_checkpoint(),
                    path("run/checkpoints/checkpoint_") + (larger ? "3" : "2"));
        }
        StateIo another(options);
        const auto best = another.best_checkpoint();
        ASSERT_TRUE(best.has_value());
        EXPECT_EQ(*best, path("run/checkpoints/checkpoint_") + (larger ? "3" : "2"));
        EXPECT_EQ(another.load_state(training.state(), *best).folder, *best);
      });
    }
  }
}

TEST_F(StateCheckpoints, OtherObjectsThanThoseSavedAreAnErrorBeforeAnythingChanges) {
  Training training(1);
  StateIo io;
  io.save_state(training.state(), path("a"));
  EarlyStopping stop;
  io.register_for_checkpointing(stop);
  training.perturb();
  const std::string bits = training.bits();
  expect_in("holds 0 objects, this program has 1", message_of<ConfigError>([&] {
              io.load_state(training.state(), path("a"), {.strict = true});
            }));
  EXPECT_TRUE(training.bits() == bits);
  EXPECT_THROW(io.load_state(training.state(), path("none")), IoError);
  EXPECT_THROW(io.load_state(training.state()), ConfigError) << "no automatic naming";
  EXPECT_THROW(io.save_state(training.state()), ConfigError);
  StateIo empty(automatic());
  expect_in("there is no checkpoint in",
            message_of<ConfigError>([&] { empty.load_state(training.state()); }));
}

// Sealed, and with numbers that are none: read as far as they go they would be others.
TEST_F(StateCheckpoints, ADamagedNumberOfTheMetadataIsNamedBeforeAnythingChanges) {
  Training training(1);
  StateIo io;
  io.save_state(training.state(), path("a"));
  const std::string body(distributed::unsealed(folder_.read("a/manifest.json"), "a"));
  training.perturb();
  const std::string bits = training.bits();
  for (const char* name : {"models", "optimizers", "schedules", "loaders", "objects", "scaler",
                           "counters", "iteration"}) {
    const std::string key = "\"" + std::string(name) + "\": \"";
    const size_t at = body.find(key);
    ASSERT_NE(at, std::string::npos) << key << " in " << body;
    const size_t begin = at + key.size(), end = body.find('"', begin);
    const std::string good = body.substr(begin, end - begin);
    for (const std::string& bad :
         {good + "x", "x" + good, good + " ", " " + good, "-" + good, "+" + good, good + ".0",
          std::string(), std::string(19, '1'), good + "/", good + ":"}) {
      std::string text = body;
      text.replace(begin, end - begin, bad);
      folder_.write("a/manifest.json", distributed::sealed(text));
      const std::string message =
          message_of<FormatError>([&] { io.load_state(training.state(), path("a")); });
      expect_in("the metadata '" + std::string(name) + "' must be a whole number", message);
    }
    EXPECT_TRUE(training.bits() == bits) << name;
    std::string text = body;
    text.replace(begin, end - begin, std::string(18 - good.size(), '0') + good);
    folder_.write("a/manifest.json", distributed::sealed(text));
    io.load_state(training.state(), path("a"));
    training.perturb();
  }
}

TEST_F(StateCheckpoints, TwoObjectsOfAKindAreEachSavedAndLoaded) {
  // A training, its twin, and an object of each that the user registers.
  struct Pair {
    explicit Pair(StateIo& io) {
      for (EarlyStopping& stop : stops) io.register_for_checkpointing(stop);
    }
    TrainingState state() {
      TrainingState both = first.state(), other = second.state();
      both.models.push_back(other.models[0]);
      both.optimizers.push_back(other.optimizers[0]);
      both.schedules.push_back(other.schedules[0]);
      both.loaders.push_back(other.loaders[0]);
      return both;
    }
    Training first{1}, second{1};
    EarlyStopping stops[2];
  };
  StateIo io;
  Pair saved(io);
  saved.first.train(2), saved.second.train(5);
  saved.stops[0].best = 3, saved.stops[1].best = 4;
  io.save_state(saved.state(), path("two"));
  const std::string first = saved.first.bits(), second = saved.second.bits();
  ASSERT_FALSE(first == second);
  StateIo again;
  Pair loaded(again);
  loaded.first.perturb(), loaded.second.perturb();
  again.load_state(loaded.state(), path("two"));
  loaded.second.updates = 5;  // counted by the program: the counters are the first's
  EXPECT_TRUE(loaded.first.bits() == first);
  EXPECT_TRUE(loaded.second.bits() == second);
  EXPECT_EQ(loaded.stops[0].best, 3);
  EXPECT_EQ(loaded.stops[1].best, 4);
}

TEST_F(StateCheckpoints, ADamagedFolderIsPassedOverAloudAndAnExplicitOneIsAnError) {
  manual_seed(1);
  Training training(1);
  StateIo io(automatic());
  training.train(1), io.save_state(training.state());
  const std::string good = training.bits();
  training.train(2), io.save_state(training.state());
  training.train(3), io.save_state(training.state());
  damage(path("run/checkpoints/checkpoint_2"));
  fs::remove(path("run/checkpoints/checkpoint_1/manifest.json"));

  for (const int ranks : {1, 2}) {
    std::atomic<int> passed{0};
    compared_ranks(ranks, [&](int) {
      Training other(2);
      StateIo again(automatic());
      const LoadedState loaded = again.load_state(other.state());
      EXPECT_EQ(loaded.folder, path("run/checkpoints/checkpoint_0"));
      ASSERT_EQ(loaded.skipped.size(), 2u);
      expect_in("checksum", loaded.skipped[0].reason);
      expect_in("manifest.json", loaded.skipped[1].reason);
      EXPECT_EQ(loaded.iteration, 3) << "the damaged ones keep their numbers";
      passed += other.bits() == good;
    });
    EXPECT_EQ(passed, ranks);
  }
  expect_in("checkpoint_2' is passed over", warnings_);
  const std::string bits = training.bits();
  EXPECT_THROW(io.load_state(training.state(), path("run/checkpoints/checkpoint_2")), FormatError);
  EXPECT_TRUE(training.bits() == bits);
  damage(path("run/checkpoints/checkpoint_0"));
  expect_in("none of the 3", message_of<FormatError>([&] { io.load_state(training.state()); }));
}

// ---- Hooks (ACC-2) -----------------------------------------------------------------------------

TEST_F(StateCheckpoints, ACC2HooksAddFilesTakeOverAndAreRemoved) {
  manual_seed(1);
  Training training(1);
  StateIo io;
  int calls = 0;
  HookHandle save = io.register_save_state_pre_hook(
      [&](std::vector<ModelWeights>& models, const std::string& folder) {
        ++calls;
        ASSERT_EQ(models.size(), 1u);
        EXPECT_EQ(models[0].weights.size(), 4u);
        fs::create_directories(folder + "/extra");
        std::ofstream(folder + "/extra/class.txt") << "CheckpointNet";
        models.clear();  // the hook keeps the weights elsewhere
      });
  HookHandle load = io.register_load_state_pre_hook(
      [&](std::vector<nn::ModuleBase*>& models, const std::string& folder) {
        ++calls;
        EXPECT_TRUE(fs::exists(folder + "/extra/class.txt"));
        fill_(models[0]->parameters()[0], 7);
        models.clear();
      });
  io.save_state(training.state(), path("a"));
  const distributed::CheckpointReader reader(path("a"));
  EXPECT_TRUE(reader.manifest().files.at("extra/class.txt").checksum.has_value());
  EXPECT_FALSE(reader.contains("model.0.first.weight"));
  const NoGradGuard no_grad;
  io.load_state(training.state(), path("a"));
  EXPECT_EQ(training.model.parameters()[0].to_vector()[0], 7);
  EXPECT_EQ(calls, 2);

  save.remove(), load.remove();
  io.save_state(training.state(), path("b"));
  training.perturb();
  io.load_state(training.state(), path("b"));
  EXPECT_EQ(calls, 2) << "a removed hook has no effect";
  EXPECT_EQ(training.model.parameters()[0].to_vector()[0], 7);

  folder_.write("a/extra/class.txt", "CheckpointNex");
  expect_in("class.txt': the checksum",
            message_of<FormatError>([&] { io.load_state(training.state(), path("a")); }));
}

TEST_F(StateCheckpoints, TiedWeightsAreSavedOnceAndComeBackAsOne) {
  CheckpointNet model;
  model.share_parameter("extra", model.first.weight);
  TrainingState state;
  state.models = {&model};
  StateIo io;
  io.save_state(state, path("a"));
  distributed::CheckpointReader reader(path("a"));
  EXPECT_EQ(reader.contains("model.0.extra"), !reader.contains("model.0.first.weight"));
  const auto before = model.first.weight.to_vector();
  {
    const NoGradGuard no_grad;
    fill_(model.first.weight, 0);
  }
  io.load_state(state, path("a"));
  EXPECT_EQ(model.first.weight.to_vector(), before);
}

// ---- Signals -----------------------------------------------------------------------------------

TEST_F(StateCheckpoints, ASignalToOneProcessIsARequestToAllRanks) {
  char name[] = "test";
  char* arguments[] = {name};
  const int code = run(1, arguments, [](std::span<const std::string>) {
    compared_ranks(3, [](int) { EXPECT_EQ(should_checkpoint(), RunRequest::kNone); });
    ::raise(SIGUSR1);
    compared_ranks(3, [](int) { EXPECT_EQ(should_checkpoint(), RunRequest::kCheckpoint); });
    compared_ranks(3, [](int) { EXPECT_EQ(should_checkpoint(), RunRequest::kNone) << "served"; });
    ::raise(SIGTERM);
    compared_ranks(3, [](int) { EXPECT_EQ(should_checkpoint(), RunRequest::kCheckpointAndStop); });
    EXPECT_EQ(should_checkpoint(), RunRequest::kCheckpointAndStop) << "stays";
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace tessera::accelerate::test_checkpoint_state
