#include <tessera/accelerate/batch_size.h>

#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::detail {

using Json = nlohmann::json;

int64_t search_batch_size(const ProcessControl& ranks, int64_t start,
                          const std::function<void(int64_t)>& attempt,
                          const BatchSizeOptions& options) {
  constexpr std::string_view kWhere = "find_executable_batch_size";
  TS_CHECK(start >= 1, kWhere, "the first batch size must be at least 1; got ", start);
  for (int64_t size = start;;) {
    Json status;  // null: it fitted
    try {
      attempt(size);
    } catch (const OutOfMemory& exception) {
      status = exception.what();
    } catch (const std::bad_alloc& exception) {
      status = exception.what();
    }
    const std::vector<Json> all = distributed::all_gather_objects(
        ranks.world(), status, {.channel = distributed::Channel::kControl, .tag = "batch_size"});
    std::string reason;
    for (size_t rank = 0; rank < all.size() && reason.empty(); ++rank) {
      if (!all[rank].is_null()) {
        reason = concatenate("rank ", rank, ": ", all[rank].get<std::string>());
      }
    }
    if (reason.empty()) return size;
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
