// AC-K3: a rank is killed at each stage of a save. The newest complete checkpoint loads, and the
// training goes on to the bits that it would have had. Processes under `tessera launch`.
#include <gtest/gtest.h>

#include <filesystem>

#include <tessera/core/parallel.h>
#include <tessera/distributed/checkpoint/commit.h>

#include "accelerate/checkpoint_training.h"
#include "distributed/compared_ranks.h"
#include "finished_process.h"

namespace tessera::test_checkpoint_kill {
namespace {

namespace fs = std::filesystem;
using accelerate::StateIo;
using accelerate::StateIoOptions;
using distributed::SaveStage;

struct Kill {
  SaveStage stage;
  const char* name;
  int ranks;
  int rank;
  bool asynchronous = false;
  bool parts = false;  // which each rank writes its own of
};
std::ostream& operator<<(std::ostream& out, const Kill& kill) {
  return out << "rank " << kill.rank << " of " << kill.ranks << " at " << kill.name;
}

// What two ranks have after eight updates without a fault.
const std::string& expected_bits() {
  static const std::string bits = [] {
    set_num_threads(1);
    manual_seed(1);
    CheckpointTraining training(2);
    training.train(8);
    return training.bits();
  }();
  return bits;
}

class Killed : public ::testing::TestWithParam<Kill> {};

TEST_P(Killed, ACK3TheNewestCompleteCheckpointLoadsAndTheTrainingGoesOnBitForBit) {
  const Kill kill = GetParam();
  if (kill.ranks > 1) {
    SKIP_WITHOUT_MPI();
  }
  TestFolder folder;
  std::vector<std::string> command;
  if (kill.ranks > 1) {
    command = {TESSERA_COMMAND, "launch", "-n",      std::to_string(kill.ranks),
               "--threads",     "1",      "--grace", "3"};
  }
  for (const std::string& word :
       {std::string(TESSERA_CHECKPOINT_PROGRAM), folder.path("run"),
        std::to_string(static_cast<int>(kill.stage)), std::to_string(kill.rank),
        std::string(kill.asynchronous ? "asynchronous" : "synchronous"),
        std::string(kill.parts ? "parts" : "replicas")}) {
    command.push_back(word);
  }
  const FinishedProcess job = run_process(command, {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(job.code(), 137) << job;
  EXPECT_FALSE(job.complained("still running")) << "the other rank has ended by itself: " << job;

  // From kRenamed on the second checkpoint stands. Where rank 1 is killed after it has said that
  // its part is written, rank 0 may still commit.
  const auto found = accelerate::list_checkpoints(folder.path("run"));
  ASSERT_FALSE(found.empty());
  const bool renamed = kill.stage >= SaveStage::kRenamed;
  const bool either = kill.rank != 0 && kill.stage >= SaveStage::kAgreed;
  if (!either) {
    EXPECT_EQ(found.back().number, renamed ? 1 : 0) << job;
  }

  const std::string& expected = expected_bits();  // made by one process, not by a rank
  if (kill.parts) {  // one process reads them as well, and writes nothing
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    CheckpointTraining training(2);
    StateIo io({.project_dir = folder.path("run"), .automatic_naming = true});
    EXPECT_EQ(io.load_state(training.state()).folder, found.back().folder);
    training.train(8);
    EXPECT_TRUE(training.bits() == expected) << "in one process";
  }
  distributed::compared_ranks(2, [&](int rank) {
    manual_seed(77);
    CheckpointTraining training(2, kill.parts);
    EXPECT_EQ(distributed::is_dtensor(training.model.first.weight), kill.parts);
    StateIoOptions options;
    options.project_dir = folder.path("run");
    options.automatic_naming = true;
    StateIo io(options);
    const accelerate::LoadedState loaded = io.load_state(training.state());
    EXPECT_TRUE(loaded.skipped.empty()) << loaded.skipped[0].reason;
    EXPECT_EQ(loaded.folder, found.back().folder);
    EXPECT_EQ(training.updates, 2 * (found.back().number + 1));
    training.train(8);
    EXPECT_TRUE(training.bits() == expected) << "rank " << rank;
    io.save_state(training.state());
  });
  for (const auto& entry : fs::directory_iterator(folder.path("run/checkpoints"))) {
    EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos)
        << "the next save has swept " << entry.path();
  }
}

std::vector<Kill> all_kills() {
  std::vector<Kill> kills;
  const std::pair<SaveStage, const char*> stages[] = {
      {SaveStage::kBegun, "begun"},
      {SaveStage::kFolderMade, "folder_made"},
      {SaveStage::kHalfWritten, "half_written"},
      {SaveStage::kChunksWritten, "chunks_written"},
      {SaveStage::kRecordWritten, "record_written"},
      {SaveStage::kAgreed, "agreed"},
      {SaveStage::kManifestWritten, "manifest_written"},
      {SaveStage::kRenamed, "renamed"},
      {SaveStage::kCommitted, "committed"}};
  for (const auto& [stage, name] : stages) kills.push_back({stage, name, 2, 0});
  for (const auto& [stage, name] : stages) {
    if (stage != SaveStage::kManifestWritten && stage != SaveStage::kRenamed) {
      kills.push_back({stage, name, 2, 1});
    }
  }
  for (const auto& [stage, name] : stages) {  // rank 1 while it writes, then who commits
    kills.push_back({stage, name, 2, stage < SaveStage::kAgreed ? 1 : 0});
    kills.back().parts = true;
  }
  kills.push_back({SaveStage::kHalfWritten, "half_written_asynchronous", 2, 1, true, true});
  kills.push_back({SaveStage::kHalfWritten, "half_written_asynchronous", 2, 0, true});
  kills.push_back({SaveStage::kRenamed, "renamed_asynchronous", 2, 0, true});
  return kills;
}
INSTANTIATE_TEST_SUITE_P(Stages, Killed, ::testing::ValuesIn(all_kills()), [](const auto& info) {
  return std::string(info.param.name) + "_rank_" + std::to_string(info.param.rank) + "_of_" +
         std::to_string(info.param.ranks) + (info.param.parts ? "_parts" : "");
});

}  // namespace
}  // namespace tessera::test_checkpoint_kill
