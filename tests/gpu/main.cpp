// main() of the programs that run files of tests/cuda on a GPU. Where there is none they exit with
// 77 before any test; --gtest_list_tests works anywhere.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include <tessera/core/gpu/backend.h>

namespace {

using namespace tessera;

// An error of the device stays with the process: what comes after it says nothing.
class EndsWithTheDevice : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    for (int attempt = 0;; ++attempt) {
      try {
        gpu::synchronize(0);
        return;
      } catch (const std::exception& error) {
        if (attempt == 0) continue;  // an index of the test's own, which is told once
        std::printf("the device is lost after %s.%s, and the tests end here: %s\n",
                    test.test_suite_name(), test.name(), error.what());
        std::fflush(stdout);
        ::_exit(1);
      }
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  if (gpu::device_count() == 0) {
    std::fprintf(stderr, "%s: there is no GPU: %s\n", arguments[0],
                 gpu::unavailable_reason().c_str());
    return 77;
  }
  // Products of the tests are small and many: measuring them takes longer than all of them, and two
  // runs of one step would run different algorithms.
  ::setenv("TESSERA_GEMM_TABLE", "", /*overwrite=*/0);
  std::printf("%s\n", gpu::describe_device(0).c_str());
  std::fflush(stdout);
  testing::UnitTest::GetInstance()->listeners().Append(new EndsWithTheDevice);
  return RUN_ALL_TESTS();
}
