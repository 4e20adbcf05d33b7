// What a crash leaves of files that are being written: between any two calls to the file system, of
// the process or of the machine, a reader finds a whole old or a whole new file, and what was
// promised to be on the disk is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/reader.h>

#include "distributed/compared_ranks.h"
#include "distributed/disk_calls.h"
#include "finished_process.h"

namespace tessera::test_durability {
namespace {

namespace fs = std::filesystem;
using distributed::CheckpointReader;
using distributed::CheckpointSaver;
using distributed::SaveItem;
using distributed::SaveStage;
using Calls = std::vector<std::string>;

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

mode_t mode_of(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_mode & 07777 : 0;
}

class Durability : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }

  // At each moment, in each kind of crash.
  template <class Check>
  static void at_any_crash(DiskCalls& disk, Check check) {
    disk.look = [&disk, check] {
      const std::string after = disk.calls().empty() ? "the beginning" : disk.calls().back();
      check(disk.killed(), "killed after " + after);
      check(disk.eager(), "names only, after " + after);
      check(disk.lazy(), "synced folders only, after " + after);
    };
  }

  TestFolder folder_;
};

// ---- One file ----------------------------------------------------------------------------------

TEST_F(Durability, AFileIsForcedToTheDiskThenNamedThenItsFolderIsForced) {
  DiskCalls disk(path(""));
  write_file_atomically(path("a.txt"), "new");
  EXPECT_EQ(disk.calls(), (Calls{"fsync a.txt.tmp", "rename a.txt.tmp a.txt", "fsync ."}));
}

TEST_F(Durability, ACrashAtAnyCallLeavesTheWholeOldOrTheWholeNewFile) {
  write_file_atomically(path("a.txt"), "old");
  DiskCalls disk(path(""));
  std::set<std::string> seen;
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    const std::string text = read_file(image + "/a.txt");
    EXPECT_TRUE(text == "old" || text == "new") << "'" << text << "' " << when;
    seen.insert(text);
  });
  write_file_atomically(path("a.txt"), "new");
  EXPECT_EQ(seen, (std::set<std::string>{"old", "new"}));
  EXPECT_EQ(read_file(disk.lazy() + "/a.txt"), "new") << "commit() has returned";
}

TEST_F(Durability, WhatWasOverwrittenBeforeTheCommitIsOnTheDiskToo) {
  DiskCalls disk(path(""));
  AtomicFile file(path("a.txt"));
  file.write("0000");
  file.write(std::string(100'000, 'x'));
  file.overwrite(0, "HEAD", 4);
  file.write("tail");
  file.commit();
  EXPECT_EQ(read_file(disk.lazy() + "/a.txt"), "HEAD" + std::string(100'000, 'x') + "tail");
}

TEST_F(Durability, WritesThatAreInterruptedOrShortGoOnWhereTheyStopped) {
  std::string text;
  for (int i = 0; i < 300'000; ++i) text += static_cast<char>('a' + i % 23);
  DiskCalls disk(path(""));
  disk.short_writes = 1001;
  AtomicFile file(path("a.txt"));
  file.write(text.substr(0, 10));
  file.write(text.substr(10));
  file.overwrite(3, text.data() + 3, 5000);
  file.commit();
  EXPECT_GE(disk.writes(), 600) << "they pass through here";
  EXPECT_EQ(read_file(path("a.txt")), text);
}

// Names that the next temporary files would have, taken by links to something else.
TEST_F(Durability, WhatHasTheNameOfATemporaryFileIsLeftAlone) {
  write_file_atomically(path("else.txt"), "somebody else's");
  std::string name;
  {
    const AtomicFile file(path("a.txt"));
    for (const auto& entry : fs::directory_iterator(path(""))) {
      if (entry.path().string().find(".tmp-") != std::string::npos) name = entry.path().string();
    }
  }
  const size_t digits = name.rfind('-') + 1;
  const int number = std::stoi(name.substr(digits));
  for (int i = 1; i <= 3; ++i) {
    fs::create_symlink("else.txt", name.substr(0, digits) + std::to_string(number + i));
  }
  write_file_atomically(path("a.txt"), "text");
  EXPECT_EQ(read_file(path("a.txt")), "text");
  EXPECT_EQ(read_file(path("else.txt")), "somebody else's");
}

TEST_F(Durability, ProcessesThatWriteOneFileAtATimeLeaveOneWholeFileOfOneOfThem) {
  constexpr int kProcesses = 4;
  std::vector<pid_t> children;
  for (int child = 0; child < kProcesses; ++child) {
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      int failed = 0;
      for (int i = 0; i < 20 && failed == 0; ++i) {
        try {
          write_file_atomically(path("a.txt"), std::string(50'000, static_cast<char>('a' + child)));
        } catch (...) {
          failed = 1;
        }
      }
      ::_exit(failed);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = 0;
    while (::waitpid(pid, &status, WNOHANG) == 0) {
      const std::string text = fs::exists(path("a.txt")) ? read_file(path("a.txt")) : "a";
      EXPECT_EQ(text.find_first_not_of(text[0]), std::string::npos);
      EXPECT_TRUE(text.size() == 50'000 || text == "a");
    }
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), {}), 1);
}

// A program whose standard input is closed gets its number for the next file.
TEST_F(Durability, AFileMayHaveTheDescriptorZero) {
  const int input = ::dup(0);
  ::close(0);
  write_file_atomically(path("a.txt"), "text");
  EXPECT_NE(::fcntl(0, F_GETFD), 0) << "nothing was left open";
  sync_folder(path(""));
  if (input >= 0) {
    ::dup2(input, 0);
    ::close(input);
  }
  EXPECT_EQ(read_file(path("a.txt")), "text");
}

TEST_F(Durability, FoldersAreForcedToTheDiskWhereSomethingIsNewInThem) {
  DiskCalls disk(path(""));
  make_folders(path("a/b/c"));
  EXPECT_EQ(std::ranges::count(disk.calls(), "fsync a/b"), 1);
  EXPECT_EQ(std::ranges::count(disk.calls(), "fsync a"), 1);
  EXPECT_EQ(std::ranges::count(disk.calls(), "fsync ."), 1);
  EXPECT_TRUE(fs::is_directory(disk.lazy() + "/a/b/c"));
  disk.forget();
  make_folders(path("a/b/c"));
  EXPECT_EQ(disk.calls(), Calls{}) << "they were there";
  disk.failing["fsync a"] = EIO;
  EXPECT_THROW(make_folders(path("a/d")), IoError);
  EXPECT_THROW(sync_folder(path("none")), IoError);
  write_file_atomically(path("file"), "text");
  EXPECT_THROW(make_folders(path("file/a")), IoError);
}

TEST_F(Durability, AFileThatCannotBeForcedToTheDiskIsNotNamed) {
  write_file_atomically(path("a.txt"), "old");
  DiskCalls disk(path(""));
  disk.failing["fsync a.txt.tmp"] = EIO;
  EXPECT_THROW(write_file_atomically(path("a.txt"), "new"), IoError);
  EXPECT_EQ(read_file(path("a.txt")), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), {}), 1) << "the temporary file goes";
  disk.failing = {{"rename", EACCES}};
  EXPECT_THROW(write_file_atomically(path("a.txt"), "new"), IoError);
  EXPECT_EQ(read_file(path("a.txt")), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), {}), 1);
}

TEST_F(Durability, AFolderThatCannotBeForcedIsAnErrorUnlessItsFileSystemCannotAtAll) {
  DiskCalls disk(path(""));
  disk.failing["fsync ."] = EIO;
  EXPECT_THROW(write_file_atomically(path("a.txt"), "new"), IoError);
  EXPECT_EQ(read_file(path("a.txt")), "new") << "it stands";
  disk.failing["fsync ."] = EINVAL;
  EXPECT_NO_THROW(write_file_atomically(path("a.txt"), "newer"));
}

TEST_F(Durability, AReplacedFileKeepsTheBitsThatTheUmaskWouldTake) {
  const mode_t before = ::umask(0077);
  write_file_atomically(path("a.txt"), "old");
  EXPECT_EQ(mode_of(path("a.txt")), 0600u);
  ASSERT_EQ(::chmod(path("a.txt").c_str(), 0664), 0);
  DiskCalls disk(path(""));
  write_file_atomically(path("a.txt"), "new");
  ::umask(before);
  EXPECT_EQ(mode_of(path("a.txt")), 0664u);
  ASSERT_FALSE(disk.calls().empty());
  EXPECT_EQ(disk.calls().front(), "fchmod a.txt.tmp") << "before anybody sees it";
}

// ---- Checkpoints -------------------------------------------------------------------------------

std::vector<SaveItem> item(double value) {
  return {SaveItem::whole("x", raw::full({300}, value, kF32)),
          SaveItem::whole("y", raw::full({3}, value, kF64))};
}

// The value that all of a checkpoint has; nothing where it does not stand, or not whole.
std::optional<double> value_in(const std::string& folder) {
  try {
    CheckpointReader reader(folder);
    reader.verify();
    const double value = reader.read("y").to_vector()[0];
    return reader.read("x").to_vector() == std::vector<double>(300, value)
               ? std::optional<double>(value)
               : std::nullopt;
  } catch (const Error& error) {
    return std::nullopt;
  }
}

class DurableCheckpoints : public Durability, public ::testing::WithParamInterface<bool> {};

TEST_P(DurableCheckpoints, ACrashAtAnyCallLeavesTheWholeOldOrTheWholeNewOne) {
  CheckpointSaver saver;
  saver.save(path("a"), item(1));
  DiskCalls disk(path(""));
  std::set<double> seen;
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    const auto value = value_in(image + "/a");
    ASSERT_TRUE(value == 1.0 || value == 2.0) << "neither stands, " << when;
    seen.insert(*value);
  });
  saver.save(path("a"), item(2), {.asynchronous = GetParam(), .file_bytes = 1});
  saver.wait();
  disk.look = {};
  EXPECT_EQ(seen, (std::set<double>{1, 2}));
  EXPECT_EQ(value_in(disk.lazy() + "/a"), 2.0) << "save() has returned";
  EXPECT_EQ(std::ranges::count(disk.calls(), "exchange a.tmp a"), 1);
}
INSTANTIATE_TEST_SUITE_P(Threads, DurableCheckpoints, ::testing::Bool(), [](const auto& info) {
  return info.param ? "asynchronous" : "synchronous";
});

TEST_F(Durability, FilesOfSeveralRanksAndOfHooksAreOnTheDiskBeforeTheFolderHasItsName) {
  DiskCalls disk(path(""));
  distributed::compared_ranks(2, [&](int rank) {
    CheckpointSaver saver;
    saver.save(path("a"), [&](const std::string& temporary, auto&) {
      const std::string own = temporary + "/of-rank-" + std::to_string(rank);
      fs::create_directory(own);
      std::ofstream(own + "/notes.txt") << "a hook's";
      return item(1);
    });
  });
  const std::string image = disk.lazy();
  EXPECT_EQ(value_in(image + "/a"), 1.0);
  for (const char* notes : {"/a/of-rank-0/notes.txt", "/a/of-rank-1/notes.txt"}) {
    EXPECT_EQ(read_file(image + notes), "a hook's");
  }
  // The last call before the name is the sync of what is inside.
  const auto named = std::ranges::find(disk.calls(), "rename a.tmp a");
  ASSERT_NE(named, disk.calls().end());
  EXPECT_EQ(*std::prev(named), "fsync a.tmp");
  EXPECT_EQ(*std::next(named), "fsync .");
}

TEST_F(Durability, FoldersThatASaveMakesAboveItsOwnAreOnTheDiskToo) {
  DiskCalls disk(path(""));
  CheckpointSaver saver;
  saver.save(path("runs/today/step-1"), item(1));
  EXPECT_EQ(value_in(disk.lazy() + "/runs/today/step-1"), 1.0);
}

// A file system without renameat2's exchange.
TEST_F(Durability, BetweenTheTwoRenamesTheOldOneIsKeptAsideAndNoSweepTakesIt) {
  CheckpointSaver saver;
  saver.save(path("a"), item(1));
  DiskCalls disk(path(""));
  disk.failing["exchange"] = EINVAL;
  int without_a_name = 0;
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    // What the next save does first, and then it may fail.
    distributed::remove_leftovers(image, [](const std::string& name) { return name == "a"; });
    if (const auto value = value_in(image + "/a")) {
      EXPECT_TRUE(value == 1.0 || value == 2.0) << when;
      return;
    }
    ++without_a_name;
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(image)) left.push_back(entry.path().string());
    ASSERT_EQ(left.size(), 1u) << when;
    EXPECT_TRUE(left[0].ends_with("-old")) << left[0];
    EXPECT_EQ(value_in(left[0]), 1.0) << when;
  });
  saver.save(path("a"), item(2));
  disk.look = {};
  EXPECT_GT(without_a_name, 0);
  EXPECT_EQ(value_in(disk.lazy() + "/a"), 2.0);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), {}), 1) << "and then it goes";

  // The new one stands: what was moved aside is swept.
  fs::create_directory(path("a.tmp-77-0-old"));
  distributed::remove_leftovers(path(""), [](const std::string& name) { return name == "a"; });
  EXPECT_FALSE(fs::exists(path("a.tmp-77-0-old")));
}

TEST_F(Durability, AFolderThatCannotBeForcedToTheDiskIsAnError) {
  CheckpointSaver saver;
  saver.save(path("a"), item(1));
  DiskCalls disk(path(""));
  disk.failing["fsync ."] = EIO;
  EXPECT_THROW(saver.save(path("a"), item(2)), IoError);
  disk.failing["fsync ."] = EINVAL;
  EXPECT_NO_THROW(saver.save(path("a"), item(3)));
  disk.failing = {{"fsync a.tmp/notes.txt", EIO}};
  const auto with_notes = [&](const std::string& temporary, auto&) {
    std::ofstream(temporary + "/notes.txt") << "a hook's";
    return item(4);
  };
  EXPECT_THROW(saver.save(path("a"), with_notes), IoError);
  EXPECT_EQ(value_in(path("a")), 3.0);
  disk.failing = {{"exchange", EACCES}};
  EXPECT_THROW(saver.save(path("a"), item(5)), IoError);
  EXPECT_EQ(value_in(path("a")), 3.0);
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), {}), 1) << "no temporary folder stays";
}

TEST_F(Durability, AFileThatIsShorterThanWasWrittenFailsTheSave) {
  CheckpointSaver saver;
  for (const int change : {-1, 1}) {
    const auto damage = [&](SaveStage stage) {
      if (stage != SaveStage::kAgreed) return;
      for (const auto& entry : fs::directory_iterator(path(""))) {
        const fs::path file = entry.path() / "rank-0-0.bin";
        fs::resize_file(file, fs::file_size(file) + static_cast<uintmax_t>(change));
      }
    };
    EXPECT_THROW(saver.save(path("a"), item(1), {.at_stage = damage}), IoError);
    EXPECT_TRUE(fs::is_empty(path("")));
  }
}

TEST_F(Durability, ACheckpointThatIsRemovedIsGoneOrStillStandsWhole) {
  CheckpointSaver().save(path("a"), item(1));
  DiskCalls disk(path(""));
  std::set<bool> stood;
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    const bool stands = fs::exists(image + "/a");
    EXPECT_TRUE(!stands || value_in(image + "/a") == 1.0) << when;
    stood.insert(stands);
  });
  distributed::remove_checkpoint(path("a"));
  EXPECT_EQ(stood, (std::set<bool>{false, true}));
  EXPECT_TRUE(fs::is_empty(path("")));
}

// ---- The files of a model ----------------------------------------------------------------------

StateDict weights_of(double value) {
  StateDict weights;
  for (const char* name : {"a", "b", "c"}) weights.set(name, raw::full({8}, value, kF32));
  return weights;
}
std::optional<double> value_of_model(const std::string& folder) {
  try {
    const StateDict weights = load_weights(folder);
    std::set<double> values;
    for (const auto& [name, tensor] : weights) {
      for (const double value : tensor.to_vector()) values.insert(value);
    }
    return weights.size() == 3 && values.size() == 1 ? std::optional(*values.begin())
                                                     : std::nullopt;
  } catch (const Error& error) {
    return std::nullopt;
  }
}

TEST_F(Durability, TheFileOfAModelIsReplacedWholeAndIsOnTheDiskWhenTheSaveReturns) {
  save_weights(weights_of(1), path("out"));
  DiskCalls disk(path(""));
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    const auto value = value_of_model(image + "/out");
    EXPECT_TRUE(value == 1.0 || value == 2.0) << when;
  });
  save_weights(weights_of(2), path("out"));
  disk.look = {};
  EXPECT_EQ(value_of_model(disk.lazy() + "/out"), 2.0);
}

TEST_F(Durability, TheIndexOfAModelComesAfterItsShardsAndBothAreOnTheDiskWhenTheSaveReturns) {
  DiskCalls disk(path(""));
  int indices = 0;
  at_any_crash(disk, [&](const std::string& image, const std::string& when) {
    if (!fs::exists(image + "/deep/out/model.safetensors.index.json")) return;
    EXPECT_EQ(value_of_model(image + "/deep/out"), 1.0) << when;
    ++indices;
  });
  save_weights(weights_of(1), path("deep/out"), {.max_shard_size = "40B"});
  disk.look = {};
  EXPECT_GT(indices, 0);
  EXPECT_EQ(value_of_model(disk.lazy() + "/deep/out"), 1.0);
}

// Over shards of an earlier save, as many, fewer, more, or one file; and over what a killed save
// has left.
TEST_F(Durability, ShardsOfAModelAreReplacedAllOrNone) {
  const std::string shards[] = {"40B", "80B", "1GB"};
  for (const std::string& before : shards) {
    for (const std::string& after : shards) {
      fs::remove_all(path("out"));
      save_weights(weights_of(1), path("out"), {.max_shard_size = before});
      {
        DiskCalls disk(path(""));
        at_any_crash(disk, [&](const std::string& image, const std::string& when) {
          const auto value = value_of_model(image + "/out");
          EXPECT_TRUE(value == 1.0 || value == 2.0) << before << " by " << after << ", " << when;
        });
        save_weights(weights_of(2), path("out"), {.max_shard_size = after});
        disk.look = {};
        EXPECT_EQ(value_of_model(disk.lazy() + "/out"), 2.0);
      }
      save_weights(weights_of(3), path("out"), {.max_shard_size = after});
      EXPECT_EQ(value_of_model(path("out")), 3.0);
    }
  }
}

// Whether a process is there is asked, and does nothing to it.
TEST_F(Durability, WhatALivingProcessIsSavingStays) {
  const auto before = std::signal(SIGHUP, SIG_DFL);  // the signal 1, which nohup lets be ignored
  const pid_t other = ::fork();
  if (other == 0) {
    for (;;) ::pause();
  }
  std::signal(SIGHUP, before);
  const std::string folder = path("out/.saving-" + std::to_string(other) + "-abcdef");
  fs::create_directories(folder);
  save_weights(weights_of(1), path("out"), {.max_shard_size = "40B"});
  EXPECT_TRUE(fs::exists(folder));
  ::usleep(20'000);
  int status = 0;
  EXPECT_EQ(::waitpid(other, &status, WNOHANG), 0) << "it ended with status " << status;
  ::kill(other, SIGKILL);
  ::waitpid(other, &status, 0);
  save_weights(weights_of(2), path("out"), {.max_shard_size = "40B"});
  EXPECT_FALSE(fs::exists(folder));
}

TEST_F(Durability, AKilledSaveOfShardsIsSavedOverAndWhatItLeftGoes) {
  const SaveModelOptions small{.max_shard_size = "40B"};
  save_weights(weights_of(1), path("out"), small);
  const auto files_of = [&](const std::string& folder) {
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(folder)) {
      files += entry.path().filename().string().starts_with(".saving-") ? 1000 : 1;
    }
    return files;
  };
  const size_t files = files_of(path("out"));
  const TestFolder elsewhere;
  std::vector<std::string> images;
  {
    DiskCalls disk(path(""));
    disk.look = [&] {
      const std::string image = elsewhere.path(std::to_string(images.size()));
      fs::copy(path("out"), image, fs::copy_options::recursive);
      // As of a process that is gone.
      for (const auto& entry : fs::directory_iterator(image)) {
        const std::string name = entry.path().filename().string();
        const size_t random = name.rfind('-');
        if (!name.starts_with(".saving-")) continue;
        fs::rename(entry.path(), fs::path(image) / (".saving-999999999" + name.substr(random)));
        break;
      }
      images.push_back(image);
    };
    save_weights(weights_of(2), path("out"), small);
    disk.look = {};
  }
  ASSERT_GT(images.size(), 5u);
  for (const std::string& image : images) {
    save_weights(weights_of(3), image, small);
    EXPECT_EQ(value_of_model(image), 3.0);
    EXPECT_EQ(files_of(image), files) << image;
  }
}

// One that goes on is left alone.
TEST_F(Durability, FoldersOfSavesUnderWayStay) {
  fs::create_directories(path("out/.saving-" + std::to_string(::getpid()) + "-abcdef"));
  fs::create_directories(path("out/.saving-abcdef"));  // as earlier versions named them
  save_weights(weights_of(1), path("out"));
  EXPECT_TRUE(fs::exists(path("out/.saving-" + std::to_string(::getpid()) + "-abcdef")));
  EXPECT_FALSE(fs::exists(path("out/.saving-abcdef")));
}

}  // namespace
}  // namespace tessera::test_durability
