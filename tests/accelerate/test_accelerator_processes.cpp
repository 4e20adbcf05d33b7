// What only some ranks do: order, choice, splitting, triggers, logging, batch sizes, random draws.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <variant>

#include <tessera/accelerate/batch_size.h>
#include <tessera/accelerate/logging.h>
#include <tessera/accelerate/process/process_control.h>
#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/memory/allocator.h>

namespace tessera::test_accelerator_processes {
namespace {

using Strings = std::vector<std::string>;

// Calls back and returns the text of the error, empty where there is none.
template <class E = Error>
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return {};
}

// SCR-1
TEST(ProcessControl, RanksKnowWhichTheyAreAndPrintOnce) {
  for (const int ranks : {1, 2, 4}) {
    testing::internal::CaptureStdout();
    on_ranks(ranks, [&](int rank) {
      Accelerator accelerator;
      EXPECT_EQ(accelerator.process_index(), rank);
      EXPECT_EQ(accelerator.num_processes(), ranks);
      EXPECT_EQ(accelerator.use_distributed(), ranks > 1);
      EXPECT_EQ(accelerator.is_main_process(), rank == 0);
      EXPECT_EQ(accelerator.is_last_process(), rank == ranks - 1);
      EXPECT_EQ(accelerator.is_local_main_process(), rank == 0);
      accelerator.wait_for_everyone();
      accelerator.print("loss ", 0.5, " of ", ranks, ' ', tensor({1, 2.5}));
    });
    EXPECT_EQ(testing::internal::GetCapturedStdout(),
              "loss 0.5 of " + std::to_string(ranks) + " tensor([1.0000, 2.5000])\n");
  }
}

// SCR-2
TEST(ProcessControl, TheMainProcessComesFirst) {
  std::mutex mutex;
  Strings lines;
  on_ranks(4, [&](int rank) {
    const ProcessControl ranks;
    const int result = ranks.main_process_first([&] {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const std::lock_guard lock(mutex);
      lines.push_back(rank == 0 ? "main" : "other");
      return rank * 2;
    });
    EXPECT_EQ(result, rank * 2);
    EXPECT_EQ(lines.size(), 4u);
  });
  EXPECT_EQ(lines, (Strings{"main", "other", "other", "other"}));
}

// Trap 24: main_process_first is not exception safe.
TEST(ProcessControl, ABodyThatThrowsReleasesAndInformsTheOtherRanks) {
  for (const int thrower : {0, 2}) {
    std::atomic<int> informed = 0, ran = 0;
    on_ranks(4, [&](int rank) {
      const ProcessControl ranks;
      const std::string text = error_of<Error>([&] {
        ranks.main_process_first([&] {
          ++ran;
          if (rank == thrower) throw IoError("cache: the disk is full");
        });
      });
      EXPECT_NE(text.find("the disk is full"), std::string::npos) << text;
      if (rank != thrower) {
        EXPECT_NE(text.find(thrower == 0 ? "on the main rank" : "on rank 2"), std::string::npos);
        ++informed;
      }
      ranks.wait_for_everyone();  // and the ranks go on together
    });
    EXPECT_EQ(informed, 3);
    EXPECT_EQ(ran, thrower == 0 ? 1 : 4);
  }
}

// Two nodes of two ranks.
void on_two_nodes(const std::function<void(int rank)>& body) {
  distributed::compared_ranks(4, [&](int rank) {
    distributed::rank_context().local_rank = rank % 2;
    distributed::rank_context().local_world_size = 2;
    body(rank);
  });
}

TEST(ProcessControl, TheLocalFormWaitsForItsOwnNodeAlone) {
  on_two_nodes([](int rank) {
    const ProcessControl ranks;
    EXPECT_EQ(ranks.local_process_index(), rank % 2);
    EXPECT_EQ(ranks.is_local_main_process(), rank % 2 == 0);
    // The second node alone: upstream waits for all nodes here, for ever.
    if (rank < 2) return;
    EXPECT_EQ(ranks.local_main_process_first([&] { return rank; }), rank);
  });
}

// SCR-3
TEST(ProcessControl, BodiesRunOnTheChosenRankAlone) {
  std::mutex mutex;
  std::map<std::string, std::vector<int>> ran;
  on_two_nodes([&](int rank) {
    const ProcessControl ranks;
    const auto note = [&](const std::string& what) {
      return [&, what] {
        const std::lock_guard lock(mutex);
        ran[what].push_back(rank);
      };
    };
    ranks.on_main_process(note("main"));
    ranks.on_last_process(note("last"));
    ranks.on_local_main_process(note("local main"));
    ranks.on_local_process(1, note("local 1"));
    for (int index = 0; index < 4; ++index) {
      ranks.on_process(index, note("rank " + std::to_string(index)));
    }
    const std::optional<std::string> text =
        ranks.on_process(2, [] { return std::string("from rank 2"); });
    EXPECT_EQ(text.value_or(""), rank == 2 ? "from rank 2" : "");
    EXPECT_THROW(ranks.on_process(4, [] {}), ValueError);
    EXPECT_THROW(ranks.on_local_process(2, [] {}), ValueError);
  });
  for (auto& [what, list] : ran) std::ranges::sort(list);
  EXPECT_EQ(ran, (std::map<std::string, std::vector<int>>{{"main", {0}},
                                                          {"last", {3}},
                                                          {"local main", {0, 2}},
                                                          {"local 1", {1, 3}},
                                                          {"rank 0", {0}},
                                                          {"rank 1", {1}},
                                                          {"rank 2", {2}},
                                                          {"rank 3", {3}}}));
}

std::vector<int> numbers(int count) {
  std::vector<int> list(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) list[static_cast<size_t>(i)] = i;
  return list;
}

// SCR-4a
TEST(SplitBetweenProcesses, AListOfTwiceTheRanksGivesTwoEach) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [&](int rank) {
      const ProcessControl ranks;
      EXPECT_EQ(ranks.split_between_processes(numbers(2 * size)),
                (std::vector<int>{2 * rank, 2 * rank + 1}));
    });
  }
}

// SCR-4b
TEST(SplitBetweenProcesses, PaddedPartsGatherToTheInputInOrder) {
  for (const int size : {1, 2, 4}) {
    for (const int length : {2 * size, 2 * size - 1}) {
      on_ranks(size, [&](int) {
        Accelerator ranks;
        const auto expected = static_cast<size_t>((length + size - 1) / size);
        const std::vector<int> list = numbers(length);
        const std::vector<int> part = ranks.split_between_processes(list, true);
        EXPECT_EQ(part.size(), expected);
        std::vector<int> all;
        for (const auto& one : distributed::all_gather_objects(ranks.world(), part)) {
          for (const int value : one.get<std::vector<int>>()) all.push_back(value);
        }
        all.resize(static_cast<size_t>(length));
        EXPECT_EQ(all, list);
        const Tensor rows = arange(0, 3 * length, 1, {kF32}).view({length, 3});
        const Tensor own = ranks.split_between_processes(rows, true);
        EXPECT_EQ(own.size(0), static_cast<int64_t>(expected));
        EXPECT_EQ(ranks.gather(own).narrow(0, 0, length).to_vector<float>(),
                  rows.to_vector<float>());
      });
    }
  }
}

// SCR-4c, and trap 30: the split changes the caller's dictionary.
TEST(SplitBetweenProcesses, AMapOfListsAndATensorIsSplitByKeyAndLeftAlone) {
  using Value = std::variant<std::vector<int>, Strings, Tensor>;
  using Map = std::map<std::string, Value>;
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [&](int rank) {
      const ProcessControl ranks;
      const Map map = {{"numbers", numbers(8)},
                       {"words", Strings{"a", "b", "c", "d", "e", "f", "g", "h"}},
                       {"rows", arange(0, 8, 1, {kF32})}};
      const Map part = ranks.split_between_processes(map);
      const int each = 8 / size;
      const auto& own = std::get<std::vector<int>>(part.at("numbers"));
      const auto& words = std::get<Strings>(part.at("words"));
      const auto rows = std::get<Tensor>(part.at("rows")).to_vector<float>();
      ASSERT_EQ(own.size(), static_cast<size_t>(each));
      ASSERT_EQ(words.size(), static_cast<size_t>(each));
      ASSERT_EQ(rows.size(), static_cast<size_t>(each));
      for (int i = 0; i < each; ++i) {
        EXPECT_EQ(own[static_cast<size_t>(i)], rank * each + i);
        EXPECT_EQ(words[static_cast<size_t>(i)], std::string(1, char('a' + rank * each + i)));
        EXPECT_EQ(rows[static_cast<size_t>(i)], rank * each + i);
      }
      EXPECT_EQ(std::get<std::vector<int>>(map.at("numbers")), numbers(8));
      EXPECT_EQ(std::get<Tensor>(map.at("rows")).numel(), 8);
      const Map uneven = {{"numbers", numbers(8)}, {"rows", arange(0, 7, 1, {kF32})}};
      const std::string text = error_of<ValueError>([&] { ranks.split_between_processes(uneven); });
      EXPECT_NE(text.find("'rows' has 7"), std::string::npos) << text;
    });
  }
}

// SCR-4d
TEST(SplitBetweenProcesses, TheFirstRanksHaveOneMore) {
  for (const int size : {1, 2, 4, 8}) {
    on_ranks(size, [&](int rank) {
      const ProcessControl ranks;
      const auto part = ranks.split_between_processes(numbers(17));
      EXPECT_EQ(part.size(), static_cast<size_t>(17 / size + (rank < 17 % size ? 1 : 0)));
    });
  }
  EXPECT_THROW(part_of(0, 0, 2, true), ValueError);
  EXPECT_EQ(part_of(1, 3, 4, true).repeats, 1);
  EXPECT_EQ(part_of(1, 3, 4, true).end - part_of(1, 3, 4, true).begin, 0);
}

// SCR-12
TEST(Trigger, SetOnOneRankIsTrueOnceOnAll) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [&](int rank) {
      ProcessControl ranks;
      EXPECT_FALSE(ranks.check_trigger());
      if (rank == size - 1) ranks.set_trigger();
      EXPECT_TRUE(ranks.check_trigger());
      EXPECT_FALSE(ranks.check_trigger());
    });
  }
}

// ---- Random numbers ----------------------------------------------------------------------------

// SCR-5
TEST(Accelerator, RandomNumbersAreSynchronisedFromRankZero) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](int rank) {
      manual_seed(static_cast<uint64_t>(100 + rank));
      for (int i = 0; i < rank; ++i) next_random_stream();
      Accelerator accelerator;
      accelerator.synchronize_rng_states();
      EXPECT_EQ(random_state().seed, 100u);
      const Tensor drawn = accelerator.gather(rand({1, 4}));
      for (int other = 1; other < size; ++other) {
        EXPECT_EQ(drawn[other].to_vector<float>(), drawn[0].to_vector<float>());
      }
    });
  }
}

TEST(Accelerator, ASeedIsEverybodysUnlessItIsDeviceSpecific) {
  on_ranks(2, [&](int rank) {
    Accelerator accelerator;
    accelerator.set_seed(7);
    EXPECT_EQ(random_state().seed, 7u);
    accelerator.set_seed(7, true);
    const auto seeds = distributed::all_gather_objects(accelerator.world(), random_state().seed);
    EXPECT_NE(seeds[0], seeds[1]);
    EXPECT_EQ(seeds[static_cast<size_t>(rank)].get<uint64_t>(), random_state().seed);
    // Trap 22: seed + rank would make rank 1 of seed 7 rank 0 of seed 8.
    accelerator.set_seed(8, true);
    const auto next = distributed::all_gather_objects(accelerator.world(), random_state().seed);
    EXPECT_NE(next[0], seeds[1]);
  });
}

TEST(Accelerator, ASeedMakesAttentionDeterministicWhereItIsAskedTo) {
  bool& deterministic = Context::current().slot<kernels::AttentionPolicy>().deterministic;
  const ScopedValue restored(deterministic, false);
  Accelerator accelerator;
  accelerator.set_seed(7);
  EXPECT_FALSE(deterministic);
  accelerator.set_seed(7, false, true);
  EXPECT_TRUE(deterministic);
  accelerator.set_seed(7);
  EXPECT_TRUE(deterministic) << "another seed leaves it as it is";
}

// ---- Logging -----------------------------------------------------------------------------------

std::string say_for_caller(Logger& log, SourceLocation where) {
  log.info("for my caller", {.where = where});
  return std::to_string(where.line());
}

// Of the program, not of the library.
TEST(ProcessControl, AWaitThatOthersDoNotShareIsNamedByTheCallersLine) {
  std::mutex mutex;
  std::string message;
  distributed::failing_ranks("one rank waits, the other reduces", 2, [&](int rank) {
    const ProcessControl ranks;
    try {
      if (rank == 0) {
        ranks.wait_for_everyone();
      } else {
        distributed::all_reduce(zeros({1}));
      }
    } catch (const DistributedError& error) {
      const std::lock_guard lock(mutex);
      message = error.what();
    }
  });
  EXPECT_EQ(message.find("process_control.cpp"), std::string::npos) << message;
  EXPECT_NE(message.find("test_accelerator_processes.cpp"), std::string::npos) << message;
}

// What calls collectives far below names the line here before that in the library, to the rank
// that is there and to the others.
TEST(Accelerator, ACallThatOthersDoNotShareIsNamedByTheProgramsLine) {
  using distributed::Channel;
  struct Call {
    const char* name;
    unsigned line;
    std::function<void(Accelerator&, Regression&)> call;
    Channel channel;  // of its first collective
  };
  const std::string folder = testing::TempDir() + "accelerator_line";
  const auto loss = [](Regression& model) { return model(ones({2, 1})).mean(); };
  const Call calls[] = {
      {"save_state", __LINE__, [&](auto& own, auto&) { own.save_state(folder); }, Channel::kUser},
      {"load_state", __LINE__, [&](auto& own, auto&) { own.load_state(folder); }, Channel::kUser},
      {"backward", __LINE__, [&](auto& own, auto& m) { own.backward(loss(m)); }, Channel::kControl},
      {"gather_object", __LINE__, [](auto& own, auto&) { own.gather_object(std::vector<int>{1}); },
       Channel::kUser},
      {"check_trigger", __LINE__, [](auto& own, auto&) { own.check_trigger(); }, Channel::kControl},
      {"main_process_first", __LINE__, [](auto& own, auto&) { own.main_process_first([] {}); },
       Channel::kControl},
  };
  for (const auto& [name, line, call, channel] : calls) {
    const std::string place = "test_accelerator_processes.cpp:" + std::to_string(line);
    distributed::failing_ranks("one rank calls the facade, the other reduces", 2, [&](int rank) {
      Accelerator accelerator;
      Regression model;
      accelerator.prepare(model);
      const std::string message = error_of<DistributedError>([&] {
        if (rank == 0) return call(accelerator, model);
        distributed::world().all_reduce(zeros({7}), {}, {.channel = channel}).wait();
      });
      EXPECT_NE(message.find("rank 0: "), std::string::npos) << name << ": " << message;
      EXPECT_NE(message.find(" at " + place), std::string::npos) << name << ": " << message;
    });
  }
}

// A scope of its own ends with the call: later calls are not taken for parts of it.
TEST(Accelerator, TheProgramsLineIsThatOfTheCallUnderWay) {
  on_ranks(2, [](int) {
    Accelerator accelerator;
    Regression model;
    accelerator.prepare(model);
    const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
    const int line = __LINE__ + 1;
    accelerator.backward(model(ones({2, 1})).mean());
    EXPECT_THROW(accelerator.backward(ones({2})), ShapeError);
    distributed::all_reduce(ones({1}));
    const auto records = scope.records();
    ASSERT_GT(records.size(), 1u);
    EXPECT_TRUE(std::string(records.front().file).ends_with("_processes.cpp"));
    EXPECT_EQ(records.front().line, line);
    EXPECT_GT(records.back().line, line + 1);
  });
}

// LOG-1
TEST(Logger, LinesNameTheCallerAndARankWhereSeveralSpeak) {
  std::mutex mutex;
  Strings lines;
  std::string here, there;
  on_ranks(2, [&](int rank) {
    const ProcessControl ranks;
    Logger log("train", ranks, "info");
    log.set_sink([&](const std::string& line) {
      const std::lock_guard lock(mutex);
      lines.push_back(line);
    });
    log.info("begins");
    if (rank == 0) here = std::to_string(SourceLocation::current().line() - 1);
    log.debug("too fine");
    for (int i = 0; i < 3; ++i) log.warning_once("seldom");
    const std::string line = say_for_caller(log, SourceLocation::current());
    if (rank == 0) there = line;
    ranks.wait_for_everyone();
    log.error("in turn", {.in_order = true});
    if (rank == 1) log.info("one rank", {.main_process_only = false});
  });
  const std::string file = "train (test_accelerator_processes.cpp:";
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_EQ(lines[0], "INFO " + file + here + "): begins");
  EXPECT_EQ(lines[1].find("WARNING train"), 0u);
  EXPECT_EQ(lines[2], "INFO " + file + there + "): for my caller");
  EXPECT_EQ(lines[3].find("[rank 0] ERROR train"), 0u);
  EXPECT_EQ(lines[4].find("[rank 1] ERROR train"), 0u);
  EXPECT_EQ(lines[5].find("[rank 1] INFO train"), 0u);
}

TEST(Logger, TheLevelIsTheSettingUnlessTheCallerSaysAnother) {
  const ProcessControl ranks;
  ::setenv("ACCELERATE_LOG_LEVEL", "error", 1);
  EXPECT_EQ(Logger("a", ranks).level(), LogLevel::kError);
  EXPECT_EQ(Logger("a", Accelerator()).level(), LogLevel::kError);
  EXPECT_EQ(Logger("a", Accelerator({.log_level = LogLevel::kInfo})).level(), LogLevel::kInfo);
  // Both spellings that differ are a mistake, as for every setting.
  ::setenv("TESSERA_LOG_LEVEL", "Debug", 1);
  EXPECT_THROW(Logger("a", ranks), ConfigError);
  ::unsetenv("ACCELERATE_LOG_LEVEL");
  EXPECT_EQ(Logger("a", ranks).level(), LogLevel::kDebug);
  EXPECT_EQ(Logger("a", ranks, "off").level(), LogLevel::kOff);
  ::unsetenv("TESSERA_LOG_LEVEL");
  EXPECT_EQ(Logger("a", ranks).level(), LogLevel::kWarning);
  EXPECT_THROW(Logger("a", ranks, "loud"), ConfigError);
  // From a file and from a flag of the launcher too.
  const std::string file = testing::TempDir() + "log_level.json";
  std::ofstream(file) << R"({"log_level": "off"})";
  EXPECT_EQ(Logger("a", Accelerator({.config_file = file})).level(), LogLevel::kOff);
  ::setenv("TESSERA_LAUNCH_SETTINGS",
           accelerate::launch_settings_text({{"log_level", "info"}}, {}).c_str(), 1);
  EXPECT_EQ(Logger("a", ranks).level(), LogLevel::kInfo);
  ::unsetenv("TESSERA_LAUNCH_SETTINGS");
}

// ---- Batch sizes -------------------------------------------------------------------------------

// MEM-1
TEST(BatchSize, SizesFallByATenthUntilOneFits) {
  const ProcessControl ranks;
  std::vector<int64_t> tried;
  const int64_t found = find_executable_batch_size(ranks, 128, [&](int64_t size) {
    tried.push_back(size);
    if (size != 8) throw OutOfMemory("allocate: no room");
    return size;
  });
  EXPECT_EQ(found, 8);
  EXPECT_EQ(tried, (std::vector<int64_t>{128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36,
                                         32,  28,  25,  22, 19, 17, 15, 13, 11, 9,  8}));
}

// MEM-1
TEST(BatchSize, ZeroIsAnErrorAndOthersPass) {
  const ProcessControl ranks;
  EXPECT_THROW(find_executable_batch_size(ranks, 0, [](int64_t) {}), ValueError);
  const std::string text = error_of<OutOfMemory>(
      [&] { find_executable_batch_size(ranks, 16, [](int64_t) { throw std::bad_alloc(); }); });
  EXPECT_NE(text.find("no batch size fits"), std::string::npos) << text;
  // Told by type, not by the words of the message.
  int tries = 0;
  EXPECT_THROW(find_executable_batch_size(ranks, 16,
                                          [&](int64_t) {
                                            ++tries;
                                            throw ValueError("CUDA out of memory");
                                          }),
               ValueError);
  EXPECT_EQ(tries, 1);
  EXPECT_THROW(
      find_executable_batch_size(ranks, 16, [](int64_t) { throw OutOfMemory(""); },
                                 {.next = [](int64_t size) { return size; }, .on_failure = {}}),
      ValueError);
}

// MEM-1: what a try that failed had allocated is gone before the next one. A body that takes the
// size twice does not compile.
template <class Body>
concept Searchable = requires(const ProcessControl& ranks, Body body) {
  find_executable_batch_size(ranks, 16, body);
};
TEST(BatchSize, ATryThatFailedLeavesNoMemoryBehind) {
  static_assert(Searchable<decltype([](int64_t) {})>);
  static_assert(!Searchable<decltype([](int64_t, int64_t) {})>);
  const ProcessControl ranks;
  const int64_t start = memory_stats()->current();
  std::vector<int64_t> held;
  find_executable_batch_size(ranks, 16, [&](int64_t size) {
    held.push_back(memory_stats()->current());
    const Tensor activations = raw::empty({size, 1024}, kF32);
    const Tensor gradients = raw::empty({size, 1024}, kF32);
    if (size > 10) throw OutOfMemory("allocate: no room");
  });
  EXPECT_EQ(held, std::vector<int64_t>(4, start));  // 16 14 12 10
  EXPECT_EQ(memory_stats()->current(), start);
}

// Trap 23: every rank retries by itself.
TEST(BatchSize, AllRanksRetryWhereOneHasNoRoom) {
  std::mutex mutex;
  std::map<int, std::vector<int64_t>> tried;
  Strings told;
  on_ranks(4, [&](int rank) {
    const ProcessControl ranks;
    const int64_t found = find_executable_batch_size(
        ranks, 128,
        [&](int64_t size) {
          const std::lock_guard lock(mutex);
          tried[rank].push_back(size);
          if (rank == 2 && size > 100) throw OutOfMemory("allocate: no room");
          return size;
        },
        {.next = {}, .on_failure = [&](int64_t size, const std::string& reason) {
           told.push_back(std::to_string(size) + " " + reason);
         }});
    EXPECT_EQ(found, 92);
  });
  for (const auto& [rank, sizes] : tried) {
    EXPECT_EQ(sizes, (std::vector<int64_t>{128, 115, 103, 92})) << rank;
  }
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told[0], "128 rank 2: allocate: no room");
}

}  // namespace
}  // namespace tessera::test_accelerator_processes
