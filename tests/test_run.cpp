// The frame of a program: what tessera::run returns, and the requests that signals make.
#include <gtest/gtest.h>

#include <csignal>

#include <tessera/accelerate/run.h>
#include <tessera/core/error.h>

namespace tessera {
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

TEST(Run, SignalsAskForACheckpointAndForAnEnd) {
  EXPECT_EQ(run_with([](auto) {
              EXPECT_EQ(requested(), Request::kNone);
              ::raise(SIGUSR1);
              EXPECT_EQ(requested(), Request::kCheckpoint);
              clear_request();
              EXPECT_EQ(requested(), Request::kNone);
              ::raise(SIGTERM);
              EXPECT_EQ(requested(), Request::kCheckpointAndStop);
              clear_request();  // an end that was asked for is not taken back
              EXPECT_EQ(requested(), Request::kCheckpointAndStop);
            }),
            0);
}

}  // namespace
}  // namespace tessera
