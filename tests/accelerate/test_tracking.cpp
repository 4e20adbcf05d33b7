// Trackers, progress, memory reports and profiles: what a run tells about itself.
// ctest labels: threads
// ctest own program: scripts/check_tensorboard.sh runs it
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/tracking/memory_tracker.h>
#include <tessera/accelerate/tracking/profile.h>
#include <tessera/accelerate/tracking/progress.h>
#include <tessera/accelerate/tracking/tracker.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/crc32c.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/rank_context.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "source_dir.h"

namespace tessera::test_tracking {
namespace {

using Json = nlohmann::json;

class Tracking : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera_tracking_" + std::to_string(::getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder() const { return folder_.string(); }
  std::string read(const std::string& name) const {
    std::ifstream in(folder_ / name, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  std::vector<std::string> lines(const std::string& name) const {
    std::istringstream in(read(name));
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }
  std::string event_file() const {
    std::string found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
        EXPECT_TRUE(found.empty());
        found = entry.path().filename().string();
      }
    }
    return found;
  }

 private:
  std::filesystem::path folder_;
};

TEST(Crc32c, KnownAnswersHoldAndPartsChain) {
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);  // RFC 3720 and every table of CRCs
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xff);
  EXPECT_EQ(crc32c(zeros.data(), 32), 0x8A9136AAu);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(ones.data(), 32), 0x62A8AB43u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
  const std::string text = "The whole in pieces of any length";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(crc32c(text.data() + cut, text.size() - cut, crc32c(text.data(), cut)),
              crc32c(text.data(), text.size()));
  }
}

TEST(TrackedValues, GroupsBecomePathsAndNumbersReadBack) {
  const auto flat = flatten(
      {{"lr", 3e-4}, {"model", {{"layers", 6}, {"norm", {{"eps", 1e-5f}}}}}, {"bias", true}});
  ASSERT_EQ(flat.size(), 4u);
  EXPECT_EQ(flat[1].first, "model/layers");
  EXPECT_EQ(std::get<int64_t>(flat[1].second), 6);
  EXPECT_EQ(flat[2].first, "model/norm/eps");
  EXPECT_EQ(to_text(flat[3].second), "true");
  for (const double value : {0.1, 1.0 / 3, 1e300, -2.5e-310, 123456789.125}) {
    EXPECT_EQ(std::strtod(to_text(value).c_str(), nullptr), value);
  }
  EXPECT_EQ(to_text(0.0003), "0.0003");
  EXPECT_EQ(to_text(std::nan("")), "nan");
}

// TRK-1: a tensor value.
TEST(TrackedValues, ATensorOfOneElementIsANumberAndALargerOneAnError) {
  EXPECT_EQ(std::get<double>(TrackedValue(full({}, 2.5)).plain()), 2.5);
  EXPECT_EQ(std::get<int64_t>(TrackedValue(full({1}, 7, {.dtype = kI64})).plain()), 7);
  EXPECT_THROW(TrackedValue{zeros({2})}, ShapeError);
  EXPECT_THROW(TrackedValue{Tensor()}, ShapeError);
}

// TRK-1 for each tracker: start, hyper-parameters, scalars.
TEST_F(Tracking, JsonLinesHoldEveryStepAndContinueAnOlderFile) {
  for (int run = 0; run < 2; ++run) {
    Trackers trackers({.folder = folder(), .with = {"jsonl"}});
    trackers.start("gpt \"small\"", {{"lr", 3e-4}, {"model", {{"layers", 6}}}});
    trackers.log({{"loss", 2.5}, {"note", "line\nbreak"}, {"grad", {{"norm", 1.5}}}}, 10 * run);
    trackers.log({{"loss", std::nan("")}, {"best", -INFINITY}}, 10 * run + 1);
    trackers.finish();
  }
  const auto all = lines("metrics.jsonl");
  ASSERT_EQ(all.size(), 4u);
  const Json first = Json::parse(all[0]);
  EXPECT_EQ(first["step"], 0);
  EXPECT_EQ(first["loss"], 2.5);
  EXPECT_EQ(first["note"], "line\nbreak");
  EXPECT_EQ(first["grad/norm"], 1.5);
  EXPECT_GT(first["time"], 1.6e9);
  EXPECT_EQ(Json::parse(all[1])["loss"], "nan");
  EXPECT_EQ(Json::parse(all[1])["best"], "-inf");
  EXPECT_EQ(Json::parse(all[2])["step"], 10);
  const Json configuration = Json::parse(read("configuration.json"));
  EXPECT_EQ(configuration["project"], "gpt \"small\"");
  EXPECT_EQ(configuration["configuration"]["model"]["layers"], 6);
}

TEST_F(Tracking, CsvGainsAColumnForANameThatComesLaterAndAcrossRuns) {
  {
    Trackers trackers({.folder = folder(), .with = {"csv"}});
    trackers.start("p", {{"name", "a,b"}});
    trackers.log({{"loss", 2.5}}, 0);
    trackers.log({{"loss", 2.25}, {"text", "said \"so\", twice\nover"}}, 1);
  }
  {
    Trackers trackers({.folder = folder(), .with = {"csv"}});
    trackers.start("p");
    trackers.log({{"accuracy", 0.5}, {"loss", 2}}, 2);
  }
  const std::string text = read("metrics.csv");
  // Times differ from run to run: everything else is known.
  std::string without_times;
  std::istringstream in(text);
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "step,time,loss,text,accuracy");
  std::getline(in, line);
  EXPECT_EQ(line.substr(0, 2), "0,");
  EXPECT_TRUE(line.ends_with(",2.5,,")) << line;
  std::getline(in, line);
  EXPECT_TRUE(line.ends_with(",2.25,\"said \"\"so\"\", twice")) << line;
  std::getline(in, line);
  EXPECT_EQ(line, "over\",");
  std::getline(in, line);
  EXPECT_TRUE(line.ends_with(",2,,0.5")) << line;
  EXPECT_FALSE(std::getline(in, line));
  EXPECT_EQ(read("configuration.csv"), "name,value\nname,\"a,b\"\n");
}

TEST_F(Tracking, CsvRefusesAFileOfAnotherKind) {
  std::filesystem::create_directories(folder());
  std::ofstream(folder() + "/metrics.csv") << "a,b\n1,2\n";
  Trackers trackers({.folder = folder(), .with = {"csv"}});
  EXPECT_THROW(trackers.start("p"), FormatError);
  EXPECT_EQ(read("metrics.csv"), "a,b\n1,2\n");
}

TEST_F(Tracking, EventFilesAreWholeRecordsWithRightChecksums) {
  Trackers trackers({.folder = folder(), .with = {"tensorboard"}});
  trackers.start("p", {{"lr", 0.5}});
  for (int step = 0; step < 100; ++step) trackers.log({{"loss", 1.0 / (step + 1)}}, step);
  trackers.finish();
  const std::string bytes = read(event_file());
  const auto masked = [](const char* data, size_t size) {
    const uint32_t crc = crc32c(data, size);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  size_t at = 0;
  int records = 0;
  while (at < bytes.size()) {
    ASSERT_LE(at + 12, bytes.size());
    uint64_t length;
    uint32_t crc;
    std::memcpy(&length, &bytes[at], 8);
    std::memcpy(&crc, &bytes[at + 8], 4);
    ASSERT_EQ(crc, masked(&bytes[at], 8));
    ASSERT_LE(at + 16 + length, bytes.size());
    std::memcpy(&crc, &bytes[at + 12 + length], 4);
    ASSERT_EQ(crc, masked(&bytes[at + 12], length));
    if (records == 0) {
      EXPECT_NE(bytes.substr(at + 12, length).find("brain.Event:2"), std::string::npos);
    }
    at += 16 + length;
    ++records;
  }
  EXPECT_EQ(records, 1 + 2 + 100 + 1);  // version, hyper-parameters and their table, steps, end
}

// What TensorBoard itself reads; scripts/check_tensorboard.sh sets the variable.
TEST_F(Tracking, TensorBoardReadsScalarsTextsImagesTablesAndHyperParameters) {
  const char* python = std::getenv("TESSERA_TENSORBOARD_PYTHON");
  if (python == nullptr) {
    GTEST_SKIP() << "TESSERA_TENSORBOARD_PYTHON names no Python with tensorboard";
  }
  {
    Trackers trackers({.folder = folder(), .with = {"tensorboard"}});
    trackers.start("p",
                   {{"lr", 0.5}, {"name", "small"}, {"amp", true}, {"model", {{"layers", 6}}}});
    trackers.log({{"loss", 2.5}, {"grad", {{"norm", 1.5}}}, {"note", "hello"}}, 3);
    trackers.log({{"loss", 2}}, 4);
    trackers.log_images("digits", full({2, 4, 5, 3}, 0.5), 4);
    trackers.log_table("errors", {{"word", "count"}, {{"a|b", "3"}}}, 4);
  }
  const auto result =
      run_process({python, std::string(tests::source_dir()) + "/tests/read_events.py", folder()});
  ASSERT_EQ(result.code(), 0) << result;
  const Json read_back = Json::parse(result.output);
  EXPECT_EQ(read_back["scalars"]["loss"], Json::parse("[[3, 2.5], [4, 2.0]]"));
  EXPECT_EQ(read_back["scalars"]["grad/norm"], Json::parse("[[3, 1.5]]"));
  EXPECT_EQ(read_back["texts"]["note"], Json::parse("[[3, \"hello\"]]"));
  EXPECT_EQ(read_back["texts"]["errors"][0][1], "|word|count|\n|---|---|\n|a\\|b|3|");
  EXPECT_EQ(read_back["images"]["digits/1"][0][1], 5);
  EXPECT_EQ(read_back["images"]["digits/1"][0][2], 4);
  EXPECT_EQ(read_back["hparams"],
            Json::parse(R"({"lr": 0.5, "name": "small", "amp": true, "model/layers": 6.0})"));
}

// TRK-1: images and tables where no tracker has a place for them.
TEST_F(Tracking, ImagesThatNobodyKeepsAreAnError) {
  Trackers trackers({.folder = folder(), .with = {"csv"}});
  trackers.start("p");
  EXPECT_THROW(trackers.log_images("x", zeros({1, 2, 2, 1}), 0), UnsupportedError);
  EXPECT_THROW(trackers.log_table("x", {{"a"}, {{"1"}}}, 0), UnsupportedError);
  EXPECT_THROW(trackers.log_table("x", {{"a"}, {{"1", "2"}}}, 0), ShapeError);
}

struct Recorder : Tracker {
  explicit Recorder(std::vector<std::string>& calls) : calls_(calls) { calls_.push_back("made"); }
  bool needs_folder() const override { return false; }
  void start(const TrackerRun& run) override { calls_.push_back("start " + run.project); }
  void store_configuration(const TrackedValues&) override { calls_.push_back("configuration"); }
  void log(const TrackedValues& values, int64_t step) override {
    calls_.push_back("log " + values[0].first + " " + std::to_string(step));
  }
  void finish() override { calls_.push_back("finish"); }
  std::vector<std::string>& calls_;
};

// TRK-1: custom trackers, overwriting, deferred start.
TEST_F(Tracking, OnesOwnTrackerIsMadeAtStartAndReplacesANameKnowingly) {
  std::vector<std::string> calls;
  Trackers trackers({.with = {"mine"}});
  EXPECT_FALSE(trackers.add("mine", [&] { return std::make_unique<Recorder>(calls); }));
  EXPECT_TRUE(trackers.add("mine", [&] { return std::make_unique<Recorder>(calls); }));
  EXPECT_TRUE(calls.empty());
  EXPECT_THROW(trackers.log({{"loss", 1}}, 0), ValueError);  // not started
  trackers.start("p", {{"a", 1}});
  trackers.log({{"loss", 1}}, 5);
  trackers.finish();
  EXPECT_EQ(calls,
            (std::vector<std::string>{"made", "start p", "configuration", "log loss 5", "finish"}));
}

// Upstream drops a tracker that it cannot have with a line that few read, and nobody records.
TEST_F(Tracking, TrapAnUnknownTrackerOrAMissingFolderIsAnErrorAndNotAnUnrecordedRun) {
  Trackers unknown({.folder = folder(), .with = {"tensorbord"}});
  try {
    unknown.start("p");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("csv, jsonl, tensorboard"), std::string::npos);
  }
  Trackers nowhere({.with = {"jsonl"}});
  EXPECT_THROW(nowhere.start("p"), ConfigError);
  std::ofstream(folder()) << "a file stands where the folder should";
  Trackers blocked({.folder = folder(), .with = {"jsonl"}});
  EXPECT_THROW(blocked.start("p"), IoError);
}

TEST_F(Tracking, OnlyTheMainProcessWritesAndTheOthersMayMakeTheSameCalls) {
  distributed::compared_ranks(3, [&](int) {
    const auto& ranks = distributed::rank_context();
    Trackers trackers(
        {.folder = folder(), .with = {"all"}, .rank = ranks.rank, .world_size = ranks.world_size});
    trackers.start("p", {{"lr", 1}});
    trackers.log({{"loss", 1 + ranks.rank}}, 0);
    trackers.log_images("x", zeros({1, 2, 2, 1}), 0);
    trackers.get("jsonl").log({{"extra", 1}}, 1);
    EXPECT_THROW(trackers.get("wandb"), ConfigError);
    trackers.finish();
  });
  const auto all = lines("metrics.jsonl");
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(Json::parse(all[0])["loss"], 1);
  EXPECT_FALSE(event_file().empty());
}

TEST_F(Tracking, TheAcceleratorStartsTheTrackersOfItsSettings) {
  distributed::compared_ranks(2, [&](int rank) {
    Accelerator accelerator({.logging_dir = folder(),
                             .log_with = std::vector<std::string>{"jsonl"},
                             .config_file = ""});
    accelerator.init_trackers("p", {{"lr", 1}});
    accelerator.log({{"loss", 2}}, 7);
    EXPECT_NO_THROW(accelerator.get_tracker("jsonl"));
    accelerator.end_training();
    EXPECT_THROW(accelerator.log({{"loss", rank}}, 8), ValueError);
  });
  ASSERT_EQ(lines("metrics.jsonl").size(), 1u);
  EXPECT_EQ(Json::parse(lines("metrics.jsonl")[0])["step"], 7);
}

TEST(Progress, TheLineShowsShareRateAndTimeLeft) {
  double now = 0;
  std::ostringstream out;
  {
    Progress bar(200, {.description = "epoch 1", .out = &out, .clock = [&] { return now; }});
    now = 5;
    bar.advance(50);
    bar.set_note("loss 2.31");
    EXPECT_EQ(bar.line(),
              "epoch 1:  25%|█████               | 50/200 [00:05<00:15, 10.0/s] loss 2.31");
    EXPECT_EQ(out.str(), "");  // plain lines every 10 s
    now = 11;
    bar.advance(60);
    now = 3671;
    bar.advance(90);
  }
  std::istringstream in(out.str());
  std::string line;
  std::getline(in, line);
  EXPECT_EQ(line, "epoch 1:  55%|███████████         | 110/200 [00:11<00:09, 10.0/s] loss 2.31");
  std::getline(in, line);
  EXPECT_TRUE(
      line.starts_with("epoch 1: 100%|████████████████████| 200/200 [1:01:11<00:00, 18.36 s/step]"))
      << line;
}

TEST(Progress, ATerminalGetsOneLineAndOtherRanksGetNothing) {
  double now = 0;
  std::ostringstream terminal, silent;
  {
    Progress bar(
        -1, {.out = &terminal, .terminal = true, .unit = "tokens", .clock = [&] { return now; }});
    Progress off(10, {.enabled = false, .out = &silent, .clock = [&] { return now; }});
    bar.set_note("a long note");
    now = 1;
    bar.advance(4096);
    off.advance(10);
    bar.set_note("");
    now = 2;
    bar.advance(4096);
  }
  EXPECT_EQ(silent.str(), "");
  EXPECT_EQ(terminal.str(),
            "\r4096 [00:01, 4096 tokens/s] a long note"
            "\r8192 [00:02, 4096 tokens/s]            "
            "\r8192 [00:02, 4096 tokens/s]\n");
}

TEST(MemoryTracker, SeesThePeakBetweenTwoSamplesByCategory) {
  MemoryTracker tracker;
  {
    const MemoryCategoryGuard guard(MemoryCategory::kOptimizer);
    const Tensor moments = zeros({1 << 18});
  }
  const Tensor kept = zeros({1 << 16});
  const MemoryReport report = tracker.stop();
  const auto& optimizer = report.categories[static_cast<size_t>(MemoryCategory::kOptimizer)];
  const auto& activation = report.categories[static_cast<size_t>(MemoryCategory::kActivation)];
  EXPECT_EQ(optimizer.peak - optimizer.begin, 1 << 20);
  EXPECT_EQ(optimizer.end, optimizer.begin);
  EXPECT_EQ(activation.end - activation.begin, 1 << 18);
  EXPECT_EQ(report.tensors.peak - report.tensors.begin, 1 << 20);
  EXPECT_GT(report.resident.peak, 0);
  EXPECT_TRUE(report.samples.empty());
  EXPECT_NE(report.table().find("optimizer"), std::string::npos);
}

TEST(MemoryTracker, NestedTrackersKeepTheirOwnMarks) {
  MemoryTracker outer;
  { const Tensor large = zeros({1 << 20}); }
  MemoryTracker inner;
  { const Tensor small = zeros({1 << 16}); }
  const MemoryReport within = inner.stop();
  const MemoryReport whole = outer.stop();
  EXPECT_EQ(within.tensors.peak - within.tensors.begin, 1 << 18);
  EXPECT_EQ(whole.tensors.peak - whole.tensors.begin, 1 << 22);
}

TEST_F(Tracking, MemorySamplesFollowTheStatedPeriodAndThinOut) {
  MemoryTracker tracker({.period = 0.0005, .max_samples = 16});
  const Tensor held = zeros({1 << 20});
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  const MemoryReport& report = tracker.stop();
  ASSERT_GE(report.samples.size(), 2u);
  EXPECT_LE(report.samples.size(), 17u);
  EXPECT_GE(report.period, 0.0005);
  for (size_t i = 1; i < report.samples.size(); ++i) {
    EXPECT_GE(report.samples[i].seconds, report.samples[i - 1].seconds);
  }
  EXPECT_GE(report.samples.back().tensors - report.tensors.begin, 1 << 22);
  std::filesystem::create_directories(folder());
  report.save_json(folder() + "/memory.json");
  report.save_svg(folder() + "/memory.svg");
  const Json json = Json::parse(read("memory.json"));
  EXPECT_EQ(json["samples"].size(), report.samples.size());
  EXPECT_EQ(json["tensors"]["peak"], report.tensors.peak);
  EXPECT_NE(read("memory.svg").find("<polyline"), std::string::npos);
  EXPECT_THROW(report.save_json(folder() + "/missing/memory.json"), IoError);
  EXPECT_THROW(MemoryTracker({.period = -1}), ValueError);
  EXPECT_THROW(MemoryTracker({.max_samples = 1}), ValueError);
}

TEST(MemoryTracker, SamplesThatWereThinnedOutSayTheirDoubledPeriod) {
  constexpr double kPeriod = 1.0 / 4096;
  MemoryReport report;
  for (int milliseconds = 30; report.period <= kPeriod && milliseconds < 4000; milliseconds *= 2) {
    MemoryTracker tracker({.period = kPeriod, .max_samples = 2});
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    report = tracker.stop();
  }
  const double doublings = std::log2(report.period / kPeriod);
  EXPECT_GE(doublings, 1);
  EXPECT_EQ(doublings, std::floor(doublings));
  EXPECT_LE(report.samples.size(), 3u) << "those that are kept and the last";
  EXPECT_EQ(Json::parse(report.to_json())["period"], report.period);
}

TEST(ProfileSchedule, PhasesAreTorchs) {
  const ProfileSchedule schedule{.wait = 1, .warmup = 1, .active = 2, .repeat = 2, .skip_first = 1};
  std::string phases;
  for (int64_t step = 0; step < 12; ++step) {
    phases += "-wrs"[static_cast<int>(phase_of(schedule, step))];
  }
  EXPECT_EQ(phases, "--wrs-wrs---");
}

// KW-1: the profiler's cycles.
TEST_F(Tracking, AProfileIsWrittenForEachCycleAndHoldsItsStepsAlone) {
  std::vector<std::pair<int64_t, int64_t>> cycles;
  ProfileSession session({.schedule = {{.wait = 1, .warmup = 1, .active = 2, .repeat = 2}},
                          .folder = folder(),
                          .on_trace_ready = [&](const Profile& profile) {
                            cycles.emplace_back(profile.first_step, profile.last_step);
                            EXPECT_EQ(profile.profiler->entries().at("step").calls, 2);
                            EXPECT_NE(profile.table().find("mul"), std::string::npos);
                          }});
  const Tensor x = ones({8});
  for (int step = 0; step < 12; ++step) {
    mul(x, x);
    session.step();
  }
  session.finish();
  EXPECT_EQ(session.cycles(), 2);
  EXPECT_EQ(cycles, (std::vector<std::pair<int64_t, int64_t>>{{2, 3}, {6, 7}}));
  const Json trace = Json::parse(read("rank0-steps2-3.json"));
  int ops = 0, counters = 0;
  for (const auto& event : trace["traceEvents"]) {
    ops += event["ph"] == "X" && event["name"] == "mul";
    counters += event["ph"] == "C";
  }
  EXPECT_EQ(ops, 2);
  EXPECT_GE(counters, 2);
}

TEST_F(Tracking, AProfileWithoutScheduleHoldsEverythingAndAnOpenRangeIsRefused) {
  ProfileSession session({.folder = folder()});
  {
    const ProfilerRange open("mine");
    EXPECT_THROW(session.step(), ValueError);
  }
  session.step();
  session.step();
  session.finish();
  EXPECT_FALSE(read("rank0-steps0-1.json").empty());
  EXPECT_THROW(ProfileSession({.schedule = {{.active = 0}}}), ValueError);
}

TEST_F(Tracking, EachRankWritesATraceThatShowsItsCollectives) {
  distributed::compared_ranks(2, [&](int) {
    ProfileSession session({.folder = folder()});
    Tensor x = ones({64});
    distributed::all_reduce(x, distributed::ReduceOp::kSum);
    session.step();
    session.finish();
  });
  for (const int rank : {0, 1}) {
    const Json trace = Json::parse(read("rank" + std::to_string(rank) + "-steps0-0.json"));
    int begins = 0, ends = 0;
    for (const auto& event : trace["traceEvents"]) {
      EXPECT_EQ(event["pid"], rank);
      begins += event["ph"] == "b";
      ends += event["ph"] == "e";
      EXPECT_GE(event.value("ts", 0.0), 0);
    }
    EXPECT_EQ(begins, 1);
    EXPECT_EQ(ends, 1);
  }
}

}  // namespace
}  // namespace tessera::test_tracking
