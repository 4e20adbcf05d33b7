// Context, memory, streams, profiler, dtypes: the parts of core below the tensor's elements.
// ctest labels: threads
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cpu_quota.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/block_arena.h>
#include <tessera/core/memory/return_pages.h>
#include <tessera/core/parallel.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_core {
namespace {

struct Counter {
  int value = 7;
};

TEST(Context, SlotsBelongToTheContextThatIsCurrent) {
  Context::current().slot<Counter>().value = 1;
  Context other;
  {
    ContextGuard guard(other);
    EXPECT_EQ(Context::current().slot<Counter>().value, 7);
    Context::current().slot<Counter>().value = 2;
  }
  EXPECT_EQ(Context::current().slot<Counter>().value, 1);
  EXPECT_EQ(other.slot<Counter>().value, 2);
}

TEST(Context, EachThreadHasItsOwnUnlessItEntersOne) {
  Context::current().slot<Counter>().value = 1;
  int seen_alone = 0, seen_entered = 0;
  Context& mine = Context::current();
  std::thread([&] {
    seen_alone = Context::current().slot<Counter>().value;
    ContextGuard guard(mine);
    seen_entered = Context::current().slot<Counter>().value;
  }).join();
  EXPECT_EQ(seen_alone, 7);
  EXPECT_EQ(seen_entered, 1);
}

TEST(Context, OnlyThoseThatThreadsGotOfThemselvesAreNumbered) {
  EXPECT_EQ(Context::current().thread_number(), 0u);
  EXPECT_EQ(Context().thread_number(), 0u);
  std::vector<uint64_t> numbers;
  for (int i = 0; i < 2; ++i) {
    std::thread([&] {
      Context made_here;
      ContextGuard guard(made_here);
      EXPECT_EQ(Context::current().thread_number(), 0u);
    }).join();
    std::thread([&] { numbers.push_back(Context::current().thread_number()); }).join();
  }
  EXPECT_GT(numbers[0], 0u);
  EXPECT_EQ(numbers[1], numbers[0] + 1);
}

TEST(Memory, BytesAreCountedByCategoryInTheOwnersContext) {
  Context context;
  ContextGuard guard(context);
  const auto stats = memory_stats();
  Tensor parameter;
  {
    MemoryCategoryGuard category(MemoryCategory::kParameter);
    parameter = raw::empty({256}, kF32);
  }
  {
    const Tensor activation = raw::empty({1024}, kF32);
    EXPECT_EQ(stats->current(MemoryCategory::kActivation), 4096);
    EXPECT_EQ(stats->current(), 4096 + 1024);
  }
  EXPECT_EQ(stats->current(MemoryCategory::kActivation), 0);
  EXPECT_EQ(stats->peak(MemoryCategory::kActivation), 4096);
  EXPECT_EQ(stats->current(MemoryCategory::kParameter), 1024);
  parameter.storage()->set_category(MemoryCategory::kUnsharded);
  EXPECT_EQ(stats->current(MemoryCategory::kUnsharded), 1024);
  std::thread([moved = std::move(parameter)]() mutable { moved = Tensor(); }).join();
  EXPECT_EQ(stats->current(), 0);
}

TEST(Memory, FreedBlocksAreHandedOutAgain) {
  void* first = nullptr;
  {
    const Tensor tensor = raw::empty({1 << 16}, kF32);
    first = tensor.data();
  }
  EXPECT_EQ(raw::empty({1 << 16}, kF32).data(), first);
  cpu_allocator().release_cached();
  EXPECT_EQ(cpu_allocator().cached_bytes(), 0);
}

TEST(Memory, LargeBlocksAreCutFromAndJoinedToTheirNeighbours) {
  constexpr size_t kMiB = size_t{1} << 20;
  detail::BlockArena arena;
  void* const a = arena.allocate(4 * kMiB);
  void* const b = arena.allocate(2 * kMiB);
  void* const c = arena.allocate(3 * kMiB);
  void* const d = arena.allocate(1 * kMiB);
  const auto offset = [&](void* block) {
    return static_cast<size_t>(static_cast<char*>(block) - static_cast<char*>(a));
  };
  EXPECT_EQ(offset(b), 4 * kMiB);
  EXPECT_EQ(offset(c), 6 * kMiB);
  EXPECT_EQ(offset(d), 9 * kMiB);
  EXPECT_EQ(arena.cached_bytes(), 0);

  // The smallest hole that holds it, and what is left of the hole serves the next.
  arena.deallocate(a, 4 * kMiB);
  arena.deallocate(c, 3 * kMiB);
  EXPECT_EQ(arena.cached_bytes(), 7 * kMiB);
  void* const e = arena.allocate(2 * kMiB);
  EXPECT_EQ(e, c);
  EXPECT_EQ(offset(arena.allocate(1 * kMiB)), 8 * kMiB);

  // Neighbours on both sides join: one block of their sum fits.
  arena.deallocate(e, 2 * kMiB);
  arena.deallocate(b, 2 * kMiB);
  EXPECT_EQ(arena.cached_bytes(), 8 * kMiB);
  EXPECT_EQ(arena.allocate(8 * kMiB), a);
  EXPECT_EQ(arena.cached_bytes(), 0);
}

TEST(Memory, ReleasedPagesOfTheArenaGoBackAndItsAddressesStayUsable) {
  constexpr size_t kMiB = size_t{1} << 20;
  const auto resident = [](void* block, size_t bytes) {
    std::vector<unsigned char> pages(bytes / 4096);
    EXPECT_EQ(mincore(block, bytes, pages.data()), 0);
    int64_t count = 0;
    for (unsigned char page : pages) count += page & 1;
    return count;
  };
  detail::BlockArena arena;
  void* const kept = arena.allocate(2 * kMiB);
  void* const freed = arena.allocate(8 * kMiB);
  std::memset(kept, 1, 2 * kMiB);
  std::memset(freed, 2, 8 * kMiB);
  arena.deallocate(freed, 8 * kMiB);
  EXPECT_EQ(resident(freed, 8 * kMiB), 2048);  // cached for the next step
  arena.release_free();
  EXPECT_EQ(arena.cached_bytes(), 0);
  EXPECT_EQ(resident(freed, 8 * kMiB), 0);
  EXPECT_EQ(static_cast<char*>(kept)[2 * kMiB - 1], 1);
  void* const again = arena.allocate(4 * kMiB);
  EXPECT_EQ(again, freed);
  EXPECT_EQ(static_cast<char*>(again)[0], 0);  // pages that the system gave anew

  arena.deallocate(again, 4 * kMiB);
  EXPECT_EQ(arena.cached_bytes(), 4 * kMiB);
  arena.deallocate(kept, 2 * kMiB);
  arena.release_free();  // the mapping itself
  EXPECT_EQ(arena.cached_bytes(), 0);
  EXPECT_NE(arena.allocate(1 * kMiB), nullptr);
}

TEST(Memory, AStepOfOtherSizesReusesWhatTheFirstHeld) {
  cpu_allocator().release_cached();
  const auto step = [](int64_t count, int64_t elements) {
    std::vector<Tensor> held;
    for (int64_t i = 0; i < count; ++i) held.push_back(raw::empty({elements}, kU8));
  };
  step(16, 3 << 20);
  EXPECT_EQ(cpu_allocator().cached_bytes(), 48 << 20);
  step(4, 12 << 20);  // size classes would hold 48 MiB more from here on
  EXPECT_EQ(cpu_allocator().cached_bytes(), 48 << 20);
  step(1, 48 << 20);
  EXPECT_EQ(cpu_allocator().cached_bytes(), 48 << 20);
}

TEST(Memory, PagesOfABlockGoBackToTheSystemWhereThatIsAsked) {
  constexpr size_t kBytes = size_t{40} << 20;
  constexpr ptrdiff_t kEdges = ptrdiff_t{4} << 20;  // they may share a huge page with other blocks
  auto* block = static_cast<char*>(cpu_allocator().allocate(kBytes));
  // What the next holder of the same addresses finds: pages that went back come again as zeros.
  const auto kept_when_freed = [&] {
    std::memset(block, 1, kBytes);
    cpu_allocator().deallocate(block, kBytes);
    EXPECT_EQ(cpu_allocator().allocate(kBytes), block);
    return std::count(block, block + kBytes, 1);
  };
  return_pages_when_freed(block, kBytes);
  EXPECT_LE(kept_when_freed(), kEdges);
  EXPECT_EQ(kept_when_freed(), static_cast<ptrdiff_t>(kBytes));  // asked for once, not for ever
  cpu_allocator().deallocate(block, kBytes);
  cpu_allocator().release_cached();
}

TEST(Memory, OutOfMemoryNamesTheRequestAndTheHolders) {
  set_cpu_memory_limit(1 << 20);
  try {
    raw::empty({1 << 20}, kF32);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("4194304 bytes"), std::string::npos) << error.what();
  }
  set_cpu_memory_limit(0);
  EXPECT_THROW(raw::empty({int64_t{1} << 60}, kU8), OutOfMemory);
  EXPECT_EQ(raw::empty({4}, kF32).numel(), 4);  // the failed requests left nothing behind
}

TEST(Storage, ResizedToZeroAndBackServesTheViewsMadeBefore) {
  const Tensor tensor = raw::full({4}, 3.0, kF32);
  const Tensor view = raw::narrow(tensor, 0, 1, 2);
  tensor.storage()->resize(0);
  EXPECT_EQ(memory_stats()->current(), 0);
  tensor.storage()->resize(16);
  for (int i = 0; i < 4; ++i) tensor.data_as<float>()[i] = static_cast<float>(i);
  EXPECT_EQ(view.to_vector(), (std::vector<double>{1, 2}));
}

TEST(Storage, ForeignBytesAreReleasedOnceByTheLastHolder) {
  float values[4] = {1, 2, 3, 4};
  int released = 0;
  {
    const Tensor tensor = raw::from_blob(values, {2, 2}, kF32, [&] { ++released; });
    const Tensor copy = raw::transpose(tensor, 0, 1);
    EXPECT_EQ(copy.to_vector(), (std::vector<double>{1, 3, 2, 4}));
    EXPECT_THROW(tensor.storage()->resize(0), ValueError);
  }
  EXPECT_EQ(released, 1);
  EXPECT_THROW(raw::from_blob(reinterpret_cast<char*>(values) + 1, {1}, kF32), ValueError);
}

TEST(Tensor, SetDataSwapsContentsUnderAllHolders) {
  const Tensor a = raw::full({2}, 1.0, kF32);
  const Tensor holder = a;
  a.set_data(raw::full({3}, 5.0, kF64));
  EXPECT_EQ(holder.to_vector(), (std::vector<double>{5, 5, 5}));
  EXPECT_EQ(holder.describe(), "f64[3] cpu");
}

// `relu(x) = y` would rebind a temporary and write nothing. x[0] = y is an IndexedTensor's.
static_assert(!std::is_assignable_v<Tensor&&, const Tensor&>);
static_assert(!std::is_assignable_v<Tensor&&, Tensor&&>);
static_assert(!std::is_assignable_v<const Tensor&, const Tensor&>);
static_assert(std::is_assignable_v<Tensor&, const Tensor&> && std::is_copy_assignable_v<Tensor>);
static_assert(std::is_nothrow_move_assignable_v<Tensor>);

TEST(Tensor, UndefinedTensorsExplainThemselves) {
  EXPECT_THROW(Tensor().shape(), ValueError);
  EXPECT_EQ(Tensor().describe(), "undefined");
  EXPECT_THROW(raw::empty({2}, kF32, kMeta).to_vector(), DeviceError);
}

TEST(Tensor, IsMadeOfNumbersListsAndVectors) {
  const int64_t k = 3;
  const std::vector<float> floats = {1, 2};
  const std::array<double, 2> doubles = {1, 2};
  EXPECT_EQ(tensor(3.0).describe(), "f32[] cpu");
  EXPECT_EQ(tensor(3).describe(), "i64[] cpu");
  EXPECT_EQ(tensor(true).describe(), "bool[] cpu");
  EXPECT_EQ(tensor(k, kBF16).describe(), "bf16[] cpu");
  EXPECT_EQ(tensor({k}, {1, 1}).describe(), "f32[1, 1] cpu");
  EXPECT_EQ(tensor({k, 2}).to_vector(), (std::vector<double>{3, 2}));
  EXPECT_EQ(tensor({1.5}, {}).describe(), "f32[] cpu");
  EXPECT_EQ(tensor({0.5, 0.0}, kBool).to_vector(), (std::vector<double>{1, 0}));
  EXPECT_EQ(tensor({INT64_MAX}, kI64).item<int64_t>(), INT64_MAX);
  EXPECT_EQ(tensor(floats).describe(), "f32[2] cpu");
  EXPECT_EQ(tensor(doubles, kF64).describe(), "f64[2] cpu");
  EXPECT_EQ(tensor(std::vector<int64_t>{1, 2}).describe(), "i64[2] cpu");
  EXPECT_EQ(tensor(std::vector<int32_t>{}).describe(), "i32[0] cpu");
  EXPECT_EQ(tensor(std::span(floats)).to_vector(), (std::vector<double>{1, 2}));
  EXPECT_THROW(tensor({k}, {2}), ShapeError);
}

TEST(Tensor, ItemsAreOfOneElement) {
  EXPECT_EQ(raw::full({1, 1}, 3, kF32).item(), 3);
  for (const Shape& shape : {Shape{2}, Shape{0}, Shape{1, 3}}) {
    EXPECT_THROW(raw::zeros(shape, kF32).item(), ShapeError);
  }
}

enum class Colour { kGreen };
std::ostream& operator<<(std::ostream& out, Colour) { return out << "green"; }
struct Described {
  std::string describe() const { return "itself"; }
};

// Numbers as a stream writes them, to the last of each type.
TEST(Messages, ReadAsAStreamWrites) {
  const auto streamed = [](const auto& value) {
    std::ostringstream out;
    out << value;
    return out.str();
  };
  const auto same = [&](const auto& value) {
    EXPECT_EQ(tessera::detail::concatenate(value), streamed(value));
  };
  const auto same_for_limits = [&]<class T>(T) {
    same(std::numeric_limits<T>::min());
    same(std::numeric_limits<T>::max());
    same(std::numeric_limits<T>::lowest());
  };
  std::apply([&](auto... zeros) { (same_for_limits(zeros), ...); },
             std::tuple<int16_t, uint16_t, int, unsigned, int64_t, uint64_t, float, double>());
  for (const double x : {0.0, -0.0, 1.0, 0.1, 1e5, 1e6, 123456.5, 1234567.0, 1e-4, 1e-5, -2.5e300,
                         std::numeric_limits<double>::infinity(), std::nan(""), -std::nan("")}) {
    same(x);
    same(static_cast<float>(x));
  }
  same(true);
  same('x');
  same("text");
  same(std::string("a\0b", 3));
  same(static_cast<const void*>("somewhere"));
  same(Shape{2, 3});
  same(kBF16);
  same(Colour::kGreen);
  char letters[] = "not a literal";
  const Tensor x = raw::empty({2, 3}, kF32);
  EXPECT_EQ(tessera::detail::concatenate(letters, ' ', Described(), " of ", std::string_view("x")),
            "not a literal itself of x");
  EXPECT_EQ(tessera::detail::concatenate(x), x.describe());  // not its values
}

TEST(Views, ShareTheVersionUnlessTheyBecomeParameters) {
  const Tensor flat = raw::zeros({8}, kF32);
  const Tensor view = raw::narrow(flat, 0, 0, 4);
  const Tensor parameter = raw::as_parameter(raw::narrow(flat, 0, 4, 4));
  flat.bump_version();
  EXPECT_EQ(view.version(), 1u);
  EXPECT_EQ(parameter.version(), 0u);
}

TEST(Views, AsStridedStaysInsideTheStorage) {
  const Tensor x = raw::zeros({6}, kF32);
  EXPECT_NO_THROW(raw::as_strided(x, {2, 3}, {3, 1}, 0));
  EXPECT_THROW(raw::as_strided(x, {2, 3}, {3, 1}, 1), ShapeError);
  EXPECT_THROW(raw::as_strided(x, {2}, {-1}, 3), ShapeError);
}

TEST(Views, SlicesFollowPython) {
  const Tensor x = tensor({0, 1, 2, 3, 4, 5, 6});
  EXPECT_EQ(raw::slice(x, 0, -3, {}, 1).to_vector(), (std::vector<double>{4, 5, 6}));
  EXPECT_EQ(raw::slice(x, 0, 1, 100, 2).to_vector(), (std::vector<double>{1, 3, 5}));
  EXPECT_EQ(raw::slice(x, 0, 5, 2, 1).numel(), 0);
  EXPECT_THROW(raw::narrow(x, 0, 3, 5), IndexError);
  EXPECT_THROW(raw::select(x, 0, 7), IndexError);
}

TEST(Promotion, FollowsTorch) {
  EXPECT_EQ(promote_types(kF16, kBF16), kF32);
  EXPECT_EQ(promote_types(kI64, kF16), kF16);
  EXPECT_EQ(promote_types(kU8, kI32), kI32);
  EXPECT_EQ(promote_types(kBool, kU8), kU8);
  EXPECT_EQ(promote_types(kF64, kF32), kF64);
  EXPECT_EQ(promote_types(kI32, Scalar(1.5)), kF32);
  EXPECT_EQ(promote_types(kBool, Scalar(1)), kI64);
  EXPECT_EQ(promote_types(kBF16, Scalar(1.5)), kBF16);
  EXPECT_THROW(promote_types(kF8E4M3, kF32), DTypeError);
}

TEST(Parallel, CoversEveryIndexOnceForAnyThreadCount) {
  const int before = num_threads();
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    std::vector<std::atomic<int>> hits(10007);
    parallel_for(10007, 100, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)].fetch_add(1);
    });
    for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
  }
  set_num_threads(before);
  EXPECT_THROW(set_num_threads(0), ValueError);
}

TEST(Parallel, LoopsOfSeveralCallersRunBesideEachOther) {
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      set_num_threads(3);
      for (int i = 0; i < 200; ++i) {
        std::vector<int64_t> marks(1000);
        parallel_for(1000, 10, [&](int64_t begin, int64_t end) {
          EXPECT_TRUE(in_parallel_region());
          parallel_for(end - begin, 1, [&](int64_t b, int64_t e) {
            for (int64_t at = begin + b; at < begin + e; ++at) ++marks[static_cast<size_t>(at)];
          });
        });
        for (const int64_t mark : marks) total += mark;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 3 * 200 * 1000);
  EXPECT_FALSE(in_parallel_region());
}

TEST(Profiler, CountsRangesAndTheirOwnTime) {
  Profiler profiler(true);
  {
    ProfilerScope scope(profiler);
    const ProfilerRange outer("outer");
    for (int i = 0; i < 3; ++i) ProfilerRange inner("inner");
  }
  { ProfilerRange outside("outside"); }
  ASSERT_EQ(profiler.entries().size(), 2u);
  EXPECT_EQ(profiler.entries().at("inner").calls, 3);
  EXPECT_LE(profiler.entries().at("outer").self_seconds,
            profiler.entries().at("outer").total_seconds);
  EXPECT_EQ(profiler.events().size(), 4u);
  EXPECT_NE(profiler.chrome_trace().find("\"name\":\"outer\""), std::string::npos);
}

// ---- What a container lets a process use

// A machine's files below a folder of its own.
std::optional<double> quota_of(const std::map<std::string, std::string>& files) {
  char folder[] = "/tmp/tessera_quota_XXXXXX";
  if (::mkdtemp(folder) == nullptr) return {};
  for (const auto& [name, text] : files) {
    const std::filesystem::path path = folder + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  const std::optional<double> quota = cpu_quota(folder);
  std::filesystem::remove_all(folder);
  return quota;
}

TEST(CpuQuota, IsTheLeastOfAllGroupsThatThisProcessIsIn) {
  const std::string kGroup = "/proc/self/cgroup", kMounts = "/proc/self/mountinfo";
  const std::string second =
      "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
  const std::string first =
      "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
      "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
      "33 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";
  const std::string v1 = "/sys/fs/cgroup/cpu,cpuacct";
  EXPECT_EQ(quota_of({}), std::nullopt);
  EXPECT_EQ(quota_of({{kGroup, "0::/\n"}, {kMounts, second}}), std::nullopt);
  // Version 2: at the root of a container, nested, a parent that allows less, none.
  EXPECT_EQ(
      quota_of(
          {{kGroup, "0::/\n"}, {kMounts, second}, {"/sys/fs/cgroup/cpu.max", "50000 100000\n"}}),
      0.5);
  EXPECT_EQ(quota_of({{kGroup, "0::/a.slice/b.scope\n"},
                      {kMounts, second},
                      {"/sys/fs/cgroup/a.slice/cpu.max", "max 100000\n"},
                      {"/sys/fs/cgroup/a.slice/b.scope/cpu.max", "150000 100000\n"}}),
            1.5);
  EXPECT_EQ(quota_of({{kGroup, "0::/a/b/c\n"},
                      {kMounts, second},
                      {"/sys/fs/cgroup/a/cpu.max", "100000 100000\n"},
                      {"/sys/fs/cgroup/a/b/c/cpu.max", "400000 100000\n"}}),
            1.0);
  EXPECT_EQ(
      quota_of(
          {{kGroup, "0::/a\n"}, {kMounts, second}, {"/sys/fs/cgroup/a/cpu.max", "max 100000\n"}}),
      std::nullopt);
  EXPECT_EQ(quota_of({{kGroup, "0::/a\n"},
                      {kMounts, second},
                      {"/sys/fs/cgroup/other/cpu.max", "1000 100000\n"}}),
            std::nullopt)
      << "another's";
  // Version 1, whose other controllers have other groups; -1 is none.
  const std::string groups = "5:cpuset:/z\n4:cpu,cpuacct:/a/b\n0::/a\n";
  EXPECT_EQ(quota_of({{kGroup, groups},
                      {kMounts, first},
                      {v1 + "/a/b/cpu.cfs_quota_us", "25000\n"},
                      {v1 + "/a/b/cpu.cfs_period_us", "50000\n"},
                      {v1 + "/cpu.cfs_quota_us", "-1\n"},
                      {v1 + "/cpu.cfs_period_us", "100000\n"}}),
            0.5);
  EXPECT_EQ(quota_of({{kGroup, groups},
                      {kMounts, first},
                      {v1 + "/a/cpu.cfs_quota_us", "300000\n"},
                      {v1 + "/a/cpu.cfs_period_us", "100000\n"},
                      {v1 + "/a/b/cpu.cfs_quota_us", "-1\n"},
                      {v1 + "/a/b/cpu.cfs_period_us", "100000\n"}}),
            3.0);
  // A container without a name space of groups sees its host's path; its own is what is mounted.
  EXPECT_EQ(
      quota_of({{kGroup, "4:cpu,cpuacct:/docker/12ab\n"},
                {kMounts, "32 31 0:29 /docker/12ab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"},
                {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n"},
                {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}),
      2.0);
  EXPECT_EQ(quota_of({{kGroup, "0::/docker/12ab/job\n"},
                      {kMounts, "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
                      {"/sys/fs/cgroup/cpu.max", "200000 100000\n"}}),
            2.0);
}

}  // namespace
}  // namespace tessera::test_core
