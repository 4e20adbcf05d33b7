// The nccl backend's communicators over a mock of the library whose ranks are threads: what is
// asked of NCCL, followed to its end, and what its answers become.
// ctest own program: it loads a mock
#include <tessera/distributed/transport/nccl/backend.h>

#include <gtest/gtest.h>

#include <dlfcn.h>

#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/process_group.h>

#include "message_of.h"
#include "mock_nccl/mock_nccl.h"

namespace tessera::distributed::nccl::test_nccl {
namespace {

constexpr Communicator::Seconds kTimeout{10.0};

// The mock's controls, found as the backend finds NCCL's functions.
struct Mock {
  void* handle = dlopen(TESSERA_MOCK_NCCL, RTLD_NOW | RTLD_LOCAL);
  LibraryPtr library = std::make_shared<const Library>(TESSERA_MOCK_NCCL);

  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle, name));
  }
  void fail(const char* function, ncclResult_t result, int times = 1) const {
    find<decltype(mock_nccl_fail)>("mock_nccl_fail")(function, result, times);
  }
  void set_async_error(ncclResult_t result) const {
    find<decltype(mock_nccl_set_async_error)>("mock_nccl_set_async_error")(result);
  }
  int calls(const char* function) const {
    return find<decltype(mock_nccl_calls)>("mock_nccl_calls")(function);
  }
  int alive() const { return find<decltype(mock_nccl_alive)>("mock_nccl_alive")(); }
  void reset() const { find<decltype(mock_nccl_reset)>("mock_nccl_reset")(); }
  void synchronize() const {
    EXPECT_TRUE(find<decltype(mock_nccl_synchronize)>("mock_nccl_synchronize")());
  }
};

class Nccl : public testing::Test {
 protected:
  void SetUp() override { mock.reset(); }
  void TearDown() override { EXPECT_EQ(mock.alive(), 0) << "a communicator has not been freed"; }

  // `body` on `size` threads, each with its communicator of one group.
  void on_communicators(int size, const std::function<void(Communicator&)>& body) {
    const std::string id = make_unique_id(*mock.library);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        Communicator communicator(mock.library, id, rank, size, "world", kTimeout);
        body(communicator);
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }

  Mock mock;
};

template <class T>
Part part_of(std::vector<T>& values) {
  return {reinterpret_cast<char*>(values.data()), static_cast<int64_t>(values.size() * sizeof(T))};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Nccl, ReducesGathersAndScatters) {
  on_communicators(4, [&](Communicator& c) {
    const float mine = static_cast<float>(c.rank() + 1);
    std::vector<float> data(6, mine);
    c.all_reduce(data.data(), data.data(), 6, kF32, ReduceOp::kSum, nullptr);
    mock.synchronize();
    EXPECT_EQ(data, std::vector<float>(6, 10.0F));

    data.assign(6, mine);
    c.all_reduce(data.data(), data.data(), 6, kF32, ReduceOp::kMean, nullptr);
    mock.synchronize();
    EXPECT_EQ(data, std::vector<float>(6, 2.5F));

    std::vector<double> on_root(3, mine);
    c.reduce(on_root.data(), on_root.data(), 3, kF64, ReduceOp::kMax, 2, nullptr);
    mock.synchronize();
    EXPECT_EQ(on_root, std::vector<double>(3, c.rank() == 2 ? 4.0 : mine));

    std::vector<int64_t> pieces(8), piece(2);
    std::iota(pieces.begin(), pieces.end(), c.rank());
    c.reduce_scatter(pieces.data(), piece.data(), 2, kI64, ReduceOp::kSum, nullptr);
    mock.synchronize();
    EXPECT_EQ(piece, (std::vector<int64_t>{6 + 8 * c.rank(), 10 + 8 * c.rank()}));

    std::vector<float> gathered(8);
    const std::vector<float> part(2, mine);
    c.all_gather(part.data(), gathered.data(), 2 * sizeof(float), nullptr);
    mock.synchronize();
    EXPECT_EQ(gathered, (std::vector<float>{1, 1, 2, 2, 3, 3, 4, 4}));

    std::vector<float> from_root(3, mine);
    c.broadcast(from_root.data(), 3 * sizeof(float), 1, nullptr);
    mock.synchronize();
    EXPECT_EQ(from_root, std::vector<float>(3, 2.0F));
  });
}

TEST_F(Nccl, ExchangesUnevenPartsInOneGroup) {
  on_communicators(3, [&](Communicator& c) {
    // Rank r sends s + 1 numbers 10 * r + s to rank s, and nothing to itself.
    std::vector<std::vector<float>> out(3), in(3);
    std::vector<Part> sends(3), receives(3);
    for (int s = 0; s < 3; ++s) {
      if (s == c.rank()) continue;
      const auto i = static_cast<size_t>(s);
      out[i].assign(i + 1, static_cast<float>(10 * c.rank() + s));
      in[i].resize(static_cast<size_t>(c.rank()) + 1);
      sends[i] = part_of(out[i]);
      receives[i] = part_of(in[i]);
    }
    c.exchange(sends, receives, nullptr);
    mock.synchronize();
    for (int s = 0; s < 3; ++s) {
      if (s == c.rank()) continue;
      const float expected = static_cast<float>(10 * s + c.rank());
      EXPECT_EQ(in[static_cast<size_t>(s)],
                std::vector<float>(static_cast<size_t>(c.rank()) + 1, expected));
    }
  });
  EXPECT_EQ(mock.calls("ncclGroupStart"), 3);
  EXPECT_EQ(mock.calls("ncclGroupEnd"), 3);
  EXPECT_EQ(mock.calls("ncclSend"), 6);
}

TEST_F(Nccl, SplitsIntoGroupsOfTheirOwn) {
  on_communicators(4, [&](Communicator& c) {
    // Even and odd ranks; rank 3 stays out.
    const int color = c.rank() == 3 ? -1 : c.rank() % 2;
    const int new_rank = c.rank() / 2, new_size = color == 0 ? 2 : 1;
    auto part = c.split(color, new_rank, new_rank, new_size, "parity", kTimeout);
    ASSERT_EQ(part == nullptr, color < 0);
    float ready = 0;  // all have split
    c.all_reduce(&ready, &ready, 1, kF32, ReduceOp::kSum, nullptr);
    mock.synchronize();
    if (!part) return;
    float value = static_cast<float>(c.rank() + 1);
    part->all_reduce(&value, &value, 1, kF32, ReduceOp::kSum, nullptr);
    mock.synchronize();
    EXPECT_EQ(value, color == 0 ? 4.0F : 2.0F);
    part->shutdown();
  });
}

TEST_F(Nccl, ARankThatDoesNotComeEndsTheStartWithItsName) {
  const std::string id = make_unique_id(*mock.library);
  const std::string message = message_of<DistributedError>(
      [&] { Communicator alone(mock.library, id, 0, 2, "world", Communicator::Seconds(0.05)); });
  EXPECT_TRUE(contains(message, "ncclCommInitRankConfig")) << message;
  EXPECT_TRUE(contains(message, "rank 0 waited 0.05 s")) << message;
  EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
}

TEST_F(Nccl, AWrongArgumentLeavesTheGroupUsable) {
  on_communicators(1, [&](Communicator& c) {
    float value = 3;
    mock.fail("ncclAllReduce", ncclInvalidArgument);
    const std::string message = message_of<DistributedError>(
        [&] { c.all_reduce(&value, &value, 1, kF32, ReduceOp::kSum, nullptr); });
    EXPECT_TRUE(contains(message, "ncclAllReduce: group 'world': invalid argument")) << message;
    EXPECT_TRUE(contains(message, "said by the mock")) << message;
    EXPECT_TRUE(contains(message, "can still be used")) << message;
    c.all_reduce(&value, &value, 1, kF32, ReduceOp::kSum, nullptr);
    EXPECT_EQ(value, 3.0F);
  });
}

TEST_F(Nccl, AFailureOfTheSystemAbortsAndLaterCallsSaySo) {
  on_communicators(1, [&](Communicator& c) {
    float value = 3;
    auto reduce = [&] { c.all_reduce(&value, &value, 1, kF32, ReduceOp::kSum, nullptr); };
    mock.fail("ncclAllReduce", ncclSystemError);
    EXPECT_TRUE(contains(message_of<DistributedError>(reduce), "unhandled system error"));
    EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
    const std::string later = message_of<DistributedError>(reduce);
    EXPECT_TRUE(contains(later, "can no longer be used: ncclAllReduce failed")) << later;
    EXPECT_EQ(mock.calls("ncclAllReduce"), 1);
  });
  EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
}

TEST_F(Nccl, AnAsynchronousErrorIsFoundAndAborts) {
  on_communicators(1, [&](Communicator& c) {
    c.check_async();
    mock.set_async_error(ncclRemoteError);
    EXPECT_TRUE(contains(message_of<DistributedError>([&] { c.check_async(); }), "system error"));
    EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
  });
}

TEST_F(Nccl, AnotherThreadCanAbortAndIsQuoted) {
  on_communicators(1, [&](Communicator& c) {
    std::thread watchdog([&] { c.abort("the watchdog's deadline has passed"); });
    watchdog.join();
    float value = 1;
    const std::string message = message_of<DistributedError>(
        [&] { c.all_reduce(&value, &value, 1, kF32, ReduceOp::kSum, nullptr); });
    EXPECT_TRUE(contains(message, "the watchdog's deadline has passed")) << message;
  });
}

TEST_F(Nccl, ClosesTheGroupAfterAnErrorInside) {
  on_communicators(2, [&](Communicator& c) {
    if (c.rank() == 1) return;
    mock.fail("ncclSend", ncclInvalidArgument);
    float value = 1;
    const std::vector<Part> sends{{}, {reinterpret_cast<char*>(&value), sizeof value}};
    EXPECT_TRUE(contains(message_of<DistributedError>([&] { c.exchange(sends, {}, nullptr); }),
                         "invalid argument"));
    EXPECT_EQ(mock.calls("ncclGroupEnd"), 1);
  });
}

TEST_F(Nccl, RefusesWhatNcclCannotReduce) {
  EXPECT_TRUE(contains(message_of<DTypeError>([] { data_type(kBool); }), "bool"));
  EXPECT_TRUE(contains(message_of<DTypeError>([] { data_type(kF8E4M3); }), "convert it first"));
  EXPECT_TRUE(
      contains(message_of<DTypeError>([] { reduction(ReduceOp::kMean, kI64); }), "use sum"));
}

TEST_F(Nccl, NamesAMissingAndAnOldLibrary) {
  const std::string missing =
      message_of<UnsupportedError>([] { Library library("libnccl_of_nowhere.so"); });
  EXPECT_TRUE(contains(missing, "libnccl_of_nowhere.so")) << missing;
  EXPECT_TRUE(contains(missing, "TESSERA_NCCL")) << missing;

  setenv("MOCK_NCCL_VERSION", "21403", 1);
  const std::string old = message_of<UnsupportedError>([] { Library library(TESSERA_MOCK_NCCL); });
  unsetenv("MOCK_NCCL_VERSION");
  EXPECT_TRUE(contains(old, "needs NCCL 2.18.0 or newer")) << old;
  EXPECT_TRUE(contains(old, "is 2.14.3")) << old;
}

// ---- The backend --------------------------------------------------------------------------------

// The mock's memory is the host's, and its streams run when they are waited for. (The queues of a
// device are tested with an emulated one: tests/cuda/test_cuda_nccl.cpp.)
class MockQueues : public DeviceQueues {
 public:
  explicit MockQueues(const Mock& mock) : mock_(mock) {}
  Device device() const override { return cuda(0); }
  std::function<void()> run(Channel, const std::function<void(CudaStream)>& launch,
                            Watch watch) override {
    launch(nullptr);
    waiting_.push_back(std::move(watch));
    return [] {};
  }
  void watch(Watch watch) override { waiting_.push_back(std::move(watch)); }
  void synchronize() override {
    if (waiting_.empty()) return;
    mock_.synchronize();
    for (const Watch& watch : std::exchange(waiting_, {})) watch.done(nullptr);
  }
  std::vector<Watch>& waiting() { return waiting_; }

 private:
  const Mock& mock_;
  std::vector<Watch> waiting_;
};

class NcclGroups : public Nccl {
 protected:
  struct Rank {
    std::unique_ptr<Backend> backend;
    std::shared_ptr<MockQueues> queues;

    // Starts the call, lets the stream run and rethrows what came of it.
    void carry_out(const CallPtr& call) {
      std::exception_ptr error;
      bool done = false;
      call->done = [&](std::exception_ptr failure) {
        error = std::move(failure);
        done = true;
      };
      backend->start(call);
      if (!done) queues->synchronize();
      EXPECT_TRUE(done);
      if (error) std::rethrow_exception(error);
    }
  };

  void run_backends(int size, const std::function<void(Rank&)>& body) {
    const auto store = std::make_shared<MemoryStore>();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        Rank own;
        own.queues = std::make_shared<MockQueues>(mock);
        own.backend = make_backend(mock.library, store, "world", rank, size, own.queues, {});
        body(own);
        EXPECT_EQ(own.backend->shutdown(std::chrono::seconds(1)), "");
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
};

CallPtr make_call(Operation operation, DType dtype, Channel channel = Channel::kUser) {
  auto call = std::make_shared<Call>();
  call->header.operation = operation;
  call->header.dtype = dtype;
  call->channel = channel;
  return call;
}

TEST_F(NcclGroups, FormOverTheStoreAndCarryOutEveryCollective) {
  run_backends(3, [&](Rank& own) {
    Backend& backend = *own.backend;
    const int rank = backend.rank();
    const auto self = static_cast<size_t>(rank);
    EXPECT_EQ(backend.size(), 3);
    EXPECT_TRUE(backend.serves(cuda(0)));
    EXPECT_FALSE(backend.serves(kCpu));
    std::vector<float> data(6, static_cast<float>(rank + 1));
    const auto pieces = [&] {
      std::vector<Part> parts;
      for (size_t r = 0; r < 3; ++r) parts.push_back({reinterpret_cast<char*>(&data[2 * r]), 8});
      return parts;
    };

    auto call = make_call(Operation::kAllReduce, kF32, Channel::kGradient);
    call->sends = pieces();
    own.carry_out(call);
    EXPECT_EQ(data, std::vector<float>(6, 6.0F));

    std::vector<float> piece(2);
    data.assign(6, static_cast<float>(rank + 1));
    call = make_call(Operation::kReduceScatter, kF32);
    call->sends = pieces();
    call->receives.resize(3);
    call->receives[self] = part_of(piece);
    own.carry_out(call);
    EXPECT_EQ(piece, std::vector<float>(2, 6.0F));

    // Uneven: rank r keeps r + 1 of the six.
    std::vector<float> uneven(self + 1);
    call = make_call(Operation::kReduceScatter, kF32);
    call->receives.resize(3);
    for (size_t r = 0, begin = 0; r < 3; begin += ++r) {
      call->sends.push_back(
          {reinterpret_cast<char*>(&data[begin]), static_cast<int64_t>(4 * (r + 1))});
    }
    call->receives[self] = part_of(uneven);
    own.carry_out(call);
    EXPECT_EQ(uneven, std::vector<float>(self + 1, 6.0F));

    // In place: into the rank's own piece.
    data.assign(6, static_cast<float>(rank + 1));
    call = make_call(Operation::kReduceScatter, kF32);
    call->sends = pieces();
    call->receives.resize(3);
    call->receives[self] = pieces()[self];
    own.carry_out(call);
    std::vector<float> in_place(6, static_cast<float>(rank + 1));
    in_place[2 * self] = in_place[2 * self + 1] = 6;
    EXPECT_EQ(data, in_place);

    data.assign(6, static_cast<float>(rank + 1));
    call = make_call(Operation::kReduce, kF32);
    call->header.root = 2;
    call->sends = pieces();
    own.carry_out(call);
    if (rank == 2) {
      EXPECT_EQ(data, std::vector<float>(6, 6.0F));
    }

    data.assign(6, static_cast<float>(rank + 1));
    call = make_call(Operation::kBroadcast, kF32);
    call->header.root = 1;
    call->sends.resize(3);
    call->receives.resize(3);
    (rank == 1 ? call->sends : call->receives)[1] = part_of(data);
    own.carry_out(call);
    EXPECT_EQ(data, std::vector<float>(6, 2.0F));

    std::vector<float> mine(2, static_cast<float>(rank + 1));
    call = make_call(Operation::kAllGather, kF32);
    call->sends.assign(3, part_of(mine));
    call->receives = pieces();
    own.carry_out(call);
    EXPECT_EQ(data, (std::vector<float>{1, 1, 2, 2, 3, 3}));

    // Ragged: rank r gives r + 1 numbers.
    std::vector<float> given(self + 1, static_cast<float>(rank));
    std::vector<std::vector<float>> got{std::vector<float>(1), std::vector<float>(2),
                                        std::vector<float>(3)};
    call = make_call(Operation::kAllGather, kF32);
    call->sends.assign(3, part_of(given));
    for (auto& one : got) call->receives.push_back(part_of(one));
    own.carry_out(call);
    EXPECT_EQ(got[2], std::vector<float>(3, 2.0F));
    EXPECT_EQ(got[0], std::vector<float>(1, 0.0F));

    // In place: from the rank's own piece, of equal and of ragged ones.
    data.assign(6, 0);
    data[2 * self] = data[2 * self + 1] = static_cast<float>(rank + 1);
    call = make_call(Operation::kAllGather, kF32);
    call->sends.assign(3, pieces()[self]);
    call->receives = pieces();
    own.carry_out(call);
    EXPECT_EQ(data, (std::vector<float>{1, 1, 2, 2, 3, 3}));
    call = make_call(Operation::kAllGather, kF32);
    call->sends.assign(3, part_of(got[self]));
    for (auto& one : got) call->receives.push_back(part_of(one));
    own.carry_out(call);
    EXPECT_EQ(got[2], std::vector<float>(3, 2.0F));
    EXPECT_EQ(got[1], std::vector<float>(2, 1.0F));

    own.carry_out(make_call(Operation::kBarrier, kU8));
  });
}

TEST_F(NcclGroups, AnExchangeIsOneGroupOfMessagesThatMatchByTag) {
  run_backends(2, [&](Rank& own) {
    const int rank = own.backend->rank(), peer = 1 - rank;
    std::vector<std::vector<float>> out(2), in(2, std::vector<float>(3));
    std::vector<CallPtr> calls;
    std::vector<std::string> errors(5, "not done");
    const auto add = [&](Operation operation, int tag, std::vector<float>& data) {
      auto call = make_call(operation, kF32, Channel::kPeer);
      call->header.root = peer;
      call->tag = tag;
      (operation == Operation::kSend ? call->sends : call->receives).resize(2);
      (operation == Operation::kSend ? call->sends : call->receives)[static_cast<size_t>(peer)] =
          part_of(data);
      call->done = [&errors, i = calls.size()](std::exception_ptr failure) {
        errors[i] = failure ? message_of<Error>([&] { std::rethrow_exception(failure); }) : "";
      };
      calls.push_back(call);
    };
    for (size_t tag = 0; tag < 2; ++tag) {
      out[tag].assign(3, static_cast<float>(10 * rank) + static_cast<float>(tag));
    }
    // The ranks list them in different orders.
    for (const int tag : {rank, 1 - rank})
      add(Operation::kSend, tag, out[static_cast<size_t>(tag)]);
    for (const int tag : {0, 1}) add(Operation::kRecv, tag, in[static_cast<size_t>(tag)]);
    std::vector<float> none;
    add(Operation::kSend, 9, none);
    calls.back()->refused = true;  // ends at once: nobody else knows
    own.backend->start_together(calls);
    EXPECT_EQ(errors[4], "");
    EXPECT_EQ(own.queues->waiting().size(), 1u) << "one transfer on the stream";
    own.queues->synchronize();
    EXPECT_EQ(errors, std::vector<std::string>(5));
    for (size_t tag = 0; tag < 2; ++tag) {
      EXPECT_EQ(in[tag],
                std::vector<float>(3, static_cast<float>(10 * peer) + static_cast<float>(tag)));
    }
  });
  EXPECT_EQ(mock.calls("ncclGroupStart"), 2);
  EXPECT_EQ(mock.calls("ncclSend"), 4);
}

TEST_F(NcclGroups, AFailureAbortsAllChannelsAndIsWhatLaterCallsSay) {
  run_backends(2, [&](Rank& own) {
    std::vector<float> data(2, 1.0F);
    auto call = make_call(Operation::kAllReduce, kF32, Channel::kParameter);
    call->sends = {{reinterpret_cast<char*>(&data[0]), 4}, {reinterpret_cast<char*>(&data[1]), 4}};
    own.carry_out(call);
    own.backend->fail(std::make_exception_ptr(DistributedError("rank 1 was killed by signal 9")));
    const std::string message = message_of<DistributedError>([&] { own.carry_out(call); });
    EXPECT_EQ(message, "rank 1 was killed by signal 9");
  });
  EXPECT_EQ(mock.calls("ncclCommAbort"), 4);  // two communicators on two ranks
}

TEST_F(NcclGroups, WhatNcclFindsWhileATransferIsWatchedAbortsTheGroup) {
  run_backends(1, [&](Rank& own) {
    std::vector<float> data(2, 1.0F);
    auto call = make_call(Operation::kAllReduce, kF32);
    call->sends = {part_of(data)};
    std::string error;
    call->done = [&](std::exception_ptr failure) {
      error = message_of<DistributedError>([&] { std::rethrow_exception(failure); });
    };
    own.backend->start(call);
    ASSERT_TRUE(call->order);
    Watch watch = std::move(own.queues->waiting().at(0));
    own.queues->waiting().clear();
    watch.check();
    mock.set_async_error(ncclRemoteError);
    EXPECT_TRUE(contains(message_of<DistributedError>(watch.check), "system error"));
    EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
    watch.check();  // said once
    watch.done(nullptr);
    EXPECT_TRUE(contains(error, "system error")) << error;
  });
}

TEST_F(NcclGroups, ATransferThatWaitsTooLongAbortsTheGroup) {
  run_backends(1, [&](Rank& own) {
    std::vector<float> data(2, 1.0F);
    auto call = make_call(Operation::kAllReduce, kF32);
    call->sends = {part_of(data)};
    call->text = {"all_reduce #1"};
    call->done = [](std::exception_ptr) {};
    own.backend->start(call);
    own.queues->waiting().at(0).expired(1.5);
    EXPECT_EQ(mock.calls("ncclCommAbort"), 1);
    own.queues->waiting().clear();
    const std::string message = message_of<DistributedError>([&] { own.carry_out(call); });
    EXPECT_TRUE(contains(message, "all_reduce #1 waited 1.5 s on the GPU")) << message;
  });
}

TEST_F(NcclGroups, ARankFormsAGroupOfTheSameNameAgainWithAnIdOfItsOwn) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int round = 0; round < 3; ++round) {
        Rank own;
        own.queues = std::make_shared<MockQueues>(mock);
        own.backend = make_backend(mock.library, store, "world", rank, 2, own.queues, {});
        own.carry_out(make_call(Operation::kBarrier, kU8));
        EXPECT_EQ(own.backend->shutdown(std::chrono::seconds(1)), "");
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(mock.calls("ncclGetUniqueId"), 3);
}

TEST(NcclBackend, NeedsAGpuAndSaysSo) {
  const auto store = std::make_shared<MemoryStore>();
  const std::string cpu = message_of<DeviceError>([&] { make_nccl_backend(store, 0, 1, kCpu); });
  EXPECT_TRUE(contains(cpu, "need a GPU for each rank; given cpu")) << cpu;
  const std::string far =
      message_of<DeviceError>([&] { make_nccl_backend(store, 0, 1, cuda(99)); });
  EXPECT_TRUE(contains(far, "nccl: ")) << far;
  EXPECT_THROW(ProcessGroup({.device = cuda(99)}), DeviceError);
}

}  // namespace
}  // namespace tessera::distributed::nccl::test_nccl
