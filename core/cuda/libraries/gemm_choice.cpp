#include <tessera/core/cuda/libraries/gemm_choice.h>

#include <algorithm>
#include <bit>
#include <cstddef>

#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

// Tries them in turn; kDone where one took the product, else the last refusal that says more than
// that there is no such product.
GemmAnswer run_first(const std::vector<std::string>& algorithms, GemmCalls& calls) {
  GemmAnswer refusal = GemmAnswer::kNotSupported;
  for (const std::string& algorithm : algorithms) {
    const GemmAnswer answer = calls.run(algorithm);
    if (answer == GemmAnswer::kDone) return answer;
    if (answer == GemmAnswer::kFailed) calls.fail("the product");
    if (answer == GemmAnswer::kInvalid) refusal = answer;
  }
  return refusal;
}

}  // namespace

GemmAnswer gemm_answer(int status) {
  constexpr int kSuccess = 0, kInvalidValue = 7, kArchMismatch = 8, kNoSupport = 15;
  switch (status) {
    case kSuccess:
      return GemmAnswer::kDone;
    case kNoSupport:
    case kArchMismatch:  // the device has no such product
      return GemmAnswer::kNotSupported;
    case kInvalidValue:
      return GemmAnswer::kInvalid;
    default:
      return GemmAnswer::kFailed;
  }
}

void settle(GemmChoice& choice, const GemmKnowledge& knowledge, GemmCalls& calls) {
  if (choice.settled) return;
  ++choice.calls;
  const bool due = std::has_single_bit(static_cast<uint64_t>(choice.calls));
  if (!choice.algorithms.empty() && !due) return;
  if (const auto known = knowledge.find(); known && calls.allows(known->bytes)) {
    choice.algorithms = {known->bytes};
    choice.settled = true;
    return;
  }
  std::vector<std::string> found;
  const bool measures = knowledge.keep != nullptr;
  const GemmAnswer answer =
      calls.suggest(true, measures ? kMeasuredCandidates : kTriedCandidates, found);
  if (answer != GemmAnswer::kDone && answer != GemmAnswer::kNotSupported) {
    calls.fail("the choice of an algorithm");
  }
  choice.algorithms = std::move(found);
  choice.settled = !measures || choice.algorithms.empty();
  if (choice.settled) return;
  std::optional<FastestCandidate> fastest;
  try {
    fastest = calls.measure(choice.algorithms);
  } catch (const OutOfMemory&) {
    return;  // there may be memory later; a training that fits goes on
  }
  if (!fastest) return;
  const auto best = choice.algorithms.begin() + static_cast<std::ptrdiff_t>(fastest->index);
  std::rotate(choice.algorithms.begin(), best, best + 1);
  choice.settled = true;
  knowledge.keep({choice.algorithms.front(), fastest->microseconds});
}

bool run_chosen(GemmChoice& choice, const GemmKnowledge& knowledge, GemmCalls& calls) {
  settle(choice, knowledge, calls);
  if (!choice.is_served()) return false;
  GemmAnswer refusal = run_first(choice.algorithms, calls);
  if (refusal == GemmAnswer::kDone) return true;
  // Those of the key do not take this size: the library may have others for it.
  std::vector<std::string> own;
  const GemmAnswer answer = calls.suggest(false, kTriedCandidates, own);
  if (answer != GemmAnswer::kDone && answer != GemmAnswer::kNotSupported) {
    calls.fail("the choice of an algorithm");
  }
  const GemmAnswer last = run_first(own, calls);
  if (last == GemmAnswer::kDone) return true;
  if (refusal == GemmAnswer::kInvalid || last == GemmAnswer::kInvalid) calls.fail("the product");
  return false;
}

}  // namespace tessera::gpu
