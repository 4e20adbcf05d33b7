// The emulation of a GPU: correct kernels give what they must for any order of blocks and threads,
// and each deliberate bug is found.
#include "test_emulation.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/emulation/peers.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/half.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera::gpu::tests::test_emulation {
namespace {

// Device memory with a copy of what a test gives, for a scope.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    void* pointer = nullptr;
    TS_CUDA(cudaMalloc(&pointer, count * sizeof(T)));
    data_ = static_cast<T*>(pointer);
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    TS_CUDA(cudaMemcpyAsync(data_, values.data(), count_ * sizeof(T), cudaMemcpyDefault, nullptr));
    TS_CUDA(cudaStreamSynchronize(nullptr));
  }
  ~Buffer() { cudaFree(data_); }
  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    TS_CUDA(cudaMemcpyAsync(values.data(), data_, count_ * sizeof(T), cudaMemcpyDefault, nullptr));
    TS_CUDA(cudaStreamSynchronize(nullptr));
    return values;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

std::vector<float> numbers(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 37) % 101);
  return values;
}

// What the emulation says when the device is waited for; empty where nothing is wrong.
std::string complaint() {
  if (cudaDeviceSynchronize() == cudaSuccess) return {};
  cudaGetLastError();
  const std::string report = emulation::take_report();
  return report.empty() ? "an error without a report" : report;
}
#define EXPECT_REPORT(part)                                                  \
  do {                                                                       \
    const std::string report = complaint();                                  \
    EXPECT_NE(report.find(part), std::string::npos) << "report: " << report; \
  } while (false)

TEST(Emulation, KernelsAreRightForAnyOrderOfBlocksAndThreads) {
  const std::vector<float> x = numbers(1000);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulation::set_seed(seed);
    const Buffer<float> device_x(x), sums(4), swapped(1000), reversed(960), copied(1000);
    block_sums(Bug::kNone, device_x.data(), sums.data(), 1000, nullptr);
    swap_neighbours(Bug::kNone, device_x.data(), swapped.data(), 1000, nullptr);
    reverse_tiles(Bug::kNone, device_x.data(), reversed.data(), 960, nullptr);
    copy_vectors(device_x.data(), copied.data(), 1000, nullptr);
    ASSERT_EQ(complaint(), "") << "seed " << seed;
    const std::vector<float> s = sums.read(), w = swapped.read(), r = reversed.read();
    for (size_t block = 0; block < 4; ++block) {
      float expected = 0;
      for (size_t i = 256 * block; i < std::min<size_t>(1000, 256 * (block + 1)); ++i)
        expected += x[i];
      EXPECT_EQ(s[block], expected);
    }
    for (size_t i = 0; i < 1000; ++i) ASSERT_EQ(w[i], x[i ^ 1]) << i;
    for (size_t i = 0; i < 960; ++i) ASSERT_EQ(r[i], x[959 - i]) << i;
    EXPECT_EQ(copied.read(), x);
  }
}

TEST(Emulation, AtomicsVotesAndScansFollowCuda) {
  std::vector<int> x(200);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int>(i * 7 % 5);
  const Buffer<int> device_x(x), counts(std::vector<int>(5, 0)), scanned(200);
  const Buffer<unsigned> odd(200);
  histogram(device_x.data(), counts.data(), 200, nullptr);
  warp_scan(device_x.data(), scanned.data(), odd.data(), 200, nullptr);
  ASSERT_EQ(complaint(), "");
  EXPECT_EQ(counts.read(), std::vector<int>(5, 40));
  const std::vector<int> s = scanned.read();
  const std::vector<unsigned> o = odd.read();
  int running = 0;
  for (size_t i = 0; i < 200; ++i) {
    running = i % 32 == 0 ? x[i] : running + x[i];
    ASSERT_EQ(s[i], running);
    ASSERT_EQ(o[i] >> (i % 32) & 1, static_cast<unsigned>(x[i] % 2));
  }
}

TEST(Emulation, AWarpMultipliesTiles) {
  std::vector<uint16_t> a(256), b(256);
  std::vector<float> c = numbers(256), expected = c;
  for (size_t i = 0; i < 256; ++i) {
    a[i] = bf16(static_cast<float>(i * 7 % 13) - 6).bits;
    b[i] = bf16(static_cast<float>(i * 5 % 11) / 4).bits;
  }
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 16; ++column) {
      for (size_t k = 0; k < 16; ++k) {  // all exact
        expected[row * 16 + column] += to_float(bf16::from_bits(a[row * 16 + k])) *
                                       to_float(bf16::from_bits(b[k * 16 + column]));
      }
    }
  }
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    const Buffer<uint16_t> device_a(a), device_b(b);
    const Buffer<float> device_c(c);
    warp_product(Bug::kNone, device_a.data(), device_b.data(), device_c.data(), nullptr);
    ASSERT_EQ(complaint(), "");
    EXPECT_EQ(device_c.read(), expected);
  }
}

TEST(Emulation, ProductsOfWarpsThatBreakARuleAreFound) {
  const Buffer<uint16_t> a(std::vector<uint16_t>(400, 0)), b(std::vector<uint16_t>(256, 0));
  const Buffer<float> c(numbers(256));
  const auto run = [&](Bug bug) {
    warp_product(bug, a.data(), b.data(), c.data(), nullptr);
    return complaint();
  };
  const std::pair<Bug, const char*> cases[] = {
      {Bug::kMisalignedTile, "not aligned"},
      {Bug::kTileStride, "a multiple of 16 bytes apart, they lie 40"},
      {Bug::kHalfWarp, "ask for different tiles"},
      {Bug::kTwoTiles, "ask for different tiles"},
      {Bug::kUnsetTile, "nothing was loaded into"}};
  for (const auto& [bug, expected] : cases) {
    const std::string report = run(bug);
    EXPECT_NE(report.find(expected), std::string::npos) << expected << ", report: " << report;
  }
  if (!emulation::race::tracked()) return;
  EXPECT_NE(run(Bug::kMissingWarpSync), "");
}

TEST(Emulation, AMissingBarrierIsFound) {
  const Buffer<float> x(numbers(256)), y(1);
  if (emulation::race::tracked()) {
    block_sums(Bug::kMissingBarrier, x.data(), y.data(), 256, nullptr);
    EXPECT_REPORT("with no barrier between");
    return;
  }
  // Without tracking it shows as a result that depends on the order of threads.
  float right = 0;
  for (float value : numbers(256)) right += value;
  bool wrong = false;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    block_sums(Bug::kMissingBarrier, x.data(), y.data(), 256, nullptr);
    wrong = wrong || complaint() != "" || y.read()[0] != right;
  }
  EXPECT_TRUE(wrong);
}

TEST(Emulation, LanesThatExchangeThroughMemoryWithoutSyncwarpAreFound) {
  const Buffer<float> x(numbers(32)), y(32);
  reverse_tiles(Bug::kMissingWarpSync, x.data(), y.data(), 32, nullptr);
  if (emulation::race::tracked()) {
    EXPECT_REPORT("shared memory that was never written");
  } else {
    ASSERT_EQ(complaint(), "");
    std::vector<float> right = numbers(32);
    EXPECT_NE(y.read(), std::vector<float>(right.rbegin(), right.rend()));
  }
}

TEST(Emulation, AReadBeyondTheEndIsFound) {
  const Buffer<float> x(numbers(100)), y(1);
  block_sums(Bug::kNone, x.data(), y.data(), 100, nullptr);
  EXPECT_EQ(complaint(), "");
  const auto run = [&] {
    block_sums(Bug::kOffByOne, x.data(), y.data(), 100, nullptr);
    return complaint();
  };
  if (emulation::race::tracked()) {
    EXPECT_NE(run().find("outside of what was allocated"), std::string::npos);
  } else {
    EXPECT_DEATH(run(), "use-after-poison");
  }
}

TEST(Emulation, ALaneMaskThatLiesIsFound) {
  const Buffer<float> x(numbers(64)), y(64);
  swap_neighbours(Bug::kWrongMask, x.data(), y.data(), 64, nullptr);
  EXPECT_REPORT("with the mask");
  swap_neighbours(Bug::kMaskWithoutSelf, x.data(), y.data(), 64, nullptr);
  EXPECT_REPORT("does not name lane");
}

TEST(Emulation, ABarrierThatNotAllThreadsReachIsFound) {
  const Buffer<float> x(numbers(64)), y(64);
  swap_neighbours(Bug::kDivergentBarrier, x.data(), y.data(), 64, nullptr);
  EXPECT_REPORT("wait at __syncthreads");
}

TEST(Emulation, AMisalignedVectorIsFound) {
  const Buffer<float> x(numbers(64)), y(64);
  copy_vectors(x.data() + 1, y.data(), 60, nullptr);
  EXPECT_REPORT("not aligned");
}

TEST(Emulation, AStoreThatNamesTheOtherMemoryIsFound) {
  const Buffer<float> x(numbers(128)), y(128);
  stage_vectors(Bug::kNone, x.data(), y.data(), nullptr);
  ASSERT_EQ(complaint(), "");
  EXPECT_EQ(y.read(), numbers(128));
  stage_vectors(Bug::kGlobalStoreToShared, x.data(), y.data(), nullptr);
  EXPECT_REPORT("store_vector writes to shared memory");
  stage_vectors(Bug::kSharedStoreToGlobal, x.data(), y.data(), nullptr);
  EXPECT_REPORT("not in shared memory");
}

TEST(Emulation, UninitialisedSharedMemoryIsFound) {
  const Buffer<float> x(numbers(256)), y(1);
  block_sums(Bug::kUninitialised, x.data(), y.data(), 256, nullptr);
  if (emulation::race::tracked()) {
    EXPECT_REPORT("shared memory that was never written");
  } else {
    ASSERT_EQ(complaint(), "");
    EXPECT_NE(y.read()[0], y.read()[0]);  // shared memory begins as NaN
  }
}

TEST(Emulation, BlocksThatMeetAreFound) {
  if (!emulation::race::tracked()) GTEST_SKIP() << "this build does not track races";
  const Buffer<float> x(numbers(512)), y(2);
  block_sums(Bug::kBlocksRace, x.data(), y.data(), 512, nullptr);
  EXPECT_REPORT("of another block");
}

// Words of any widths race where they share a byte, and only there, whatever widths the memory met before.
TEST(Emulation, WordsThatShareAByteRaceAndNeighboursDoNot) {
  if (!emulation::race::tracked()) GTEST_SKIP() << "this build does not track races";
  const Buffer<uint64_t> memory(std::vector<uint64_t>(2, 0));
  for (const auto& before : std::vector<std::vector<int>>{{}, {1}, {2}, {8}, {1, 4}, {2, 1, 8}}) {
    for (int first : {1, 2, 4, 8}) {
      for (int second : {1, 2, 4, 8}) {
        for (int offset = 0; offset < 16; offset += second) {
          for (bool reads : {false, true}) {
            SCOPED_TRACE(testing::Message() << first << " bytes, " << (reads ? "a read" : "a write")
                                            << " of " << second << " at " << offset << " after "
                                            << testing::PrintToString(before));
            for (int bytes : before) same_words(memory.data(), bytes, nullptr);
            ASSERT_EQ(complaint(), "");
            two_words(memory.data(), first, second, offset, reads, nullptr);
            const std::string report = complaint();
            ASSERT_EQ(report.find("of another block") != std::string::npos, offset < first)
                << report;
            if (offset < first) continue;
            const emulation::race::Counts counts = emulation::race::counts();
            ASSERT_EQ(counts.written, first + (reads ? 0 : second));
            ASSERT_EQ(counts.read, reads ? second : 0);
          }
        }
      }
    }
  }
}

TEST(Emulation, AReaderOfAByteIsKnownBehindAReaderOfTheWord) {
  if (!emulation::race::tracked()) GTEST_SKIP() << "this build does not track races";
  const Buffer<uint64_t> memory(std::vector<uint64_t>(2, 0));
  for (uint64_t seed = 0; seed < 8; ++seed) {  // orders of the blocks
    emulation::set_seed(seed);
    read_and_write(memory.data(), nullptr);
    EXPECT_REPORT("of another block");
  }
}

TEST(Emulation, AMissingEventShowsAndAnEventHelps) {
  bool differs = false;
  for (uint64_t seed = 0; seed < 16; ++seed) {
    emulation::set_seed(seed);
    for (const bool waits : {true, false}) {
      cudaStream_t producer = nullptr, consumer = nullptr;
      cudaEvent_t done = nullptr;
      TS_CUDA(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking));
      TS_CUDA(cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking));
      TS_CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
      const Buffer<float> x(std::vector<float>(64, 1.0f)), y(64);
      add_one(x.data(), 64, producer);
      TS_CUDA(cudaEventRecord(done, producer));
      if (waits) TS_CUDA(cudaStreamWaitEvent(consumer, done));
      copy_vectors(x.data(), y.data(), 64, consumer);
      TS_CUDA(cudaStreamSynchronize(consumer));
      const bool right = y.read() == std::vector<float>(64, 2.0f);
      if (waits) {
        EXPECT_TRUE(right) << "seed " << seed;
      } else {
        differs = differs || !right;
      }
      TS_CUDA(cudaDeviceSynchronize());
      cudaEventDestroy(done);
      cudaStreamDestroy(producer);
      cudaStreamDestroy(consumer);
    }
  }
  EXPECT_TRUE(differs);
}

TEST(Emulation, AHostReadOfDeviceMemoryEndsTheProgram) {
  const Buffer<float> x(numbers(4));
  EXPECT_DEATH(
      {
        volatile float value = *const_cast<volatile float*>(x.data());
        (void)value;
      },
      "");
}

TEST(Emulation, PinnedMemoryIsReadWhenTheStreamRunsPageableThenOrAtTheCall) {
  void* pinned = nullptr;
  TS_CUDA(cudaMallocHost(&pinned, 4));
  const Buffer<char> a(4), b(4);
  std::set<std::vector<char>> seen, written;
  for (uint64_t seed = 0; seed < 16; ++seed) {
    emulation::set_seed(seed);
    std::memset(pinned, 1, 4);
    std::vector<char> pageable(4, 1), target(4, 0);
    TS_CUDA(cudaMemcpyAsync(a.data(), pinned, 4, cudaMemcpyDefault, nullptr));
    TS_CUDA(cudaMemcpyAsync(b.data(), pageable.data(), 4, cudaMemcpyDefault, nullptr));
    std::memset(pinned, 2, 4);
    std::memset(pageable.data(), 2, 4);
    EXPECT_EQ(a.read(), std::vector<char>(4, 2));
    seen.insert(b.read());
    TS_CUDA(cudaMemcpyAsync(target.data(), a.data(), 4, cudaMemcpyDefault, nullptr));
    written.insert(target);
    TS_CUDA(cudaStreamSynchronize(nullptr));
    EXPECT_EQ(target, std::vector<char>(4, 2));
  }
  EXPECT_EQ(seen, (std::set<std::vector<char>>{std::vector<char>(4, 1), std::vector<char>(4, 2)}));
  EXPECT_EQ(written,
            (std::set<std::vector<char>>{std::vector<char>(4, 0), std::vector<char>(4, 2)}));
  cudaFreeHost(pinned);
}

TEST(Emulation, ErrorsNameTheOperationAndLeaveNothingBehind) {
  const Buffer<float> x(numbers(64)), y(64);
  copy_vectors(x.data() + 1, y.data(), 60, nullptr);
  try {
    TS_CUDA(cudaStreamSynchronize(nullptr));
    FAIL() << "no error";
  } catch (const CudaError& error) {
    const std::string text = error.what();
    for (const char* part :
         {"cudaStreamSynchronize(nullptr)", "cudaErrorLaunchFailure",
          "test_emulation.cpp:", "copy_vectors", "TESSERA_SYNC=1", "not aligned"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    }
  }
  copy_vectors(x.data(), y.data(), 64, nullptr);
  EXPECT_EQ(y.read(), numbers(64));
}

TEST(Emulation, ALaunchBeyondTheLimitsIsRefused) {
  EXPECT_EQ(emulation::enqueue_launch(nullptr, "large", 1, 2048, 0, nullptr, [] {}),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(emulation::enqueue_launch(nullptr, "greedy", 1, 32, 228u << 10, nullptr, [] {}),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(emulation::enqueue_launch(nullptr, "modest", 1, 32, 49u << 10, nullptr, [] {}),
            cudaErrorInvalidValue);
  EXPECT_EQ(emulation::enqueue_launch(nullptr, "high", dim3(1, 65536), 32, 0, nullptr, [] {}),
            cudaErrorInvalidConfiguration);
  cudaGetLastError();
}

TEST(Emulation, ArraysOfFixedSizeCountForWhatABlockGetsWithoutAsking) {
  const Buffer<float> x(numbers(32)), y(32);
  for (const size_t bytes : {size_t{16} << 10, (size_t{48} << 10) - 1024, size_t{64} << 10}) {
    copy_beside(bytes, x.data(), y.data(), nullptr);  // launch() asks where it must
    EXPECT_EQ(y.read(), numbers(32)) << bytes;
  }
  copy_beside((size_t{227} << 10) - 1024, x.data(), y.data(), nullptr);
  EXPECT_REPORT("the block's shared memory, 231424 bytes and arrays of fixed size, exceeds 232448");
}

// ---- Copies between devices --------------------------------------------------------------------

TEST(EmulatedPeers, WithoutTheEventsACopyIsTooEarlyOrTooLate) {
  bool early = false, late = false;
  const Tensor x = raw::zeros({500}, kF32, cuda(0)), y = raw::zeros({500}, kF32, cuda(1));
  for (uint64_t seed = 0; seed < 16; ++seed) {
    emulation::set_seed(seed);
    kernels::fill(x, 1);
    synchronize(0);
    kernels::fill(x, 3);
    {
      const CurrentDevice device(1);
      TS_CUDA(cudaMemcpyPeerAsync(y.data(), 1, x.data(), 0, 2000, current_stream()));
    }
    kernels::fill(x, 7);
    const double got = y.to_vector()[0];
    early = early || got == 1;
    late = late || got == 7;
    synchronize(0);
  }
  EXPECT_TRUE(early);
  EXPECT_TRUE(late);
}

TEST(EmulatedPeers, MemoryOfAnotherDeviceThanNamedIsRefused) {
  const Tensor x = raw::zeros({8}, kF32, cuda(0)), y = raw::zeros({8}, kF32, cuda(1));
  EXPECT_THROW(TS_CUDA(cudaMemcpyPeerAsync(y.data(), 0, x.data(), 1, 32, nullptr)), CudaError);
  EXPECT_EQ(x.to(cuda(1)).to_vector(), std::vector<double>(8, 0));
}

}  // namespace
}  // namespace tessera::gpu::tests::test_emulation
