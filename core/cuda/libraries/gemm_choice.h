// Which algorithm of the library runs a product, and what is remembered of its answers: decisions
// without the library. native_gemm.cpp makes the calls, tests give answers of their own.
//
// One choice serves all products of one key (gemm.h, key_of): the library is asked for the rounded
// sizes, so that the answer does not depend on which size came first, and the products run with
// their own. An algorithm that refuses one of them leaves it to the next.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/cuda/libraries/gemm_table.h>

namespace tessera::gpu {

enum class GemmAnswer : uint8_t {
  kDone,
  kNotSupported,  // there is no such product: the only refusal that is remembered
  kInvalid,       // not with this algorithm; another may take it
  kFailed,        // memory that was short, a driver: says nothing of the product
};
// For a cublasStatus_t.
GemmAnswer gemm_answer(int status);

// The library, for one product.
class GemmCalls {
 public:
  GemmCalls() = default;
  GemmCalls(const GemmCalls&) = delete;
  GemmCalls& operator=(const GemmCalls&) = delete;
  virtual ~GemmCalls() = default;

  // At most `most` algorithms, best first: for the sizes of the key, or those of the product.
  virtual GemmAnswer suggest(bool of_key, int most, std::vector<std::string>& algorithms) = 0;
  // Whether an algorithm of a table may be used at all.
  virtual bool allows(const std::string& algorithm) = 0;
  // Which one is fastest; nothing where none of them runs. Throws OutOfMemory.
  virtual std::optional<FastestCandidate> measure(const std::vector<std::string>& algorithms) = 0;
  // Queues the product.
  virtual GemmAnswer run(const std::string& algorithm) = 0;
  // Throws what the library's last answer was.
  [[noreturn]] virtual void fail(const char* what) = 0;
};

// What is known of algorithms beforehand, and where the fastest one is kept.
struct GemmKnowledge {
  std::function<std::optional<GemmAlgorithm>()> find = [] { return std::nullopt; };
  // Takes the winner of a measurement; without it nothing is measured.
  std::function<void(const GemmAlgorithm&)> keep = {};
};

inline constexpr int kMeasuredCandidates = 16, kTriedCandidates = 8;

struct GemmChoice {
  std::vector<std::string> algorithms = {};  // best first
  bool settled = false;  // nothing is asked again; no algorithms: the library has none
  int64_t calls = 0;     // while it was not

  bool is_served() const { return !settled || !algorithms.empty(); }
};

// Asks the library where nothing is known yet, and measures where the knowledge wants it. Where
// there is no memory to measure with, or no candidate runs, the library's order stands and is not
// settled: the 2nd, 4th, 8th... call tries again. Throws what fail() throws where the library had
// no answer; then nothing is remembered.
void settle(GemmChoice& choice, const GemmKnowledge& knowledge, GemmCalls& calls);

// The same, then queues the product and says true; false where the library has no algorithm for it.
bool run_chosen(GemmChoice& choice, const GemmKnowledge& knowledge, GemmCalls& calls);

}  // namespace tessera::gpu
