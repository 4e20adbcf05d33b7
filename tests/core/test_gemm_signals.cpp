// Products of f32 while signals arrive whose handler runs on the stack of the interrupted thread.
// ctest own program: what fails may end it
#include <gtest/gtest.h>
#include <sys/time.h>

#include <atomic>
#include <csignal>
#include <vector>

#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels::test_gemm_signals {
namespace {

std::atomic<int> handled{0};
extern "C" void count_signal(int) { ++handled; }

// A signal every 200 us, for as long as it lives.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction action {};
    action.sa_handler = count_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGALRM, &action, nullptr);
    every({0, 200});
  }
  ~Interruptions() { every({0, 0}); }

 private:
  static void every(timeval time) {
    const itimerval timer{time, time};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
};

void multiply_often(int threads) {
  const int before = num_threads();
  set_num_threads(threads);
  const int64_t shapes[][3] = {{192, 32, 32}, {192, 128, 32}, {192, 32, 128}, {32, 32, 192},
                               {24, 24, 16},  {128, 32, 192}, {8, 2, 32},     {600, 300, 64}};
  const Interruptions interruptions;
  for (int round = 0; round < 6000; ++round) {
    const auto& [m, n, k] = shapes[round % 8];
    // Of the heap each time: what a frame would write over lies beside them.
    const std::vector<float> a(static_cast<size_t>(m * k), 1), b(static_cast<size_t>(k * n), 1);
    std::vector<float> c(static_cast<size_t>(m * n));
    gemm({.m = m,
          .n = n,
          .k = k,
          .a = {a.data(), round % 3 == 1 ? 1 : k, round % 3 == 1 ? m : 1},
          .b = {b.data(), round % 3 == 2 ? 1 : n, round % 3 == 2 ? k : 1},
          .c = c.data(),
          .c_row_stride = n});
    for (const float value : c) ASSERT_EQ(value, static_cast<float>(k)) << "round " << round;
  }
  set_num_threads(before);
}

TEST(GemmSignals, HandlersDoNotDamageWhatAThreadMultiplies) {
  multiply_often(1);
  EXPECT_GT(handled, 0);
}
TEST(GemmSignals, NorWhatItsWorkersDo) {
  multiply_often(3);
  EXPECT_GT(handled, 0);
}

}  // namespace
}  // namespace tessera::kernels::test_gemm_signals
