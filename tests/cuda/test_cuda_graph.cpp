// Capture and replay of work on a GPU, and the pools of memory that belong to graphs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/simt.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>

#include "memory_mode.h"
#include "on_emulation.h"

namespace tessera::test_cuda_graph {
namespace {

std::vector<double> filled(size_t count, double value) { return std::vector<double>(count, value); }

// A stream with a graph on it; tensors made before the capture are there when it replays.
struct CudaGraph : ::testing::Test {
  std::shared_ptr<gpu::StreamHandle> stream = gpu::make_stream(0);

  std::unique_ptr<gpu::Graph> capture(const std::function<void()>& work) const {
    gpu::synchronize(0);
    return std::make_unique<gpu::Graph>(stream, work);
  }
  void replay(gpu::Graph& graph) const {
    graph.replay();
    gpu::synchronize_stream(*stream);
  }
  static gpu::DeviceAllocator& allocator() { return gpu::caching_allocator(0); }
};

// The emulation hands all memory out so. That it is asked for shows in a capture, as one fill for
// each tensor.
TEST_F(CudaGraph, PoisonIsAFillOfWhatIsAllocated) {
  const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
  int64_t nodes[2];
  for (const bool poison : {false, true}) {
    const gpu::PoisonedMemory mode(poison);
    Tensor y;
    const auto graph = capture([&] {
      const Tensor sum = kernels::binary<fn::Add>(x, x);
      y = kernels::binary<fn::Mul>(sum, x);
    });
    nodes[poison] = graph->num_nodes();
    replay(*graph);
    EXPECT_EQ(y.to_vector(), filled(1000, 2));
  }
  const int marks = gpu::on_emulation() ? 2 : 0;  // that a block may be touched, and no more
  EXPECT_EQ(nodes[1], nodes[0] + 2 * (1 + marks));
}

TEST_F(CudaGraph, AReplayWorksOnWhatItsInputsHoldAtTheTime) {
  const Tensor x = raw::full({1000}, 1, kF32, cuda(0)), w = raw::full({1000}, 2, kF32, cuda(0));
  Tensor y;
  const auto graph = capture([&] {
    const Tensor sum = kernels::binary<fn::Add>(x, w);
    y = kernels::binary<fn::Mul>(sum, w);
  });
  EXPECT_GE(graph->num_nodes(), 2);
  replay(*graph);
  EXPECT_EQ(y.to_vector(), filled(1000, 6));
  kernels::fill(x, 5);
  gpu::synchronize(0);
  replay(*graph);
  EXPECT_EQ(y.to_vector(), filled(1000, 14));
}

TEST_F(CudaGraph, TheCaptureItselfRunsNothing) {
  const Tensor x = raw::full({10}, 1, kF32, cuda(0));
  const auto graph = capture([&] { kernels::fill(x, 3); });
  EXPECT_EQ(x.to_vector(), filled(10, 1));
  replay(*graph);
  EXPECT_EQ(x.to_vector(), filled(10, 3));
}

// As on a GPU: what a step passes as an argument of a launch stays that of the capture, and a test
// that compares with the eager step sees it.
TEST_F(CudaGraph, ANumberOfTheHostIsAConstantOfTheCapture) {
  const Tensor x = raw::full({10}, 0, kF32, cuda(0));
  double number = 1;
  const auto work = [&] { kernels::binary_into<fn::Add>(x, x, scalar_tensor(number, kF32)); };
  const auto graph = capture(work);
  replay(*graph);
  number = 10;
  replay(*graph);
  EXPECT_EQ(x.to_vector(), filled(10, 2));  // not 11
}

TEST_F(CudaGraph, WhatIsFedIsNewInEachReplay) {
  const Tensor y = raw::zeros({2}, kF64, cuda(0));
  double number = 1;
  const auto graph = capture([&] {
    gpu::Capture* const capture = gpu::Capture::current();
    const void* const first =
        capture->feed(sizeof(double), [&](void* host) { std::memcpy(host, &number, 8); });
    const void* const second = capture->feed(sizeof(double), [&](void* host) {
      const double square = number * number;
      std::memcpy(host, &square, 8);
    });
    gpu::copy_bytes(y.data(), cuda(0), first, cuda(0), 8);
    gpu::copy_bytes(y.data_as<double>() + 1, cuda(0), second, cuda(0), 8);
  });
  for (number = 3; number < 12; ++number) {  // more replays than may be under way
    graph->replay();
  }
  gpu::synchronize(0);
  EXPECT_EQ(y.to_vector(), (std::vector<double>{11, 121}));
  EXPECT_EQ(gpu::Capture::current(), nullptr);
}

TEST_F(CudaGraph, TablesOfAKernelGoAlong) {
  const Tensor x = raw::arange(0, 1, 6, kF32).to(cuda(0));
  Tensor y;
  const auto graph = capture([&] { y = flip(raw::view(x, {2, 3}), {0, 1}); });
  for (int i = 0; i < 2; ++i) {
    replay(*graph);
    EXPECT_EQ(y.to_vector(), (std::vector<double>{5, 4, 3, 2, 1, 0}));
  }
}

TEST_F(CudaGraph, RandomNumbersGoOnAsIfQueuedOpByOp) {
  const Tensor ones = raw::full({64}, 1, kF32, cuda(0));
  const RandomStream fixed{5, 77};
  Tensor y, normal, same;
  const auto work = [&] {
    y = dropout(ones, 0.5);
    normal = randn({9}, {.device = cuda(0)});
    same = dropout(ones, 0.5, true, fixed);
  };
  std::vector<std::vector<double>> expected;
  manual_seed(4);
  for (int i = 0; i < 3; ++i) {
    work();
    for (const Tensor& x : {y, normal, same}) expected.push_back(x.to_vector());
  }
  const uint64_t end = random_state().next_stream;
  manual_seed(3);  // the seed may change too
  const auto graph = capture(work);
  EXPECT_EQ(random_state().next_stream, 0u);
  manual_seed(4);
  std::vector<std::vector<double>> got;
  for (int i = 0; i < 3; ++i) {
    replay(*graph);
    for (const Tensor& x : {y, normal, same}) got.push_back(x.to_vector());
  }
  EXPECT_EQ(got, expected);
  EXPECT_NE(got[0], got[3]);
  EXPECT_EQ(got[2], got[5]);  // a stream from outside stays
  EXPECT_EQ(random_state().next_stream, end);
}

TEST_F(CudaGraph, StreamsThatJoinKeepTheOrderOfTheirEvents) {
  const auto side = gpu::make_stream(0);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    gpu::emulation::set_seed(seed);
    const Tensor x = raw::zeros({100}, kF32, cuda(0)), y = raw::zeros({100}, kF32, cuda(0));
    const auto graph = capture([&] {
      kernels::fill(x, 1);
      gpu::wait_event(*side, *gpu::record_event(*stream));
      {
        const gpu::CurrentStream current(side);
        kernels::fill(x, 2);
      }
      gpu::wait_event(*stream, *gpu::record_event(*side));
      kernels::copy_into(y, x);
    });
    replay(*graph);
    EXPECT_EQ(y.to_vector(), filled(100, 2)) << "seed " << seed;
  }
}

TEST_F(CudaGraph, AMissingEventShowsInTheReplay) {
  TS_NEEDS_EMULATION("draws the order of streams");
  const auto side = gpu::make_stream(0);
  bool wrong = false;
  for (uint64_t seed = 0; seed < 16 && !wrong; ++seed) {
    gpu::emulation::set_seed(seed);
    const Tensor x = raw::zeros({100}, kF32, cuda(0)), y = raw::zeros({100}, kF32, cuda(0));
    const auto graph = capture([&] {
      gpu::wait_event(*side, *gpu::record_event(*stream));
      {
        const gpu::CurrentStream current(side);
        kernels::fill(x, 2);
      }
      kernels::copy_into(y, x);  // does not wait for the side stream
      gpu::wait_event(*stream, *gpu::record_event(*side));
    });
    replay(*graph);
    wrong = y.to_vector() != filled(100, 2);
  }
  EXPECT_TRUE(wrong);
}

TEST_F(CudaGraph, AStreamMayEndInsideOfTheCapture) {
  const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
  Tensor y;
  const auto graph = capture([&] {
    auto side = gpu::make_stream(0);
    gpu::wait_event(*side, *gpu::record_event(*stream));
    {
      const gpu::CurrentStream current(side);
      y = kernels::binary<fn::Add>(x, x);
    }
    gpu::wait_event(*stream, *gpu::record_event(*side));
  });
  replay(*graph);
  EXPECT_EQ(y.to_vector(), filled(1000, 2));
}

TEST_F(CudaGraph, AStreamThatIsNotJoinedAgainIsRefused) {
  const auto side = gpu::make_stream(0);
  const Tensor x = raw::zeros({100}, kF32, cuda(0));
  EXPECT_THROW(capture([&] {
                 gpu::wait_event(*side, *gpu::record_event(*stream));
                 const gpu::CurrentStream current(side);
                 kernels::fill(x, 2);
               }),
               CudaError);
  kernels::fill(x, 3);
  EXPECT_EQ(x.to_vector(), filled(100, 3));
}

TEST_F(CudaGraph, WhatMakesTheHostWaitIsRefusedByName) {
  const Tensor x = raw::full({8}, 1, kF32, cuda(0));
  const Tensor host = raw::zeros({8}, kF32);
  const uint64_t streams = random_state().next_stream;
  const auto event = gpu::record_event(*stream);
  struct Case {
    const char* part;
    std::function<void()> work;
  };
  std::vector<Case> cases = {
      {"a host read", [&] { raw::select(x, 0, 0).item(); }},
      {"the last op queued was dropout", [&] { raw::select(x, 0, 0).item(); }},
      {"a shape that depends on values", [&] { nonzero(x); }},
      {"a host read", [&] { masked_select(x, gt(x, Scalar(0))); }},
      {"a host read", [&] { x.to(kCpu); }},
      {"host memory that is not pinned", [&] { host.to(cuda(0)); }},
      {"synchronize", [&] { gpu::synchronize(0); }},
      {"waiting for an event", [&] { gpu::synchronize_event(*event); }},
      {"giving memory back", [&] { allocator().release_cached(); }},
  };
  if (gpu::device_count() > 1) {
    cases.push_back({"a copy between devices", [&] { x.to(cuda(1)); }});
  }
  for (const Case& one : cases) {
    try {
      capture([&] {
        dropout(x, 0.5);
        one.work();
      });
      ADD_FAILURE() << one.part << " was captured";
    } catch (const UnsupportedError& error) {
      EXPECT_NE(std::string(error.what()).find(one.part), std::string::npos) << error.what();
    }
    // The failed capture leaves nothing behind.
    EXPECT_EQ(gpu::Capture::current(), nullptr);
    EXPECT_EQ(random_state().next_stream, streams);
    EXPECT_EQ(add(x, Scalar(1)).to_vector(), filled(8, 2));
  }
  EXPECT_EQ(allocator().use().graph_pools, 0);
}

TEST_F(CudaGraph, CapturesDoNotNest) {
  const Tensor x = raw::zeros({8}, kF32, cuda(0));
  const auto inner = capture([&] { kernels::fill(x, 2); });
  EXPECT_THROW(capture([&] { gpu::Graph(gpu::make_stream(0), [] {}); }), UnsupportedError);
  EXPECT_THROW(capture([&] { inner->replay(); }), UnsupportedError);
  replay(*inner);
  EXPECT_EQ(x.to_vector(), filled(8, 2));
}

TEST_F(CudaGraph, AReplayThatReadsFreedMemoryIsFound) {
  TS_NEEDS_EMULATION("looks at each access");
  std::optional<Tensor> x = raw::full({1000}, 1, kF32, cuda(0));
  Tensor y;
  const auto graph = capture([&] { y = kernels::unary<fn::Neg>(*x); });
  replay(*graph);
  x.reset();
  gpu::synchronize(0);
  allocator().release_cached();  // of plain memory it is free by now
  const auto run = [&] {
    graph->replay();
    gpu::synchronize_stream(*stream);
  };
  if (gpu::emulation::race::tracked()) {
    EXPECT_THROW(run(), CudaError);
  } else {
    EXPECT_DEATH(run(), "use-after-poison");
  }
}

// ---- Pools --------------------------------------------------------------------------------------

TEST_F(CudaGraph, MemoryThatIsFreedInsideIsUsedAgainInside) {
  TS_NEEDS_KEPT_MEMORY();
  const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
  const void* first = nullptr;
  const void* second = nullptr;
  Tensor y;
  const auto graph = capture([&] {
    {
      const Tensor a = kernels::unary<fn::Neg>(x);
      first = a.data();
    }
    y = kernels::unary<fn::Exp>(x);
    second = y.data();
  });
  EXPECT_EQ(first, second);
  EXPECT_EQ(graph->pool_bytes(), 2 << 20);
}

TEST_F(CudaGraph, ThePoolOfAGraphIsNobodyElsesUntilItIsGone) {
  TS_NEEDS_KEPT_MEMORY();
  allocator().release_cached();
  const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
  const gpu::DeviceMemoryUse before = allocator().use();
  Tensor y;
  auto graph = capture([&] { y = kernels::unary<fn::Neg>(x); });
  EXPECT_EQ(allocator().use().graph_pools, 2 << 20);
  const char* const begin = static_cast<const char*>(y.data());
  const auto is_of_pool = [&](const Tensor& tensor) {
    const char* const data = static_cast<const char*>(tensor.data());
    return data >= begin && data < begin + (2 << 20);
  };
  EXPECT_NE(allocator().summary().find("pool of graph"), std::string::npos)
      << allocator().summary();
  y = {};  // goes back to the pool
  {
    const gpu::CurrentStream current(stream);
    for (const int64_t size : {1000, 10, 200000}) {
      EXPECT_FALSE(is_of_pool(raw::empty({size}, kF32, cuda(0))));
    }
  }
  allocator().release_cached();  // passes over it
  EXPECT_EQ(allocator().use().graph_pools, 2 << 20);
  replay(*graph);
  graph.reset();
  EXPECT_EQ(allocator().use().graph_pools, 0);
  allocator().release_cached();
  EXPECT_EQ(allocator().use().reserved, before.reserved);
  EXPECT_EQ(allocator().use().in_use, before.in_use);
}

TEST_F(CudaGraph, AResultMayOutliveItsGraph) {
  allocator().release_cached();
  const gpu::DeviceMemoryUse before = allocator().use();
  {
    const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
    Tensor y;
    auto graph = capture([&] { y = kernels::unary<fn::Neg>(x); });
    replay(*graph);
    graph.reset();
    EXPECT_EQ(y.to_vector(), filled(1000, -1));
  }
  allocator().release_cached();
  EXPECT_EQ(allocator().use().reserved, before.reserved);
}

TEST_F(CudaGraph, MemoryOfOthersThatACaptureFreesIsFreeAfterIt) {
  TS_NEEDS_KEPT_MEMORY();
  const gpu::DeviceMemoryUse before = allocator().use();
  const void* inside = nullptr;
  const void* data = nullptr;
  std::unique_ptr<gpu::Graph> graph;
  {
    std::optional<Tensor> x = raw::full({3000}, 1, kF32, cuda(0));
    data = x->data();
    graph = capture([&] {
      x.reset();
      const Tensor y = raw::zeros({3000}, kF32, cuda(0));
      inside = y.data();
    });
  }
  EXPECT_NE(inside, data);
  EXPECT_EQ(raw::empty({3000}, kF32, cuda(0)).data(), data);
  replay(*graph);
  graph.reset();
  EXPECT_EQ(allocator().use().in_use, before.in_use);
}

// What replays write stays with the graph, wherever it was freed.
TEST_F(CudaGraph, PlainMemoryOfAGraphGoesWithIt) {
  const gpu::PlainMemory plain(true);
  allocator().release_cached();
  const gpu::DeviceMemoryUse before = allocator().use();
  {
    const Tensor x = raw::full({1000}, 1, kF32, cuda(0));
    std::optional<Tensor> other = raw::full({10}, 1, kF32, cuda(0));
    Tensor y, z;
    auto graph = capture([&] {
      other.reset();
      const Tensor a = kernels::unary<fn::Neg>(x);
      y = kernels::unary<fn::Exp>(a);
      z = kernels::unary<fn::Neg>(a);
    });
    EXPECT_EQ(graph->pool_bytes(), 3 * 4000);  // a, too
    z = {};
    gpu::synchronize(0);
    const Tensor after = raw::full({1000}, 5, kF32, cuda(0));  // `other` is free by now
    EXPECT_EQ(allocator().use().reserved - before.reserved, 5 * 4000 + (64 << 10));
    replay(*graph);
    EXPECT_EQ(after.to_vector(), filled(1000, 5));
    EXPECT_FLOAT_EQ(static_cast<float>(y.to_vector()[999]), std::exp(-1.0f));
    graph.reset();
    allocator().release_cached();
    EXPECT_EQ(allocator().use().reserved - before.reserved, 3 * 4000);
    EXPECT_FLOAT_EQ(static_cast<float>(y.to_vector()[0]), std::exp(-1.0f));
  }
  allocator().release_cached();
  EXPECT_EQ(allocator().use().reserved, before.reserved);
  EXPECT_EQ(allocator().use().segments, before.segments);
}

TEST_F(CudaGraph, TheErrorOfAFullDeviceNamesWhatGraphsKeep) {
  TS_NEEDS_KEPT_MEMORY();
  Tensor y;
  const auto graph = capture([&] { y = raw::zeros({1000}, kF32, cuda(0)); });
  try {
    raw::empty({int64_t{1} << 40}, kF32, cuda(0));
    ADD_FAILURE() << "there is no such memory";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("graphs keep 2097152"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(capture([&] { raw::empty({int64_t{1} << 40}, kF32, cuda(0)); }), OutOfMemory);
  replay(*graph);
  EXPECT_EQ(y.to_vector(), filled(1000, 0));
}

}  // namespace
}  // namespace tessera::test_cuda_graph
