// The largest batch size that fits into memory, found by trying.
//
//     auto result = find_executable_batch_size(accelerator, 128, [&](int64_t batch_size) {
//       Gpt model(config);                       // made anew in every try
//       data::DataLoader loader(dataset, {.batch_size = batch_size});
//       ...
//       return train(model, loader);
//     });
//
// Sizes go down by a tenth: 128 115 103 92 82 ... An attempt fails if any rank throws OutOfMemory
// or std::bad_alloc; all ranks then try the next size together. Any other exception ends the search
// on its rank, and the failure of that rank ends it on the others.
//
// Ranks agree when their bodies have ended. A rank that runs out of memory while others are in a
// collective ends the collective for all: they see a DistributedError, which their bodies must let
// pass, and all try the next size together. Objects that a body makes are destroyed with it; with
// an Accelerator it begins with free_memory().
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <tessera/accelerate/process/process_control.h>
#include <tessera/core/source_location.h>

namespace tessera {

struct BatchSizeOptions {
  // The next size to try, smaller than `size`. Default: size * 9 / 10.
  std::function<int64_t(int64_t size)> next = {};
  // Called on the main rank when an attempt has failed.
  std::function<void(int64_t size, const std::string& reason)> on_failure = {};
};

namespace detail {
// Calls attempt(size) until one succeeds on every rank; that size.
int64_t search_batch_size(const ProcessControl& ranks, int64_t start,
                          const std::function<void(int64_t)>& attempt,
                          const BatchSizeOptions& options, const SourceLocation& where);
}  // namespace detail

// Returns the body's result at the first size that succeeded. Collective. ValueError for a start
// below 1 or a `next` that is not smaller, OutOfMemory if no size is left.
template <std::invocable<int64_t> Body>
auto find_executable_batch_size(const ProcessControl& ranks, int64_t start, Body&& body,
                                const BatchSizeOptions& options = {},
                                const SourceLocation& where = SourceLocation::current()) {
  using Result = std::invoke_result_t<Body, int64_t>;
  if constexpr (std::is_void_v<Result>) {
    detail::search_batch_size(ranks, start, body, options, where);
  } else {
    std::optional<Result> result;
    detail::search_batch_size(
        ranks, start,
        [&](int64_t size) {
          result.reset();
          result.emplace(body(size));
        },
        options, where);
    return std::move(*result);
  }
}

}  // namespace tessera
