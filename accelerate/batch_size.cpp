#include <tessera/accelerate/batch_size.h>

#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::detail {

using Json = nlohmann::json;

namespace {

// What came of one try on one rank.
struct Outcome {
  Json out_of_memory;          // what was said; null: nothing ran out
  std::exception_ptr failure;  // of a collective in the body: another rank has left it
  bool failed() const { return failure != nullptr || !out_of_memory.is_null(); }
  std::string said(int rank) const {
    return concatenate("rank ", rank, " has left the try of a batch size",
                       out_of_memory.is_null() ? "" : ": " + out_of_memory.get<std::string>());
  }
};

Outcome outcome_of(const std::function<void(int64_t)>& attempt, int64_t size) {
  Outcome outcome;
  try {
    attempt(size);
  } catch (const OutOfMemory& exception) {
    outcome.out_of_memory = exception.what();
  } catch (const std::bad_alloc& exception) {
    outcome.out_of_memory = exception.what();
  } catch (const DistributedError&) {
    outcome.failure = std::current_exception();
  }
  return outcome;
}

// The outcomes of all ranks. A rank that has left its body early meets the others in the midst of
// theirs: then all are told that they call different things, leave as well, and meet here. What
// nobody has waited for yet raises here too.
std::vector<Json> agree(distributed::Group& ranks, const Outcome& own,
                        const SourceLocation& where) {
  constexpr int kMeetings = 4;
  for (int meeting = 1;; ++meeting) {
    try {
      return distributed::all_gather_objects(
          ranks, own.out_of_memory,
          {.channel = distributed::Channel::kControl, .tag = "batch_size", .where = where});
    } catch (const DistributedError&) {
      if (meeting < kMeetings) continue;
      if (own.failure) std::rethrow_exception(own.failure);
      throw;
    }
  }
}

}  // namespace

int64_t search_batch_size(const ProcessControl& ranks, int64_t start,
                          const std::function<void(int64_t)>& attempt,
                          const BatchSizeOptions& options, const SourceLocation& where) {
  constexpr std::string_view kWhere = "find_executable_batch_size";
  TS_CHECK(start >= 1, kWhere, "the first batch size must be at least 1; got ", start);
  for (int64_t size = start;;) {
    const Outcome own = outcome_of(attempt, size);
    const auto groups = distributed::groups_of_rank();
    if (own.failed()) {  // the others may wait where this rank will not come to
      distributed::tell_groups(ranks.world(), groups, own.said(ranks.process_index()));
    }
    const std::vector<Json> all = agree(ranks.world(), own, where);
    std::string reason;
    for (size_t rank = 0; rank < all.size() && reason.empty(); ++rank) {
      if (!all[rank].is_null()) {
        reason = concatenate("rank ", rank, ": ", all[rank].get<std::string>());
      }
    }
    // Memory is not why the ranks parted.
    if (reason.empty() && own.failure) std::rethrow_exception(own.failure);
    if (reason.empty()) return size;
    distributed::resume_calls(ranks.world(), groups);
    if (options.on_failure && ranks.is_main_process()) options.on_failure(size, reason);
    const int64_t next = options.next ? options.next(size) : size * 9 / 10;
    TS_CHECK(next < size, kWhere, "the next batch size must be smaller; after ", size, " came ",
             next);
    TS_CHECK_AS(OutOfMemory, next >= 1, kWhere, "no batch size fits into memory, not even ", size,
                " (", reason, "); take a smaller model or more ranks");
    size = next;
  }
}

}  // namespace tessera::detail
