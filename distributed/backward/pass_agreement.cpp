#include <tessera/distributed/backward/pass_agreement.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

std::optional<uint64_t> fingerprint_of(Group& ranks) {
  return ranks.size() > 1 ? ranks.backend().fingerprint() : std::nullopt;
}

}  // namespace

int64_t PassAgreement::bytes(Group& ranks, int64_t flags) {
  const int64_t fingerprint = fingerprint_of(ranks) ? 2 * sizeof(uint64_t) : 0;
  return flags + 1 + fingerprint;
}

PassAgreement::PassAgreement(Group& ranks, int64_t flags)
    : ranks_(&ranks), count_(flags), message_(raw::zeros({bytes(ranks, flags)}, kU8)) {}

std::span<uint8_t> PassAgreement::flags() const {
  return {message_.data_as<uint8_t>(), static_cast<size_t>(count_)};
}

std::span<uint8_t> PassAgreement::fingerprint() const {
  return {message_.data_as<uint8_t>() + count_ + 1,
          static_cast<size_t>(message_.numel() - count_ - 1)};
}

void PassAgreement::issue(bool failed, const std::string& failure, std::string_view tag) {
  message_.data_as<uint8_t>()[count_] = failed ? 1 : 0;
  if (failed) failure_ = failure;
  const uint64_t calls = fingerprint_of(*ranks_).value_or(0);
  calls_[0] = calls;
  calls_[1] = ~calls;
  const std::span<uint8_t> bytes = fingerprint();
  std::memcpy(bytes.data(), calls_, bytes.size());
  work_ = ranks_->all_reduce(message_, ReduceOp::kMax, {.channel = Channel::kControl, .tag = tag});
}

void PassAgreement::wait() const {
  work_.wait();
  const std::span<uint8_t> bytes = fingerprint();
  TS_CHECK_AS(DistributedError, std::memcmp(bytes.data(), calls_, bytes.size()) == 0, "replicate",
              "all ranks must call the same collectives of GPUs in the same order; on '",
              ranks_->name(),
              "' they have not up to the end of this backward; compare calls before "
              "data moves (BackendOptions::compare_calls) to see which");
  if (message_.data_as<uint8_t>()[count_] != 0) raise_failure();
}

// see [Note: failed backward]
void PassAgreement::raise_failure() const {
  const nlohmann::json own = failure_ ? nlohmann::json(*failure_) : nlohmann::json();
  std::string text;
  int rank = 0;
  for (const nlohmann::json& said :
       all_gather_objects(*ranks_, own, {.channel = Channel::kControl, .tag = "failed backward"})) {
    if (!said.is_null()) {
      text += text.empty() ? tessera::detail::concatenate(
                                 "rank ", rank, " of '", ranks_->name(),
                                 "' has thrown in its backward, and the gradients of all are "
                                 "incomplete: ")
                           : tessera::detail::concatenate("; rank ", rank, ": ");
      text += said.get<std::string>();
    }
    ++rank;
  }
  TS_THROW(DistributedError, "backward", text);
}

}  // namespace tessera::distributed
