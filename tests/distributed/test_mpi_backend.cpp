// The mpi backend under its groups: bytes and bits of every collective, mismatches, overlap, groups
// in opposite order. test_mpi_groups compares it with the thread backend.
// ctest ranks: 2 4 8
// ctest own program: MPI is begun for all of its tests
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/half.h>
#include <tessera/distributed/transport/backend.h>
#include <tessera/distributed/transport/deterministic.h>

#include "distributed/mpi_world.h"

namespace tessera::distributed::test_mpi_backend {
namespace {

[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new MpiWorld);

using Bytes = std::vector<char>;

// A call whose end can be awaited.
class Pending {
 public:
  explicit Pending(Operation operation, Channel channel = Channel::kUser) {
    call->header.operation = operation;
    call->channel = channel;
    call->done = [state = state_](std::exception_ptr error) {
      std::lock_guard lock(state->mutex);
      EXPECT_FALSE(state->done) << "done was called twice";
      state->done = true;
      state->error = std::move(error);
      state->changed.notify_all();
    };
  }
  Pending& start(Backend& backend, int64_t sequence) {
    call->header.sequence = sequence;
    const std::string text = detail::concatenate(name_of(call->header.operation), " #", sequence,
                                                 " by rank ", backend.rank());
    std::copy(text.begin(), text.end(), call->text.begin());
    backend.start(call);
    return *this;
  }
  bool done() const {
    std::lock_guard lock(state_->mutex);
    return state_->done;
  }
  bool wait_for(double seconds) const {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                    [&] { return state_->done; });
  }
  void wait() const {
    if (!wait_for(30)) throw DistributedError("test: a call did not end within 30 s");
    if (state_->error) std::rethrow_exception(state_->error);
  }

  CallPtr call = std::make_shared<Call>();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class MpiBackend : public testing::Test {
 protected:
  void SetUp() override {
    TS_SKIP_WITHOUT_MPI();
    world = MpiWorld::backend();
    rank = world->rank();
    size = world->size();
  }
  // All tests of the program number their calls on: ranks that have lost step are found out.
  int64_t next() {
    static int64_t sequence = 0;
    return ++sequence;
  }
  // All ranks come here; nothing happens on the other channels.
  void meet() { Pending(Operation::kBarrier, Channel::kControl).start(*world, next()).wait(); }

  std::shared_ptr<Backend> world;
  int rank = 0, size = 1;
};

// The same on all ranks; `rank` says whose.
Bytes contribution(int rank, int64_t count, DType dtype, int seed = 0) {
  Bytes bytes(static_cast<size_t>(count * size_of(dtype)));
  auto state = static_cast<uint32_t>(rank * 7919 + seed * 104729 + 1);
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    const float value = static_cast<float>(static_cast<int>(state >> 16) - 32768) / 8192.0F;
    char* to = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto element) { std::memcpy(to, &element, sizeof element); };
    switch (dtype) {
      case kF64:
        put(static_cast<double>(value));
        break;
      case kF32:
        put(value);
        break;
      case kF16:
        put(f16(value));
        break;
      case kBF16:
        put(bf16(value));
        break;
      case kI64:
        put(static_cast<int64_t>(value * 1000));
        break;
      case kI32:
        put(static_cast<int32_t>(value * 1000));
        break;
      default:
        put(static_cast<uint8_t>(state >> 24));
        break;
    }
  }
  return bytes;
}

Bytes expected_reduction(int size, int64_t count, DType dtype, ReduceOp op, int seed) {
  std::vector<Bytes> all;
  std::vector<const void*> inputs;
  for (int r = 0; r < size; ++r) all.push_back(contribution(r, count, dtype, seed));
  for (const Bytes& bytes : all) inputs.push_back(bytes.data());
  Bytes result(all[0].size());
  reduce_contributions(inputs, result.data(), count, dtype, op);
  return result;
}

std::vector<Part> cut(Bytes& bytes, int size, DType dtype) {
  const int64_t count = static_cast<int64_t>(bytes.size()) / size_of(dtype);
  std::vector<Part> parts;
  for (int r = 0; r < size; ++r) {
    const int64_t begin = count * r / size, end = count * (r + 1) / size;
    parts.push_back({bytes.data() + begin * size_of(dtype), (end - begin) * size_of(dtype)});
  }
  return parts;
}

constexpr DType kReducible[] = {kF64, kF32, kF16, kBF16, kI64, kI32, kU8};
constexpr int64_t kCounts[] = {0, 1, 2, 5, 1000, 40001};

TEST_F(MpiBackend, ReductionsHaveTheBitsOfRankOrder) {
  int seed = 0;
  for (const DType dtype : kReducible) {
    for (const int64_t count : kCounts) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
        if (op == ReduceOp::kMean && !is_floating(dtype)) continue;
        SCOPED_TRACE(testing::Message() << name_of(op) << " of " << count << " elements, dtype "
                                        << static_cast<int>(dtype));
        ++seed;
        const Bytes expected = expected_reduction(size, count, dtype, op, seed);

        Bytes mine = contribution(rank, count, dtype, seed);
        Pending all_reduce(Operation::kAllReduce);
        all_reduce.call->sends = cut(mine, size, dtype);
        all_reduce.call->header.dtype = dtype;
        all_reduce.call->header.reduce = op;
        all_reduce.call->header.count = count;
        all_reduce.start(*world, next()).wait();
        ASSERT_EQ(mine, expected);

        const int root = seed % size;
        mine = contribution(rank, count, dtype, seed);
        Pending reduce(Operation::kReduce);
        reduce.call->sends = cut(mine, size, dtype);
        reduce.call->header.dtype = dtype;
        reduce.call->header.reduce = op;
        reduce.call->header.root = root;
        reduce.start(*world, next()).wait();
        if (rank == root) {
          ASSERT_EQ(mine, expected);
        }

        mine = contribution(rank, count, dtype, seed);
        const std::vector<Part> pieces = cut(mine, size, dtype);
        const auto self = static_cast<size_t>(rank);
        Bytes piece(static_cast<size_t>(pieces[self].bytes));
        Pending reduce_scatter(Operation::kReduceScatter);
        reduce_scatter.call->sends = pieces;
        reduce_scatter.call->receives.resize(static_cast<size_t>(size));
        reduce_scatter.call->receives[self] = {piece.data(), pieces[self].bytes};
        reduce_scatter.call->header.dtype = dtype;
        reduce_scatter.call->header.reduce = op;
        reduce_scatter.start(*world, next()).wait();
        const auto offset = pieces[self].data - mine.data();
        ASSERT_TRUE(std::equal(piece.begin(), piece.end(), expected.begin() + offset));
        ASSERT_EQ(mine, contribution(rank, count, dtype, seed)) << "the input has changed";

        Pending in_place(Operation::kReduceScatter);
        in_place.call->sends = pieces;
        in_place.call->receives.resize(static_cast<size_t>(size));
        in_place.call->receives[self] = pieces[self];
        in_place.call->header.dtype = dtype;
        in_place.call->header.reduce = op;
        in_place.start(*world, next()).wait();
        Bytes sum_in_input = contribution(rank, count, dtype, seed);
        std::copy(piece.begin(), piece.end(), sum_in_input.begin() + offset);
        ASSERT_EQ(mine, sum_in_input) << "in place";
      }
    }
  }
}

TEST_F(MpiBackend, SumsGoOnFromTheOutputInRankOrder) {
  int seed = 0;
  for (const DType dtype : kReducible) {
    for (const int64_t count : kCounts) {
      SCOPED_TRACE(testing::Message() << count << " elements, dtype " << static_cast<int>(dtype));
      ++seed;
      std::vector<Bytes> all{contribution(size, count, dtype, seed)};  // what outputs hold
      for (int r = 0; r < size; ++r) all.push_back(contribution(r, count, dtype, seed));
      std::vector<const void*> inputs;
      for (const Bytes& bytes : all) inputs.push_back(bytes.data());
      Bytes expected(all[0].size());
      reduce_contributions(inputs, expected.data(), count, dtype, ReduceOp::kSum);

      Bytes mine = contribution(rank, count, dtype, seed);
      const auto self = static_cast<size_t>(rank);
      const Part piece = cut(mine, size, dtype)[self];
      const auto offset = piece.data - mine.data();
      Bytes output(all[0].begin() + offset, all[0].begin() + offset + piece.bytes);
      Pending onto(Operation::kReduceScatter);
      onto.call->sends = cut(mine, size, dtype);
      onto.call->receives.resize(static_cast<size_t>(size));
      onto.call->receives[self] = {output.data(), piece.bytes};
      onto.call->header.dtype = dtype;
      onto.call->header.onto = true;
      onto.start(*world, next()).wait();
      ASSERT_TRUE(std::equal(output.begin(), output.end(), expected.begin() + offset));
      ASSERT_EQ(mine, contribution(rank, count, dtype, seed)) << "the input has changed";
    }
  }
}

TEST_F(MpiBackend, NativeReductionsAgreeWithinRounding) {
  for (const DType dtype : {kF32, kBF16, kF16, kI64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax}) {
      if (op == ReduceOp::kMean && !is_floating(dtype)) continue;
      for (const Operation operation :
           {Operation::kAllReduce, Operation::kReduce, Operation::kReduceScatter}) {
        const int64_t count = 1000 * size;
        const Bytes expected = expected_reduction(size, count, dtype, op, 5);
        Bytes mine = contribution(rank, count, dtype, 5);
        Bytes piece(mine.size() / static_cast<size_t>(size));
        Pending call(operation);
        call.call->sends = cut(mine, size, dtype);
        call.call->receives.resize(static_cast<size_t>(size));
        call.call->receives[static_cast<size_t>(rank)] = {piece.data(),
                                                          static_cast<int64_t>(piece.size())};
        call.call->header.dtype = dtype;
        call.call->header.reduce = op;
        call.call->header.root = operation == Operation::kReduce ? 1 : -1;
        call.call->header.mode = ReductionMode::kNative;
        call.start(*world, next()).wait();
        if (operation == Operation::kReduce && rank != 1) continue;
        const bool scattered = operation == Operation::kReduceScatter;
        const char* got = scattered ? piece.data() : mine.data();
        const char* wanted =
            expected.data() + (scattered ? piece.size() * static_cast<size_t>(rank) : 0);
        const int64_t compared = scattered ? 1000 : count;
        for (int64_t i = 0; i < compared; ++i) {
          double a = 0, b = 0, eps = 0;
          const auto read = [&]<class T>(T, double rounding) {
            T x, y;
            std::memcpy(&x, got + i * size_of(dtype), sizeof x);
            std::memcpy(&y, wanted + i * size_of(dtype), sizeof y);
            if constexpr (std::is_same_v<T, int64_t>) {
              a = static_cast<double>(x), b = static_cast<double>(y);
            } else {
              a = static_cast<float>(x), b = static_cast<float>(y);
            }
            eps = rounding;
          };
          if (dtype == kF32) read(float{}, 0x1p-24);
          if (dtype == kBF16) read(bf16{}, 0x1p-8);
          if (dtype == kF16) read(f16{}, 0x1p-11);
          if (dtype == kI64) read(int64_t{}, 0);
          // Each of size - 1 additions of numbers below 4 rounds once, at sums below 4 * size.
          ASSERT_NEAR(a, b, eps * 4 * size * size) << name_of(operation) << " " << name_of(op);
        }
      }
    }
  }
}

TEST_F(MpiBackend, BroadcastComesFromEveryRoot) {
  for (int root = 0; root < size; ++root) {
    for (const int64_t count : kCounts) {
      Bytes data = contribution(rank, count, kF32, root);
      Pending call(Operation::kBroadcast);
      call.call->sends.resize(static_cast<size_t>(size));
      call.call->receives.resize(static_cast<size_t>(size));
      auto& parts = rank == root ? call.call->sends : call.call->receives;
      parts[static_cast<size_t>(root)] = {data.data(), static_cast<int64_t>(data.size())};
      call.call->header.root = root;
      call.start(*world, next()).wait();
      ASSERT_EQ(data, contribution(root, count, kF32, root));
    }
  }
}

TEST_F(MpiBackend, PartsOfAnySizeGoWhereTheyBelong) {
  // From rank r to rank s: (r * 3 + s * 5) % 7 blocks of `unit` bytes, also none.
  for (const int64_t unit : {1, 40, 9000}) {
    const auto bytes_of = [&](int from, int to) { return (from * 3 + to * 5) % 7 * unit; };
    std::vector<Bytes> out, in;
    Pending call(Operation::kAllToAll);
    for (int r = 0; r < size; ++r) {
      out.push_back(contribution(rank * 100 + r, bytes_of(rank, r), kU8));
      in.emplace_back(static_cast<size_t>(bytes_of(r, rank)));
    }
    for (size_t r = 0; r < out.size(); ++r) {
      call.call->sends.push_back({out[r].data(), static_cast<int64_t>(out[r].size())});
      call.call->receives.push_back({in[r].data(), static_cast<int64_t>(in[r].size())});
    }
    call.start(*world, next()).wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(in[static_cast<size_t>(r)], contribution(r * 100 + rank, bytes_of(r, rank), kU8));
    }
  }
}

TEST_F(MpiBackend, AGatherWithItsOwnPartInPlaceMovesNothingTwice) {
  Bytes all(static_cast<size_t>(size) * 64);
  const Bytes mine = contribution(rank, 64, kU8);
  std::copy(mine.begin(), mine.end(), all.begin() + rank * 64);
  Pending call(Operation::kAllGather);
  for (int r = 0; r < size; ++r) {
    call.call->sends.push_back({all.data() + rank * 64, 64});
    call.call->receives.push_back({all.data() + r * 64, 64});
  }
  call.start(*world, next()).wait();
  for (int r = 0; r < size; ++r) {
    const Bytes theirs = contribution(r, 64, kU8);
    EXPECT_TRUE(std::equal(theirs.begin(), theirs.end(), all.begin() + r * 64));
  }
}

TEST_F(MpiBackend, ChannelsIssuedInOppositeOrderComplete) {
  Bytes first = contribution(rank, 5000, kF32, 1), second = contribution(rank, 5000, kF32, 2);
  Pending gradient(Operation::kAllReduce, Channel::kGradient);
  Pending parameter(Operation::kAllReduce, Channel::kParameter);
  for (auto [pending, data] : {std::pair{&gradient, &first}, std::pair{&parameter, &second}}) {
    pending->call->sends = cut(*data, size, kF32);
    pending->call->header.dtype = kF32;
  }
  const int64_t sequence = next();
  Pending& before = rank % 2 == 0 ? gradient : parameter;
  Pending& after = rank % 2 == 0 ? parameter : gradient;
  before.start(*world, sequence);
  meet();
  EXPECT_FALSE(before.done()) << "half of the ranks have not called it";
  meet();
  after.start(*world, sequence).wait();
  before.wait();
  EXPECT_EQ(first, expected_reduction(size, 5000, kF32, ReduceOp::kSum, 1));
  EXPECT_EQ(second, expected_reduction(size, 5000, kF32, ReduceOp::kSum, 2));
}

TEST_F(MpiBackend, ACallEndsWithoutAnyoneWaitingForIt) {
  Bytes data = contribution(rank, 1 << 18, kF32);
  Pending call(Operation::kAllReduce);
  call.call->sends = cut(data, size, kF32);
  call.call->header.dtype = kF32;
  call.start(*world, next());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  volatile double busy = 1;  // the thread that issued computes, and makes no calls
  while (!call.done() && std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 10000; ++i) busy = busy * 1.0000001;
  }
  ASSERT_TRUE(call.done());
  EXPECT_EQ(data, expected_reduction(size, 1 << 18, kF32, ReduceOp::kSum, 0));
}

TEST_F(MpiBackend, SeveralCallsOfAChannelKeepTheirOrder) {
  constexpr int kCalls = 20;
  std::vector<Bytes> data;
  std::vector<Pending> calls;
  for (int i = 0; i < kCalls; ++i) {
    data.push_back(contribution(rank, 100 + i, kF32, i));
    calls.emplace_back(Operation::kAllReduce);
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].call->sends = cut(data[i], size, kF32);
    calls[i].call->header.dtype = kF32;
    calls[i].start(*world, next());
  }
  calls.back().wait();
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_TRUE(calls[i].done());
    const int number = static_cast<int>(i);
    EXPECT_EQ(data[i], expected_reduction(size, 100 + number, kF32, ReduceOp::kSum, number));
  }
}

TEST_F(MpiBackend, SendAndReceiveMatchByTagWhateverTheirOrder) {
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  std::vector<Bytes> out, in;
  std::vector<Pending> calls;
  for (int tag = 0; tag < 4; ++tag) {
    out.push_back(contribution(rank, 30000 * tag, kF32, tag));
    in.emplace_back(out.back().size());
    calls.emplace_back(Operation::kSend, Channel::kPeer);
    calls.emplace_back(Operation::kRecv, Channel::kPeer);
  }
  for (int tag = 0; tag < 4; ++tag) {
    const auto i = static_cast<size_t>(tag);
    Call& send = *calls[2 * i].call;
    Call& receive = *calls[2 * i + 1].call;
    for (Call* call : {&send, &receive}) {
      call->tag = tag;
      call->header.dtype = kF32;
      call->header.count = 30000 * tag;
      call->sends.resize(static_cast<size_t>(size));
      call->receives.resize(static_cast<size_t>(size));
    }
    send.header.root = right;
    send.sends[static_cast<size_t>(right)] = {out[i].data(), static_cast<int64_t>(out[i].size())};
    receive.header.root = left;
    receive.receives[static_cast<size_t>(left)] = {in[i].data(),
                                                   static_cast<int64_t>(in[i].size())};
  }
  // All send first, which would block where a call waited for the one before; tags come backwards.
  for (size_t i = 0; i < 4; ++i) calls[2 * i].start(*world, 0);
  for (size_t i = 4; i-- > 0;) calls[2 * i + 1].start(*world, 0);
  for (Pending& call : calls) call.wait();
  for (int tag = 0; tag < 4; ++tag) {
    EXPECT_EQ(in[static_cast<size_t>(tag)], contribution(left, 30000 * tag, kF32, tag));
  }
}

TEST_F(MpiBackend, AReceiverOfSomethingElseTellsBothSidesAndTheNextMessageIsFound) {
  if (rank > 1) return;
  const int peer = 1 - rank;
  const auto transfer = [&](Operation operation, Bytes& data, DType dtype) {
    Pending call(operation, Channel::kPeer);
    call.call->header.root = peer;
    call.call->header.dtype = dtype;
    call.call->header.count = static_cast<int64_t>(data.size()) / size_of(dtype);
    call.call->sends.assign(static_cast<size_t>(size),
                            {data.data(), static_cast<int64_t>(data.size())});
    call.call->receives = call.call->sends;
    call.start(*world, 0).wait();
  };
  Bytes wrong = contribution(0, 60000, kF64), right = contribution(0, 8, kF32);
  if (rank == 0) {
    EXPECT_THROW(transfer(Operation::kSend, wrong, kF64), DistributedError);
    transfer(Operation::kSend, right, kF32);
    return;
  }
  Bytes data(32);
  try {
    transfer(Operation::kRecv, data, kF32);
    ADD_FAILURE() << "60000 numbers of f64 are not 8 of f32";
  } catch (const DistributedError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("send and recv do not match"), text.npos) << text;
  }
  transfer(Operation::kRecv, data, kF32);
  EXPECT_EQ(data, right);
}

TEST_F(MpiBackend, DifferentCallsRaiseOnEveryRankWithAllTextsAndTheGroupGoesOn) {
  // What a reduction sends before it knows of the others is dropped, long or short.
  for (const int64_t count : {16, 40000}) {
    for (int round = 0; round < 4; ++round) {  // operation, dtype, count, onto
      const bool other = rank == size - 1;
      const int64_t elements = other && round == 2 ? count / 2 : count;
      Bytes data = contribution(rank, elements, kF32);
      Pending call(other && round == 0 ? Operation::kBroadcast
                   : round == 3        ? Operation::kReduceScatter
                                       : Operation::kAllReduce);
      call.call->header.onto = !other && round == 3;
      call.call->sends = cut(data, size, kF32);
      call.call->receives = call.call->sends;
      call.call->header.dtype = other && round == 1 ? kF16 : kF32;
      call.call->header.count = elements;
      const int64_t sequence = next();
      call.start(*world, sequence);
      try {
        call.wait();
        ADD_FAILURE() << "the mismatch was not seen";
      } catch (const DistributedError& error) {
        const std::string text = error.what();
        for (int r = 0; r < size; ++r) {
          EXPECT_NE(text.find("by rank " + std::to_string(r)), text.npos) << text;
        }
      }
      EXPECT_EQ(data, contribution(rank, elements, kF32)) << "data has moved";
    }
    Bytes data = contribution(rank, count, kF32);
    Pending call(Operation::kAllReduce);
    call.call->sends = cut(data, size, kF32);
    call.call->header.dtype = kF32;
    call.call->header.count = count;
    call.start(*world, next()).wait();
    EXPECT_EQ(data, expected_reduction(size, count, kF32, ReduceOp::kSum, 0));
  }
}

TEST_F(MpiBackend, PositionsTellWhoHasCome) {
  // Rank 0 is late: the others see that it is one call behind.
  const int64_t sequence = next();
  Pending(Operation::kBarrier).start(*world, sequence).wait();
  Pending second(Operation::kBarrier);
  next();
  if (rank != 0) second.start(*world, sequence + 1);
  meet();
  const auto positions = world->positions(Channel::kUser);
  ASSERT_EQ(positions.size(), static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    const auto& position = positions[static_cast<size_t>(r)];
    ASSERT_TRUE(position.has_value());
    if (r == 0 || r == rank) {
      EXPECT_EQ(position->sequence, r == 0 ? sequence : sequence + 1);
    }
  }
  meet();
  if (rank == 0) second.start(*world, sequence + 1);
  second.wait();
}

TEST_F(MpiBackend, PartsOfAGroupWorkBesideIt) {
  // Even and odd ranks, each in reverse order; the last rank of more than two stays out.
  const bool out = size > 2 && rank == size - 1;
  std::vector<int> members;
  for (int r = size - 1; r >= 0; --r) {
    if (r % 2 == rank % 2 && !(size > 2 && r == size - 1)) members.push_back(r);
  }
  auto part = world->split(out ? -1 : rank % 2, members, "parity");
  ASSERT_EQ(part == nullptr, out);
  Bytes beside = contribution(rank, 3000, kF32, 3);
  Pending on_world(Operation::kAllReduce);
  on_world.call->sends = cut(beside, size, kF32);
  on_world.call->header.dtype = kF32;
  const int64_t sequence = next();
  if (!part) {
    on_world.start(*world, sequence).wait();
    return;
  }
  const auto count = static_cast<int64_t>(members.size());
  EXPECT_EQ(part->size(), static_cast<int>(count));
  EXPECT_EQ(members[static_cast<size_t>(part->rank())], rank);
  Bytes mine = contribution(rank, 100, kI64);
  Pending on_part(Operation::kAllGather);
  Bytes all(mine.size() * members.size());
  for (int64_t r = 0; r < count; ++r) {
    on_part.call->sends.push_back({mine.data(), 800});
    on_part.call->receives.push_back({all.data() + r * 800, 800});
  }
  // In opposite order on even and odd ranks.
  if (rank % 2 == 0) on_world.start(*world, sequence);
  on_part.start(*part, 1).wait();
  if (rank % 2 != 0) on_world.start(*world, sequence);
  on_world.wait();
  EXPECT_EQ(beside, expected_reduction(size, 3000, kF32, ReduceOp::kSum, 3));
  for (size_t r = 0; r < members.size(); ++r) {
    const Bytes theirs = contribution(members[r], 100, kI64);
    EXPECT_TRUE(
        std::equal(theirs.begin(), theirs.end(), all.begin() + static_cast<int64_t>(r) * 800));
  }
  EXPECT_EQ(part->shutdown(std::chrono::seconds(10)), "");
}

TEST_F(MpiBackend, AFailedGroupRefusesEverythingAndOthersLive) {
  std::vector<int> members;
  for (int r = 0; r < size; ++r) members.push_back(r);
  auto part = world->split(0, members, "doomed");
  part->fail(std::make_exception_ptr(DistributedError("rank 9 was killed by signal 9")));
  for (int repeat = 0; repeat < 2; ++repeat) {
    Pending call(Operation::kBarrier);
    call.start(*part, 1);
    try {
      call.wait();
      ADD_FAILURE() << "a failed group must not serve";
    } catch (const DistributedError& error) {
      EXPECT_STREQ(error.what(), "rank 9 was killed by signal 9");
    }
  }
  Pending(Operation::kBarrier).start(*world, next()).wait();
}

}  // namespace
}  // namespace tessera::distributed::test_mpi_backend
