// Devices, streams, events, memory and errors of the GPU backend.
#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/capability.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/emulation/simt.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/hooks.h>
#include <tessera/core/cuda/launch_times.h>
#include <tessera/core/cuda/pinned_memory.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/pinned.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/gpu/transfers.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/raw_views.h>

#include "../message_of.h"
#include "memory_mode.h"
#include "on_emulation.h"

namespace tessera::test_cuda_runtime {
namespace {

TEST(CudaDevices, AreDescribedAndThoseThatAreNotThereRefused) {
  const Device last = gpu::last_device(), beyond = cuda(last.index + 1);
  EXPECT_NE(gpu::describe_device(last.index).find("sm_"), std::string::npos);
  EXPECT_THROW(raw::empty({2}, kF32, beyond), DeviceError);
  const std::string text = message_of([&] { raw::empty({2}, kF32, beyond); });
  EXPECT_NE(text.find("there is no cuda:" + std::to_string(beyond.index)), std::string::npos)
      << text;
  EXPECT_NE(text.find("cuda:" + std::to_string(last.index)), std::string::npos) << text;
}

TEST(CudaDevices, OfTheEmulationAreTwo) {
  TS_NEEDS_EMULATION("has two");
  EXPECT_EQ(gpu::device_count(), 2);
  EXPECT_NE(gpu::describe_device(1).find("sm_90"), std::string::npos);
  EXPECT_NE(message_of([] { raw::empty({2}, kF32, cuda(2)); }).find("cuda:0 to cuda:1"),
            std::string::npos);
}

// What a program of another machine says, in a process of its own.
void expect_refusal(const char* variable, const char* value, const char* text) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ::setenv(variable, value, 1);
  EXPECT_EXIT(
      {
        const bool refuses = gpu::device_count() == 0 && parse_device("cuda") == cuda(0);
        std::fputs(message_of([] { raw::empty({2}, kF32, cuda(0)); }).c_str(), stderr);
        std::fputs(message_of([] { gpu::pinned_allocator(); }).c_str(), stderr);
        ::_exit(refuses && raw::full({2}, 3, kF32).to_vector()[1] == 3 ? 0 : 1);
      },
      testing::ExitedWithCode(0), std::string(text) + ".*" + text);
  ::unsetenv(variable);
}

TEST(CudaDevices, AMachineWithoutAGpuOrWithAnOldDriverSaysSo) {
  TS_NEEDS_EMULATION("is told by the environment what it has");
  expect_refusal("TESSERA_EMULATED_DEVICES", "0",
                 "no usable NVIDIA GPU .cudaErrorNoDevice.; use cpu");
  expect_refusal("TESSERA_EMULATED_DRIVER", "12040",
                 "the NVIDIA driver supports CUDA 12.4 and this program needs 13.0; update");
  expect_refusal("TESSERA_EMULATED_DRIVER", "0", "this machine has no NVIDIA driver; use cpu");
}

TEST(CudaDevices, DeviceCodeRunsOnItsMajorVersionFromItsMinorOn) {
  EXPECT_TRUE(gpu::runs_on("90a", 9, 0));
  EXPECT_FALSE(gpu::runs_on("90a", 9, 1));
  EXPECT_FALSE(gpu::runs_on("90a", 10, 0));
  EXPECT_TRUE(gpu::runs_on("80;90a", 8, 6));
  EXPECT_FALSE(gpu::runs_on("86;90a", 8, 0));
  EXPECT_TRUE(gpu::runs_on("90a;100f", 10, 3));
  EXPECT_TRUE(gpu::runs_on("90a;120", 12, 1));
  EXPECT_FALSE(gpu::runs_on("", 9, 0));
}

TEST(CudaDevices, AGpuWithoutDeviceCodeIsRefusedAtItsFirstUse) {
  TS_NEEDS_EMULATION("is told by the environment what it has");
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ::setenv("TESSERA_EMULATED_CAPABILITY", "86", 1);
  EXPECT_EXIT(
      {
        std::fputs(message_of([] { raw::empty({2}, kF32, cuda(0)); }).c_str(), stderr);
        std::fputs(gpu::describe_device(1).c_str(), stderr);
        ::_exit(0);
      },
      testing::ExitedWithCode(0),
      "cuda:0, emulated sm_86 device 0, has compute capability 8.6, and this program has device "
      "code for 90a; build it with -DTESSERA_CUDA_ARCHITECTURES=86, or use cpu.*sm_86");
  ::unsetenv("TESSERA_EMULATED_CAPABILITY");
}

// ---- Launches -----------------------------------------------------------------------------------

TEST(CudaLaunches, AreTimedInTheirOrder) {
  const Tensor x = rand({64, 64}).to(cuda(0));
  exp(x);  // outside
  const auto times = gpu::time_launches([&] {
    const TimelineRange layer("h.0");
    exp(x);
    softmax(x, 1);
    x.to(kCpu);
    const TimelineRange inner("h.0.mlp");
    add(x, x);
  });
  std::vector<std::string> keys;
  for (const gpu::LaunchTime& time : times) {
    keys.push_back(time.layer + "|" + time.op + "|" + time.name);
    EXPECT_GE(time.seconds, 0) << time.name;
    EXPECT_EQ(time.request, "") << "own kernels";
  }
  EXPECT_EQ(keys, (std::vector<std::string>{"h.0|exp|elementwise", "h.0|softmax|softmax",
                                            "h.0|to|copy", "h.0.mlp|add|elementwise"}));
  EXPECT_TRUE(gpu::time_launches([] {}).empty());
  EXPECT_THROW(gpu::time_launches([] { throw ValueError("it failed"); }), ValueError);
  EXPECT_TRUE(gpu::time_launches([] {}).empty()) << "an error ends it";
}

// The emulation has no library of products of its own.
TEST(CudaLaunches, OfOwnKernelsAreRefusedWhereLibrariesAreRequired) {
  TS_NEEDS_EMULATION("has no library");
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ::setenv("TESSERA_REQUIRE_LIBRARIES", "1", 1);
  EXPECT_EXIT(
      {
        const Tensor x = ones({4, 4}).to(cuda(0));
        std::fputs(message_of<UnsupportedError>([&] { matmul(x, x); }).c_str(), stderr);
        const Tensor image = ones({1, 2, 4, 4}).to(cuda(0));
        std::fputs(message_of<UnsupportedError>([&] { conv2d(image, image); }).c_str(), stderr);
        ::_exit(0);
      },
      testing::ExitedWithCode(0),
      "matmul: would run on own kernels, which TESSERA_REQUIRE_LIBRARIES refuses: .*conv2d: would "
      "run on own kernels");
  ::unsetenv("TESSERA_REQUIRE_LIBRARIES");
}

TEST(CudaTensors, TravelBetweenDevicesInAnyLayoutAndDtype) {
  const Tensor x = raw::arange(0, 1, 24, kF32);
  for (const DType dtype : {kF64, kF32, kF16, kBF16, kI64, kI32, kU8}) {
    const Tensor host = raw::transpose(raw::view(kernels::convert(x, dtype), {2, 3, 4}), 0, 2);
    const Tensor there = host.to(cuda(0)), other = there.to(gpu::last_device());
    const Tensor back = other.to(kCpu);
    EXPECT_EQ(there.device(), cuda(0));
    EXPECT_EQ(back.to_vector(), host.to_vector());
    EXPECT_EQ(raw::transpose(there, 0, 1).to_vector(), raw::transpose(host, 0, 1).to_vector());
    const Tensor target = raw::transpose(raw::empty({2, 3, 4}, kF32, cuda(0)), 0, 2);
    kernels::copy_into(target, host);  // converts and changes the layout on the way
    EXPECT_EQ(target.to_vector(), host.to_vector());
  }
  EXPECT_EQ(raw::select(x.to(cuda(0)), 0, 7).item(), 7);
}

TEST(CudaTensors, CopiesInPlaceTravelWithTheirGradients) {
  const Tensor source = tensor({1.0, 2.0, 3.0}).set_requires_grad();
  const Tensor target = raw::zeros({2, 3}, kBF16, gpu::last_device());
  copy_(target, source);
  EXPECT_EQ(target.to_vector(), (std::vector<double>{1, 2, 3, 1, 2, 3}));
  target.sum().backward();
  EXPECT_EQ(source.grad().device(), kCpu);
  EXPECT_EQ(source.grad().to_vector(), (std::vector<double>{2, 2, 2}));
}

TEST(CudaTensors, OperandsOnDifferentDevicesAreRefused) {
  const Tensor x = raw::zeros({2}, kF32, cuda(0));
  EXPECT_THROW(kernels::binary<fn::Add>(x, raw::zeros({2}, kF32)), DeviceError);
  if (gpu::device_count() > 1) {
    EXPECT_THROW(kernels::binary<fn::Add>(x, raw::zeros({2}, kF32, cuda(1))), DeviceError);
  }
  // A number that happens to be a CPU tensor goes along.
  EXPECT_EQ(kernels::binary<fn::Add>(x, scalar_tensor(2.5, kF32)).to_vector(),
            std::vector<double>(2, 2.5));
}

// A kernel that no .cu file has a form of.
void kernel_of_the_cpu(const Tensor& x) {
  if (x.device().is_cuda()) kernels::on_cuda<kernel_of_the_cpu>("frobnicate", x.device(), x);
}

TEST(CudaTensors, RepeatsDifferFromPlaceToPlace) {
  const auto repeat = [](const Device& device, const Device& of_repeats) {
    const Tensor x = raw::view(raw::arange(0, 1, 6, kF32), {2, 3}).to(device);
    x.set_requires_grad(true);
    const Tensor y = repeat_interleave(x, tensor({2, 0, 3}, kI64).to(of_repeats), 1);
    sum(square(y)).backward();
    return std::pair(y.to_vector(), x.grad().to_vector());
  };
  const auto expected = repeat(kCpu, kCpu);
  EXPECT_EQ(expected.first, (std::vector<double>{0, 0, 2, 2, 2, 3, 3, 5, 5, 5}));
  const Device last = gpu::last_device();
  EXPECT_EQ(repeat(last, kCpu), expected);
  EXPECT_EQ(repeat(last, last), expected);
}

TEST(CudaTensors, MayBeEmptyFromTheFirstOn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const Tensor x = raw::empty({0, 3}, kF32, cuda(0));
        softmax(exp(x), 1);  // what it throws ends the process otherwise
        const Device beyond = cuda(gpu::device_count());
        const std::string other = message_of([&] { raw::empty({0}, kF32, beyond); });
        std::fputs(("no error; " + other).c_str(), stderr);
        ::_exit(0);
      },
      testing::ExitedWithCode(0), "no error; .*there is no cuda:");
}

TEST(CudaTensors, AnOpWithoutAKernelNamesItselfAndTheDevice) {
  const Tensor x = raw::zeros({4, 4}, kF32, cuda(0));
  const std::string text = message_of([&] { kernel_of_the_cpu(x); });
  EXPECT_NE(text.find("frobnicate"), std::string::npos) << text;
  EXPECT_NE(text.find("cuda:0"), std::string::npos) << text;
  EXPECT_THROW(kernel_of_the_cpu(x), UnsupportedError);
}

TEST(CudaTensors, AnIndexOutsideIsToldAtTheNextWaitAndForgotten) {
  const Tensor table = raw::zeros({4, 3}, kF32, cuda(0));
  const Tensor index = tensor({1, 9, 2}, kI64).to(cuda(0));
  const Tensor rows = embedding(index, table);
  EXPECT_EQ(message_of([&] { gpu::synchronize(0); }),
            "embedding: index 9 at element 1 is outside [0, 4); check where the indices come from "
            "(found on cuda:0)");
  EXPECT_EQ(rows.to_vector(), std::vector<double>(9, 0.0));
}

// ---- Copies from and to memory that is not page-locked ------------------------------------------

// Under many seeds, since CUDA may take the bytes at the call or later.
template <class Test>
void for_seeds(const Test& test) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    gpu::emulation::set_seed(seed);
    test();
  }
}

TEST(CudaCopies, HaveTakenPageableMemoryWhenTheyReturn) {
  for_seeds([] {
    for (const size_t bytes : {size_t{64}, size_t{300} << 10}) {
      for (const bool non_blocking : {false, true}) {
        const auto size = static_cast<int64_t>(bytes);
        const Tensor there = raw::empty({size}, kU8, cuda(0));
        std::vector<uint8_t> host(bytes, 1);
        gpu::copy_bytes(there.data(), cuda(0), host.data(), kCpu, bytes, non_blocking);
        std::fill(host.begin(), host.end(), 2);
        ASSERT_EQ(there.to_vector(), std::vector<double>(bytes, 1))
            << bytes << (non_blocking ? " non_blocking" : "");
      }
    }
  });
}

TEST(CudaCopies, HaveWrittenPageableMemoryWhenTheyReturn) {
  const Tensor there = raw::full({64}, 3, kU8).to(cuda(0));
  for_seeds([&] {
    for (const bool non_blocking : {false, true}) {
      std::vector<uint8_t> host(64, 1);
      gpu::copy_bytes(host.data(), kCpu, there.data(), cuda(0), 64, non_blocking);
      ASSERT_EQ(host, std::vector<uint8_t>(64, 3));
    }
  });
}

TEST(CudaCopies, TablesOfLaunchesMayDieAtOnceAndNobodyWaits) {
  const Device last = gpu::last_device();
  for_seeds([&] {
    const Tensor there = raw::empty({256}, kU8, last);
    gpu::synchronize(last.index);
    const gpu::HostWaits waits;
    for (const size_t begin : {0, 64, 128, 192}) {
      std::vector<uint8_t> table(64, static_cast<uint8_t>(begin));
      gpu::upload_constants(there.data_as<uint8_t>() + begin, last.index, table.data(), 64);
      std::fill(table.begin(), table.end(), 255);
    }
    EXPECT_EQ(waits.count(), 0);
    const std::vector<double> found = there.to_vector();
    for (size_t i = 0; i < 256; ++i) ASSERT_EQ(found[i], static_cast<double>(i / 64 * 64));
  });
  TS_NEEDS_EMULATION("counts waits of the host; the bytes are right");
}

// ---- Contexts -----------------------------------------------------------------------------------

// What a rank with the device cuda:1 does, its helping threads included.
void work_of_a_rank() {
  gpu::use_device(1);
  // Threads that know nothing of devices.
  std::optional<Tensor> pinned;
  std::thread([&] { pinned = raw::pin(raw::full({64}, 2, kF32)); }).join();
  const Tensor x = raw::copy_to_device(*pinned, cuda(1));
  std::shared_ptr<gpu::EventHandle> event;
  {
    const gpu::CurrentStream stream(gpu::make_stream(1));
    event = gpu::record_event(*gpu::current_stream_handle(1));
  }
  std::thread([&] {
    gpu::synchronize_event(*event);
    if (gpu::event_done(*event)) event.reset();
    pinned.reset();
    Tensor y = exp(x);
    const Tensor host = y.to(kCpu);
    is_pinned(host);
  }).join();
  gpu::Graph(gpu::make_stream(1), [&] { neg_(x); }).replay();
  gpu::synchronize(1);
  gpu::caching_allocator(1).release_cached();
  gpu::pinned_allocator().release_cached();
}

TEST(CudaContexts, ARankHasOneOnItsDevice) {
  TS_NEEDS_DEVICES(2);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        work_of_a_rank();
        std::fprintf(stderr, "contexts: %d %d", gpu::hook_has_context(0), gpu::hook_has_context(1));
        ::_exit(0);
      },
      testing::ExitedWithCode(0), "contexts: 0 1");
}

TEST(CudaContexts, AScopeLeavesTheThreadOnADeviceThatIsInUse) {
  TS_NEEDS_DEVICES(2);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const auto current = [] {
          int device = -1;
          TS_CUDA(cudaGetDevice(&device));
          return device;
        };
        { const gpu::CurrentDevice scope(1); }
        const int unused = current();  // nobody chose cuda:0
        gpu::use_device(0);
        { const gpu::CurrentDevice scope(1); }
        const int used = current();
        std::fprintf(stderr, "after unused %d, after used %d", unused, used);
        ::_exit(0);
      },
      testing::ExitedWithCode(0), "after unused 1, after used 0");
}

TEST(CudaMemory, IsSplitJoinedAndUsedAgain) {
  TS_NEEDS_KEPT_MEMORY();
  gpu::DeviceAllocator& allocator = gpu::caching_allocator(0);
  allocator.release_cached();
  const gpu::DeviceMemoryUse before = allocator.use();
  void* const a = allocator.allocate(1000);
  void* const b = allocator.allocate(2000);
  EXPECT_EQ(static_cast<char*>(b) - static_cast<char*>(a), 1024);  // of one segment
  EXPECT_EQ(allocator.use().in_use - before.in_use, 1024 + 2048);
  EXPECT_EQ(allocator.use().reserved - before.reserved, 2 << 20);
  allocator.deallocate(a, 1000);
  EXPECT_EQ(allocator.allocate(600), a);  // the smallest that holds it
  allocator.deallocate(a, 600);
  allocator.deallocate(b, 2000);
  EXPECT_EQ(allocator.use().in_use, before.in_use);
  void* const whole = allocator.allocate(1 << 20);  // the pieces have joined
  EXPECT_EQ(whole, a);
  allocator.deallocate(whole, 1 << 20);
  allocator.release_cached();
  EXPECT_EQ(allocator.use().reserved, before.reserved);
  EXPECT_EQ(allocator.use().segments, before.segments);
}

// Of its bytes, which memcheck knows the end of.
TEST(CudaMemory, PlainIsAnAllocationOfItsOwnWhichGoesWhenItsStreamsCameBy) {
  const gpu::PlainMemory plain(true);
  gpu::DeviceAllocator& allocator = gpu::caching_allocator(0);
  allocator.release_cached();
  const gpu::DeviceMemoryUse before = allocator.use();
  const auto wait = [](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); };
  const gpu::CurrentDevice device(0);
  for (const bool own_stream : {true, false}) {
    const auto stream = gpu::make_stream(0), side = gpu::make_stream(0);
    const gpu::CurrentStream current(stream);
    void* const block = allocator.allocate(10);
    EXPECT_EQ(allocator.use().reserved - before.reserved, 10);
    EXPECT_EQ(allocator.use().in_use - before.in_use, 10);
    gpu::synchronize(0);
    std::atomic<bool> goes_on{false};
    const auto& user = own_stream ? stream : side;
    {
      const gpu::CurrentStream used(user);
      gpu::record_use(0, block);
    }
    TS_CUDA(cudaLaunchHostFunc(gpu::native(*user), wait, &goes_on));
    TS_CUDA(cudaMemsetAsync(block, 1, 10, gpu::native(*user)));
    allocator.deallocate(block, 10);
    void* const other = allocator.allocate(30);
    EXPECT_EQ(allocator.use().segments - before.segments, 2);
    goes_on = true;
    goes_on.notify_all();
    gpu::synchronize_stream(*user);
    gpu::synchronize_stream(*stream);
    void* const next = allocator.allocate(20);
    EXPECT_EQ(allocator.use().reserved - before.reserved, 50);
    allocator.deallocate(other, 30);
    allocator.deallocate(next, 20);
    allocator.release_cached();
    EXPECT_EQ(allocator.use().reserved, before.reserved);
    EXPECT_EQ(allocator.use().in_use, before.in_use);
  }
}

// What lies behind a tensor in its block is no number, whatever was there before.
TEST(CudaMemory, PoisonFillsABlockToItsEnd) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a read behind a tensor ends the program";
#endif
  const gpu::PlainMemory kept(false);
  const gpu::PoisonedMemory poisoned(true);
  const void* block = nullptr;
  {
    const Tensor x = raw::full({128}, 7, kF32, cuda(0));
    block = x.data();
  }
  const Tensor x = raw::empty({25}, kF32, cuda(0));
  ASSERT_EQ(x.data(), block);
  float behind[103] = {};
  {
    const gpu::CurrentDevice device(0);
    TS_CUDA(cudaMemcpyAsync(behind, x.data_as<float>() + 25, sizeof behind, cudaMemcpyDefault,
                            gpu::current_stream()));
    gpu::synchronize(0);
  }
  for (const float value : behind) EXPECT_TRUE(std::isnan(value)) << value;
}

TEST(CudaMemory, IsCountedByCategory) {
  const auto stats = memory_stats();
  const int64_t before = stats->current(MemoryCategory::kOptimizer);
  {
    const MemoryCategoryGuard guard(MemoryCategory::kOptimizer);
    const Tensor x = raw::empty({1000}, kF32, gpu::last_device());
    EXPECT_EQ(stats->current(MemoryCategory::kOptimizer) - before, 4000);
  }
  EXPECT_EQ(stats->current(MemoryCategory::kOptimizer), before);
}

TEST(CudaMemory, TellsWhatItHoldsWhereThereIsNotEnough) {
  const std::string text = message_of([] { raw::empty({int64_t{1} << 40}, kF32, cuda(0)); });
  for (const char* part :
       {"cuda allocator", "4398046511104 bytes", "cuda:0", "in use", "memory in bytes"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_THROW(raw::empty({int64_t{1} << 40}, kF32, cuda(0)), OutOfMemory);
  EXPECT_EQ(raw::full({3}, 2, kF32, cuda(0)).to_vector(), std::vector<double>(3, 2));
}

TEST(CudaMemory, WaitsForOtherStreamsThatUsedIt) {
  TS_NEEDS_KEPT_MEMORY();
  gpu::DeviceAllocator& allocator = gpu::caching_allocator(0);
  const auto side = gpu::make_stream(0);
  void* const block = allocator.allocate(4096);
  gpu::synchronize(0);  // memory belongs to its stream from where it was allocated
  std::atomic<bool> goes_on{false};
  {
    const gpu::CurrentDevice device(0);
    const gpu::CurrentStream current(side);
    gpu::record_use(0, block);
    const auto wait = [](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); };
    TS_CUDA(cudaLaunchHostFunc(gpu::native(*side), wait, &goes_on));
    TS_CUDA(cudaMemsetAsync(block, 1, 4096, gpu::native(*side)));
  }
  allocator.deallocate(block, 4096);
  void* const other = allocator.allocate(4096);
  EXPECT_NE(other, block);  // the side stream has not come by
  goes_on = true;
  goes_on.notify_all();
  gpu::synchronize_stream(*side);
  void* const again = allocator.allocate(4096);
  EXPECT_EQ(again, block);
  allocator.deallocate(other, 4096);
  allocator.deallocate(again, 4096);
  gpu::synchronize(0);
}

TEST(CudaStreams, OrderWorkByEventsAndTakeTime) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    gpu::emulation::set_seed(seed);
    const auto producer = gpu::make_stream(0), consumer = gpu::make_stream(0);
    const Tensor x = raw::zeros({1000}, kF32, cuda(0));
    const Tensor y = raw::zeros({1000}, kF32, cuda(0));
    gpu::synchronize(0);
    const auto start = gpu::record_event(*producer);
    {
      const gpu::CurrentStream current(producer);
      kernels::fill(x, 3);
    }
    const auto filled = gpu::record_event(*producer);
    gpu::wait_event(*consumer, *filled);
    {
      const gpu::CurrentStream current(consumer);
      kernels::copy_into(y, x);
    }
    gpu::synchronize_stream(*consumer);
    EXPECT_EQ(y.to_vector(), std::vector<double>(1000, 3.0)) << "seed " << seed;
    EXPECT_TRUE(gpu::event_done(*filled));
    EXPECT_GE(gpu::elapsed_milliseconds(*start, *filled), 0);
  }
}

// The copy comes between what was queued on the source's device before it and after it.
TEST(CudaPeers, ACopyIsInTheOrderOfBothDevices) {
  TS_NEEDS_DEVICES(2);
  for (uint64_t seed = 0; seed < 12; ++seed) {
    gpu::emulation::set_seed(seed);
    const auto giving = gpu::make_stream(0), taking = gpu::make_stream(1);
    const gpu::CurrentStream on_source(giving), on_target(taking);
    std::vector<Tensor> copies;
    const gpu::HostWaits waits;
    const Tensor x = raw::full({500}, 3, kF32, cuda(0));
    copies.push_back(x.to(cuda(1)));
    kernels::fill(x, 7);  // after the copy has read it
    {
      const Tensor gone = raw::full({500}, 4, kF32, cuda(0));
      copies.push_back(gone.to(cuda(1)));
    }
    const Tensor reuses = raw::full({500}, 8, kF32, cuda(0));  // the memory of `gone`
    kernels::copy_into(x, copies[1]);                          // and back
    EXPECT_EQ(waits.count(), 0) << "the host waited";
    EXPECT_EQ(copies[0].to_vector(), std::vector<double>(500, 3)) << "seed " << seed;
    EXPECT_EQ(copies[1].to_vector(), std::vector<double>(500, 4)) << "seed " << seed;
    EXPECT_EQ(x.to_vector(), std::vector<double>(500, 4)) << "seed " << seed;
    EXPECT_EQ(reuses.to_vector(), std::vector<double>(500, 8)) << "seed " << seed;
    copies.clear();
    gpu::synchronize(0);
    gpu::synchronize(1);
  }
}

TEST(CudaStreams, PinnedMemoryIsKeptAndHandedOutAgain) {
  Allocator& pinned = gpu::pinned_allocator();
  pinned.release_cached();  // copies of other tests went through it
  void* const block = pinned.allocate(10000);
  pinned.deallocate(block, 10000);
  EXPECT_EQ(pinned.cached_bytes(), 16384);
  EXPECT_EQ(pinned.allocate(12000), block);
  pinned.deallocate(block, 12000);
  // Above 1 MiB a block is an eighth larger than what was asked for at most.
  constexpr size_t kMiB = size_t{1} << 20;
  for (const size_t bytes : {kMiB + 1, 9 * kMiB / 8 + 1, 2 * kMiB, 2 * kMiB + 1, 100 * kMiB - 1}) {
    pinned.release_cached();
    const int64_t in_use = gpu::pinned_bytes_in_use();
    void* const large = pinned.allocate(bytes);
    const int64_t size = gpu::pinned_bytes_in_use() - in_use;
    EXPECT_GE(size, static_cast<int64_t>(bytes));
    EXPECT_LE(size, static_cast<int64_t>(bytes + bytes / 8 + 1));
    pinned.deallocate(large, bytes);
    EXPECT_EQ(pinned.cached_bytes(), size);
    EXPECT_EQ(pinned.allocate(bytes), large);
    EXPECT_EQ(gpu::pinned_bytes_in_use(), in_use + size);
    pinned.deallocate(large, bytes);
  }
  pinned.release_cached();
  EXPECT_EQ(pinned.cached_bytes(), 0);
}

// Of what waits for a stream the oldest block is asked about, and its event is used again.
TEST(CudaStreams, PinnedBlocksThatWaitAreNotAskedOneByOne) {
  TS_NEEDS_EMULATION("counts calls about events");
  constexpr int kBlocks = 300;
  gpu::PinnedAllocator& pinned = gpu::pinned_memory();
  pinned.release_cached();
  const gpu::CurrentDevice device(0);
  const auto slow = gpu::make_stream(0), quick = gpu::make_stream(0);
  const auto use_on = [&](const std::vector<std::shared_ptr<gpu::StreamHandle>>& streams) {
    void* const block = pinned.allocate(4096);
    for (const auto& stream : streams) pinned.record_use(block, gpu::native(*stream));
    return block;
  };
  const auto wait = [](void* flag) { static_cast<std::atomic<bool>*>(flag)->wait(false); };
  gpu::emulation::EventCalls before;
  for (int round = 0; round < 2; ++round) {
    // What is used on the quick stream alone does not wait behind the others.
    void* const over = use_on({quick});
    void* const both = use_on({quick});
    gpu::synchronize_stream(*quick);
    before = gpu::emulation::event_calls();
    std::atomic<bool> goes_on{false};
    TS_CUDA(cudaLaunchHostFunc(gpu::native(*slow), wait, &goes_on));
    for (int i = 0; i < kBlocks; ++i) pinned.deallocate(use_on({slow}), 4096);
    EXPECT_LE(gpu::emulation::event_calls().asked - before.asked, 2 * kBlocks);
    EXPECT_GE(pinned.cached_bytes(), kBlocks * 4096);
    pinned.record_use(both, gpu::native(*slow));
    pinned.deallocate(both, 4096);
    pinned.deallocate(over, 4096);
    void* const again = pinned.allocate(4096);
    EXPECT_EQ(again, over);
    void* const other = pinned.allocate(4096);
    EXPECT_NE(other, both);
    pinned.deallocate(other, 4096);
    goes_on = true;
    goes_on.notify_all();
    gpu::synchronize_stream(*slow);
    pinned.deallocate(again, 4096);
    const int64_t held = pinned.cached_bytes();
    std::vector<void*> all;
    for (int i = 0; i < kBlocks + 2; ++i) all.push_back(pinned.allocate(4096));
    EXPECT_EQ(held - pinned.cached_bytes(), (kBlocks + 2) * 4096);
    for (void* const block : all) pinned.deallocate(block, 4096);
  }
  EXPECT_EQ(gpu::emulation::event_calls().made, before.made);  // in the second round
  EXPECT_LE(gpu::emulation::event_calls().asked - before.asked, 10 * kBlocks);
  pinned.release_cached();
  EXPECT_EQ(pinned.cached_bytes(), 0);
}

TEST(CudaKernels, GiveTheBitsOfTheCpuWhereTheFormulaIsShared) {
  manual_seed(3);
  const Tensor x = randn({37, 53});
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor host = kernels::convert(x, dtype), there = host.to(cuda(0));
    if (dtype == kF32) {  // 16 bits have a formula of their own: core/approximate.h
      EXPECT_EQ(kernels::unary<fn::Gelu>(there).to_vector(),
                kernels::unary<fn::Gelu>(host).to_vector());
    }
    EXPECT_EQ(kernels::unary<fn::Exp>(there).to_vector(),
              kernels::unary<fn::Exp>(host).to_vector());
    EXPECT_EQ(kernels::unary<fn::Sin>(there).to_vector(),
              kernels::unary<fn::Sin>(host).to_vector());
    const Tensor row = raw::select(host, 0, 1), row_there = raw::select(there, 0, 1);
    EXPECT_EQ(kernels::binary<fn::Mul>(there, row_there).to_vector(),
              kernels::binary<fn::Mul>(host, row).to_vector());
  }
  for (const DType dtype : {kF8E4M3, kF8E5M2, kI32, kBool}) {
    EXPECT_EQ(kernels::convert(x.to(cuda(0)), dtype).to_vector(),
              kernels::convert(x, dtype).to_vector());
  }
}

TEST(CudaKernels, DrawTheRandomNumbersOfTheCpu) {
  for (const DType dtype : {kF64, kF32, kBF16}) {
    std::vector<double> numbers[2];
    for (const Device& device : {kCpu, cuda(0)}) {
      manual_seed(9);
      std::vector<double>& all = numbers[device.is_cuda()];
      for (const Tensor& x : {rand({101}, {dtype, device}), randn({101}, {dtype, device}),
                              dropout(raw::full({101}, 1, dtype, device), 0.3)}) {
        for (double value : x.to_vector()) all.push_back(value);
      }
    }
    if (dtype != kF64 || gpu::on_emulation()) {
      EXPECT_EQ(numbers[0], numbers[1]);
      continue;
    }
    // Normal ones come from the logarithm and the sine of CUDA's library.
    ASSERT_EQ(numbers[0].size(), numbers[1].size());
    for (size_t i = 0; i < numbers[0].size(); ++i) {
      EXPECT_NEAR(numbers[0][i], numbers[1][i], 0x1p-49) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::test_cuda_runtime
