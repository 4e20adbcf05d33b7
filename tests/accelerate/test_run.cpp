// The frame of a program: what tessera::run returns, and the requests that signals make.
#include <gtest/gtest.h>

#include <csignal>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/error.h>

namespace tessera::test_run {
namespace {

int run_with(const std::function<void(std::span<const std::string>)>& body,
             std::vector<std::string> words = {"program"}) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  return run(static_cast<int>(pointers.size()), pointers.data(), body);
}

TEST(Run, TheBodyGetsTheWordsAndItsEndIsZero) {
  std::vector<std::string> seen;
  EXPECT_EQ(run_with([&](auto words) { seen.assign(words.begin(), words.end()); },
                     {"program", "--lr", "0.1"}),
            0);
  EXPECT_EQ(seen, (std::vector<std::string>{"--lr", "0.1"}));
}

TEST(Run, AnExceptionIsOneAndItsTextIsPrinted) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_with([](auto) { throw ValueError("optimizer: lr is negative"); }), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "optimizer: lr is negative\n");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_with([](auto) { throw 7; }), 1);
  EXPECT_NE(::testing::internal::GetCapturedStderr(), "");
}

TEST(Run, AnEnvironmentThatContradictsItselfIsOne) {
  ::setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  ::setenv("PMIX_RANK", "0", 1);
  ::testing::internal::CaptureStderr();
  bool called = false;
  EXPECT_EQ(run_with([&](auto) { called = true; }), 1);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("PMIX_RANK=0"), std::string::npos);
  EXPECT_FALSE(called);
  ::unsetenv("OMPI_COMM_WORLD_RANK");
  ::unsetenv("PMIX_RANK");
}

// As `tessera launch --flag ...` leaves them to its ranks.
class LaunchFlags {
 public:
  explicit LaunchFlags(const accelerate::SettingTexts& flags) {
    ::setenv(kName, accelerate::launch_settings_text(flags, {}).c_str(), 1);
  }
  ~LaunchFlags() { ::unsetenv(kName); }
  LaunchFlags(const LaunchFlags&) = delete;
  LaunchFlags& operator=(const LaunchFlags&) = delete;

 private:
  static constexpr const char* kName = "TESSERA_LAUNCH_SETTINGS";
};

TEST(Run, FlagsForAnAcceleratorThatTheProgramNeverMadeAreAnError) {
  const LaunchFlags flags({{"mixed_precision", "bf16"}, {"threads", "1"}, {"seed", "3"}});
  ::testing::internal::CaptureStderr();
  bool called = false;
  EXPECT_EQ(run_with([&](auto) { called = true; }), 1);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(called);
  EXPECT_NE(text.find("--mixed-precision, --seed"), std::string::npos) << text;
  EXPECT_EQ(text.find("--threads"), std::string::npos) << text;
  EXPECT_NE(text.find("Accelerator"), std::string::npos) << text;
}

TEST(Run, FlagsThatAnAcceleratorHasReadOrThatAreTheLaunchersAreNone) {
  {
    const LaunchFlags flags(accelerate::SettingTexts{{"mixed_precision", "bf16"}});
    EXPECT_EQ(run_with([](auto) {
                EXPECT_EQ(Accelerator().settings().mixed_precision.value, Precision::kBF16);
              }),
              0);
    ::testing::internal::CaptureStderr();  // another run is another program
    EXPECT_EQ(run_with([](auto) {}), 1);
    ::testing::internal::GetCapturedStderr();
  }
  const LaunchFlags flags({{"threads", "1"}, {"collective_timeout", "60"}, {"log_level", "info"}});
  EXPECT_EQ(run_with([](auto) {}), 0);
}

TEST(Run, AnErrorOfTheProgramIsToldAndNotTheFlags) {
  const LaunchFlags flags(accelerate::SettingTexts{{"mixed_precision", "bf16"}});
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_with([](auto) { throw ValueError("no data"); }), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "no data\n");
}

TEST(Run, SignalsAskForACheckpointAndForAnEnd) {
  EXPECT_EQ(run_with([](auto) {
              EXPECT_EQ(requested(), RunRequest::kNone);
              ::raise(SIGUSR1);
              EXPECT_EQ(requested(), RunRequest::kCheckpoint);
              clear_request();
              EXPECT_EQ(requested(), RunRequest::kNone);
              ::raise(SIGTERM);
              EXPECT_EQ(requested(), RunRequest::kCheckpointAndStop);
              clear_request();  // an end that was asked for is not taken back
              EXPECT_EQ(requested(), RunRequest::kCheckpointAndStop);
            }),
            0);
}

}  // namespace
}  // namespace tessera::test_run
