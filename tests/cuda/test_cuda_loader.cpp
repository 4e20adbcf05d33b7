// Loaders whose batches come on a GPU: pinned memory, the copy stream and its events. The
// emulation's streams run late and in a drawn order.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/emulation/simt.h>
#include <tessera/core/cuda/pinned_memory.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/data/dataloader.h>

#include "../message_of.h"
#include "on_emulation.h"

namespace tessera::data::test_cuda_loader {
namespace {

constexpr int64_t kExamples = 23, kWidth = 300;

// Example i: rows of i and -i, a number, and a word.
struct Mixed {
  std::pair<Tensor, Tensor> rows;
  int64_t number = 0;
  std::string word;
};
struct MixedBatch {
  std::pair<Tensor, std::vector<Tensor>> rows;
  std::map<std::string, std::optional<Tensor>> named;
  std::vector<std::string> words;
  Tensor absent;
  int64_t valid = 0;
  void visit_tensors(auto&& visit) { visit(rows), visit(named), visit(words), visit(absent); }
};

class MixedData : public Dataset<Mixed> {
 public:
  int64_t size() const override { return kExamples; }
  Mixed get(int64_t index) const override {
    TS_CHECK_AS(IoError, index != fails_at, "MixedData", "example ", index, " cannot be read");
    return {{raw::full({kWidth}, index, kF32), raw::full({2}, -index, kI64)},
            index,
            std::to_string(index)};
  }
  int64_t fails_at = -1;
};

// A batch in which no tensor can be seen.
struct Sealed {
  Tensor inside;
};
struct SealedExample {};
struct SealedData : Dataset<SealedExample> {
  int64_t size() const override { return 4; }
  SealedExample get(int64_t) const override { return {}; }
};

// What all fields hold.
std::vector<double> values_of(const MixedBatch& batch) {
  std::vector<double> all = batch.rows.first.to_vector();
  for (const Tensor& tensor : batch.rows.second) {
    for (const double value : tensor.to_vector()) all.push_back(value);
  }
  for (const auto& [name, tensor] : batch.named) {
    for (const double value : tensor->to_vector()) all.push_back(value);
  }
  for (const std::string& word : batch.words) all.push_back(std::stod(word));
  all.push_back(static_cast<double>(batch.valid));
  return all;
}

}  // namespace
}  // namespace tessera::data::test_cuda_loader

namespace tessera::data {

template <>
struct Collate<test_cuda_loader::Mixed> {
  static auto batch(std::span<test_cuda_loader::Mixed> examples) {
    test_cuda_loader::MixedBatch result;
    std::vector<Tensor> firsts, seconds;
    std::vector<int64_t> numbers;
    for (test_cuda_loader::Mixed& example : examples) {
      firsts.push_back(example.rows.first);
      seconds.push_back(example.rows.second);
      numbers.push_back(example.number);
      result.words.push_back(example.word);
    }
    result.rows = {stack_examples(firsts), {stack_examples(seconds)}};
    result.named["numbers"] = tensor(numbers, {static_cast<int64_t>(numbers.size())});
    return result;
  }
};

template <>
struct Collate<test_cuda_loader::SealedExample> {
  static auto batch(std::span<test_cuda_loader::SealedExample>) {
    return test_cuda_loader::Sealed{raw::zeros({1}, kF32)};
  }
};

}  // namespace tessera::data

namespace tessera::data::test_cuda_loader {
namespace {

std::vector<std::vector<double>> epochs_of(DataLoader<Mixed>& loader, int epochs) {
  std::vector<std::vector<double>> all;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const MixedBatch& batch : loader) all.push_back(values_of(batch));
  }
  return all;
}

TEST(CudaLoader, BatchesOfAnyStructureAreThoseOfTheCpuInTheirOrder) {
  const MixedData data;
  DataLoader loader_of_cpu(data, {.batch_size = 4, .shuffle = true, .seed = 5});
  const auto expected = epochs_of(loader_of_cpu, 2);
  const Device last = gpu::last_device();
  for (const int workers : {0, 1, 3}) {
    gpu::emulation::set_seed(static_cast<uint64_t>(workers));
    DataLoader loader(
        data, {.batch_size = 4, .shuffle = true, .seed = 5, .workers = workers, .device = last});
    EXPECT_EQ(epochs_of(loader, 2), expected) << workers << " workers";
    const MixedBatch batch = loader.next().value();
    EXPECT_EQ(batch.rows.first.device(), last);
    EXPECT_EQ(batch.rows.second[0].device(), last);
    EXPECT_EQ(batch.named.at("numbers")->device(), last);
    EXPECT_FALSE(batch.absent.defined());
  }
}

// The consumer queues its work on a stream of its own and lets go of each batch before any of it
// has run.
TEST(CudaLoader, MemoryIsSafeAcrossStreams) {
  const MixedData data;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    gpu::emulation::set_seed(seed);
    const auto own = gpu::make_stream(0);
    const gpu::CurrentStream scope(own);
    const Tensor sum = raw::zeros({1, kWidth}, kF32, cuda(0));
    Tensor total = sum;
    const gpu::HostWaits waits;
    DataLoader loader(data, {.batch_size = 1, .workers = 2, .prefetch = 3, .device = cuda(0)});
    for (const MixedBatch& batch : loader) {
      total = kernels::binary<fn::Add>(total, batch.rows.first);
    }
    EXPECT_EQ(waits.count(), 0) << "the host waited";
    EXPECT_EQ(total.to_vector(),
              std::vector<double>(kWidth, static_cast<double>(kExamples * (kExamples - 1) / 2)))
        << "seed " << seed;
    total = {};
    gpu::synchronize(0);
  }
}

// What finish() is for: without it the consumer reads before the bytes are there.
bool reads_early(uint64_t seed, bool finishes) {
  gpu::emulation::set_seed(seed);
  const DeviceCopier copier(cuda(0));
  bool early = false;
  try {
    std::array<Tensor, 2> batch = {raw::full({kWidth}, 7, kF32), raw::full({3}, 1, kI64)};
    const DeviceCopier::Copy copy = copier.start(batch);
    if (finishes) copier.finish(copy, batch);
    const Tensor result = raw::empty({kWidth}, kF32, cuda(0));
    kernels::copy_into(result, batch[0]);
    early = result.to_vector() != std::vector<double>(kWidth, 7.0);
  } catch (const CudaError&) {
    early = true;  // the memory was not the batch's yet
  }
  gpu::synchronize(0);
  return early;
}

TEST(CudaLoader, AMissingEventIsSeen) {
  TS_NEEDS_EMULATION("draws the order of streams");
  for (uint64_t seed = 0; seed < 16; ++seed) EXPECT_FALSE(reads_early(seed, true)) << seed;
  const auto any_reads_early = [] {
    bool any = false;
    for (uint64_t seed = 0; seed < 16; ++seed) any = reads_early(seed, false) || any;
    return any;
  };
#if defined(__SANITIZE_ADDRESS__)
  EXPECT_DEATH(any_reads_early(), "use-after-poison");
#else
  EXPECT_TRUE(any_reads_early());
#endif
}

TEST(CudaLoader, ErrorsOfTheWorkersComeInTheirTurnAndLeaveTheLoaderUsable) {
  for (const int workers : {0, 2}) {
    MixedData data;
    data.fails_at = 9;
    DataLoader loader(data, {.batch_size = 4, .workers = workers, .device = cuda(0)});
    int64_t batches = 0;
    const std::string text = message_of([&] {
      for (const MixedBatch& batch : loader) {
        EXPECT_EQ(batch.rows.first.device(), cuda(0));
        ++batches;
      }
    });
    EXPECT_EQ(batches, 2);
    EXPECT_NE(text.find("example 9"), std::string::npos) << text;
    EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 8}));
    data.fails_at = -1;
    EXPECT_EQ(loader.next()->rows.first.to_vector()[0], 8) << "the failed batch again";
  }
}

TEST(CudaLoader, WhatCannotBeCopiedIsRefusedWithTheRemedy) {
  const SealedData sealed;
  DataLoader loader(sealed, {.batch_size = 2, .workers = 1, .device = cuda(0)});
  EXPECT_THROW(loader.next(), UnsupportedError);
  EXPECT_NE(message_of([&] { loader.next(); }).find("visit_tensors"), std::string::npos);
  loader.set_device(kCpu);
  EXPECT_EQ(loader.next()->inside.to_vector(), std::vector<double>{0});

  const MixedData data;
  EXPECT_THROW(DataLoader(data, {.device = cuda(gpu::device_count())}), DeviceError);
  EXPECT_THROW(DataLoader(data, {.device = kMeta}), DeviceError);
}

TEST(CudaLoader, ABatchOfAnotherGpuIsRefused) {
  TS_NEEDS_DEVICES(2);
  std::array<Tensor, 1> far = {raw::zeros({2}, kF32, cuda(1))};
  const std::string text = message_of([&] { (void)DeviceCopier(cuda(0)).start(far); });
  EXPECT_NE(text.find("cuda:1"), std::string::npos) << text;
  EXPECT_NE(text.find("make batches on the cpu"), std::string::npos) << text;
}

TEST(CudaLoader, OnTheCpuBatchesStayWhatTheyAre) {
  const Tensor rows = raw::arange(0, 1, 12, kF32);
  std::array<Tensor, 1> batch = {rows};
  const DeviceCopier copier(kCpu);
  const DeviceCopier::Copy copy = copier.start(batch);
  EXPECT_EQ(copy, nullptr);
  copier.finish(copy, batch);
  EXPECT_TRUE(batch[0].is(rows));
}

TEST(CudaLoader, PinnedBatchesStayOnTheCpuForCopiesOfOnesOwn) {
  const MixedData data;
  DataLoader plain(data, {.batch_size = 4}),
      pinned(data, {.batch_size = 4, .workers = 1, .pin_memory = true});
  EXPECT_FALSE(is_pinned(plain.next()->rows.first));
  plain.set_epoch(0);
  EXPECT_EQ(epochs_of(pinned, 1), epochs_of(plain, 1));
  const MixedBatch batch = pinned.next().value();
  EXPECT_TRUE(is_pinned(batch.rows.first));
  EXPECT_TRUE(is_pinned(*batch.named.at("numbers")));
  const Tensor there = raw::copy_to_device(batch.rows.first, cuda(0));
  EXPECT_EQ(there.to_vector(), batch.rows.first.to_vector());
}

TEST(CudaLoader, PinnedMemoryGoesRoundAndAWriteWaitsForTheCopy) {
  gpu::pinned_memory().release_cached();
  for (uint64_t seed = 0; seed < 8; ++seed) {
    gpu::emulation::set_seed(seed);
    const auto side = gpu::copy_stream(0);
    const gpu::CurrentStream scope(side);
    std::vector<Tensor> copies;
    for (int i = 0; i < 6; ++i) {
      const Tensor host = raw::empty_pinned({1024}, kF32);  // not one whose copy is under way
      kernels::fill(host, i);
      copies.push_back(raw::copy_to_device(host, cuda(0)));
    }
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(copies[static_cast<size_t>(i)].to_vector(), std::vector<double>(1024, i));
    }
  }
  EXPECT_LE(gpu::pinned_memory().cached_bytes(), 6 * 4096);  // the blocks of the first round
  gpu::pinned_memory().release_cached();
  EXPECT_EQ(gpu::pinned_memory().cached_bytes(), 0);
}

TEST(CudaLoader, AnEarlyEndLeavesNothingBehind) {
  const MixedData data;
  const auto stats = memory_stats();
  gpu::DeviceAllocator& allocator = gpu::caching_allocator(0);
  gpu::synchronize(0);
  const int64_t staged = stats->current(MemoryCategory::kStaging), all = stats->current();
  const int64_t on_device = allocator.use().in_use;
  std::optional<MixedBatch> kept;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    gpu::emulation::set_seed(seed);
    DataLoader loader(data, {.batch_size = 2, .workers = 2, .prefetch = 3, .device = cuda(0)});
    for (const MixedBatch& batch : loader) {  // left with batches on their way
      if (batch.words[0] == "4") break;
    }
    kept = loader.next();
  }
  EXPECT_EQ(kept->rows.first.to_vector()[0], 6);  // outlives its loader
  kept.reset();
  gpu::synchronize(0);
  raw::empty({1}, kF32, cuda(0));  // takes back what others used
  EXPECT_EQ(stats->current(MemoryCategory::kStaging), staged);
  EXPECT_EQ(stats->current(), all);
  EXPECT_EQ(allocator.use().in_use, on_device);
}

TEST(CudaLoader, ADeviceIsChosenInTheMidstOfAnEpoch) {
  const MixedData data;
  DataLoader loader(data, {.batch_size = 4, .workers = 1});
  EXPECT_EQ(loader.next()->rows.first.device(), kCpu);
  loader.set_device(cuda(0));
  const MixedBatch batch = loader.next().value();
  EXPECT_EQ(batch.rows.first.device(), cuda(0));
  EXPECT_EQ(batch.rows.first.to_vector()[0], 4);
  EXPECT_EQ(loader.cursor(), (LoaderCursor{0, 8}));
}

// Whatever the workers have made ahead for the device before: no batch is missing, none comes
// twice, and none is where it is no longer wanted.
TEST(CudaLoader, TheDeviceMayChangeWithinALoop) {
  const MixedData data;
  DataLoader loader_of_cpu(data, {.batch_size = 2, .shuffle = true, .seed = 5});
  const auto expected = epochs_of(loader_of_cpu, 1);
  for (const int workers : {0, 1, 3}) {
    gpu::emulation::set_seed(static_cast<uint64_t>(workers));
    DataLoader loader(data, {.batch_size = 2, .shuffle = true, .seed = 5, .workers = workers});
    std::vector<std::vector<double>> seen;
    Device device = kCpu;
    for (const MixedBatch& batch : loader) {
      EXPECT_EQ(batch.rows.first.device(), device) << workers << " workers, batch " << seen.size();
      EXPECT_EQ(batch.named.at("numbers")->device(), device);
      seen.push_back(values_of(batch));
      if (seen.size() % 3 != 0) continue;
      device = device == kCpu ? cuda(0) : device == gpu::last_device() ? kCpu : gpu::last_device();
      loader.set_device(device);
    }
    EXPECT_EQ(seen, expected) << workers << " workers";
  }
}

}  // namespace
}  // namespace tessera::data::test_cuda_loader
