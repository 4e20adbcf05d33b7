#include <tessera/distributed/transport/mpi/collectives.h>

#include <algorithm>
#include <cstring>

#include <tessera/distributed/transport/deterministic.h>

namespace tessera::distributed::mpi {
namespace {

template <class Post>
void for_each_message(const Ranks& ranks, Part part, Post post) {
  for (int64_t begin = 0; begin < part.bytes; begin += ranks.message_limit) {
    post(part.data + begin, static_cast<int>(std::min(ranks.message_limit, part.bytes - begin)));
  }
}

// Bytes [begin, begin + step) of a piece, as far as it goes.
Part slice(Part piece, int64_t begin, int64_t step) {
  if (begin >= piece.bytes) return {};
  return {piece.data + begin, std::min(step, piece.bytes - begin)};
}

// How much of a piece a step takes: whole elements.
int64_t step_of(const Ranks& ranks, const Reduction& reduction) {
  const int64_t element_size = size_of(reduction.dtype);
  return std::max<int64_t>(1, ranks.chunk_bytes / ranks.size / element_size) * element_size;
}

}  // namespace

void start_send(const Ranks& ranks, int peer, int tag, Part part, Requests* requests) {
  for_each_message(ranks, part, [&](char* data, int bytes) {
    check(MPI_Isend(data, bytes, MPI_BYTE, peer, tag, ranks.communicator, requests->add()),
          "MPI_Isend");
  });
}

void start_receive(const Ranks& ranks, int peer, int tag, Part part, Requests* requests) {
  for_each_message(ranks, part, [&](char* data, int bytes) {
    check(MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, ranks.communicator, requests->add()),
          "MPI_Irecv");
  });
}

void start_receives(const Ranks& ranks, int tag, std::span<const Part> receives,
                    Requests* requests) {
  for (int distance = 1; distance < ranks.size; ++distance) {
    const int from = (ranks.rank + ranks.size - distance) % ranks.size;
    start_receive(ranks, from, tag, receives[static_cast<size_t>(from)], requests);
  }
}

void start_sends(const Ranks& ranks, int tag, std::span<const Part> sends, Requests* requests) {
  for (int distance = 1; distance < ranks.size; ++distance) {
    const int to = (ranks.rank + distance) % ranks.size;
    start_send(ranks, to, tag, sends[static_cast<size_t>(to)], requests);
  }
}

void start_exchange(const Ranks& ranks, int tag, std::span<const Part> sends,
                    std::span<const Part> receives, Requests* requests) {
  start_receives(ranks, tag, receives, requests);
  start_sends(ranks, tag, sends, requests);
  const Part& from = sends[static_cast<size_t>(ranks.rank)];
  const Part& to = receives[static_cast<size_t>(ranks.rank)];
  if (from.bytes > 0 && from.data != to.data) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes));
  }
}

void start_broadcast(const Ranks& ranks, int root, Part part, Requests* requests) {
  for_each_message(ranks, part, [&](char* data, int bytes) {
    check(MPI_Ibcast(data, bytes, MPI_BYTE, root, ranks.communicator, requests->add()),
          "MPI_Ibcast");
  });
}

void begin_reduction(const Ranks& ranks, Reduction* reduction, std::span<int64_t> bytes) {
  const int64_t step = step_of(ranks, *reduction);
  for (int distance = 1; distance < ranks.size; ++distance) {
    const auto to = static_cast<size_t>((ranks.rank + distance) % ranks.size);
    const Part first = slice(reduction->pieces[to], 0, step);
    start_send(ranks, static_cast<int>(to), kPayloadTag, first, &reduction->sent);
    bytes[to] = first.bytes;
  }
  reduction->begun = true;
}

// [Note: pipeline] All pieces advance together in steps. While the contributions of step k + 1
// travel into one scratch buffer, those of step k are summed from the other while they are still in
// the cache, and the results of step k - 1 travel on. A step's results overwrite this rank's own
// contributions, so that they are received when those have been sent; the rank's own piece, which
// it sends to nobody, is summed before.
Task reduce_in_rank_order(std::shared_ptr<Ranks> ranks, Reduction reduction) {
  const auto size = static_cast<size_t>(ranks->size), self = static_cast<size_t>(ranks->rank);
  const int64_t element_size = size_of(reduction.dtype), step = step_of(*ranks, reduction);
  const Part own = reduction.pieces[self];
  const bool in_place = reduction.delivery != Delivery::kOwner;
  const Part output{in_place ? own.data : reduction.output, own.bytes};
  int64_t longest = 0;
  for (const Part& piece : reduction.pieces) longest = std::max(longest, piece.bytes);

  std::array<Requests, 2> sent, received, results;
  std::vector<Part> sends(size), receives(size);
  const size_t first = reduction.onto ? 1 : 0;  // of the contributions among the operands
  std::vector<const void*> operands(first + size);

  auto start_contributions = [&](int64_t begin, size_t slot) {
    const int64_t bytes = slice(own, begin, step).bytes;
    std::vector<char>& scratch = ranks->scratch[slot];
    if (scratch.size() < size * static_cast<size_t>(bytes)) {
      scratch.resize(size * static_cast<size_t>(bytes));
    }
    for (size_t r = 0; r < size; ++r) {
      sends[r] = reduction.begun && begin == 0 ? Part{} : slice(reduction.pieces[r], begin, step);
      receives[r] = {scratch.data() + static_cast<int64_t>(r) * bytes, bytes};
    }
    start_receives(*ranks, kPayloadTag, receives, &received[slot]);
    start_sends(*ranks, kPayloadTag, sends, &sent[slot]);
  };
  auto sum = [&](int64_t begin, size_t slot) {
    const Part part = slice(own, begin, step);
    if (part.bytes == 0) return;
    char* const out = slice(output, begin, step).data;
    operands[0] = out;  // stays the first one where the sum goes on from it
    for (size_t r = 0; r < size; ++r) {
      operands[first + r] = ranks->scratch[slot].data() + static_cast<int64_t>(r) * part.bytes;
    }
    operands[first + self] = part.data;
    reduce_contributions(operands, out, part.bytes / element_size, reduction.dtype, reduction.op);
  };
  auto send_results = [&](int64_t begin, size_t slot) {
    for (size_t r = 0; r < size; ++r) {
      const bool send =
          reduction.delivery == Delivery::kAll || static_cast<int>(r) == reduction.root;
      sends[r] = send ? slice(output, begin, step) : Part{};
    }
    start_sends(*ranks, kResultTag, sends, &results[slot]);
  };
  auto receive_results = [&](int64_t begin, size_t slot) {
    const bool receive = reduction.delivery == Delivery::kAll || ranks->rank == reduction.root;
    for (size_t r = 0; r < size; ++r) {
      receives[r] = receive ? slice(reduction.pieces[r], begin, step) : Part{};
    }
    start_receives(*ranks, kResultTag, receives, &results[slot]);
  };

  size_t slot = 0;
  sent[slot] = std::move(reduction.sent);
  if (longest > 0) start_contributions(0, slot);
  for (int64_t begin = 0; begin < longest; begin += step, slot ^= 1) {
    if (begin + step < longest) {
      co_await sent[slot ^ 1];
      start_contributions(begin + step, slot ^ 1);
    }
    co_await received[slot];
    sum(begin, slot);
    if (!in_place) continue;
    co_await results[slot];
    send_results(begin, slot);
    co_await sent[slot];
    receive_results(begin, slot);
  }
  co_await sent[0];
  co_await sent[1];
  co_await results[0];
  co_await results[1];
}

}  // namespace tessera::distributed::mpi
