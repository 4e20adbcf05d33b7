// The ranks' agreement at the end of a backward, by one small reduction.
//
// [Note: fingerprint] NCCL does not compare the ranks' calls, and may run calls that differ. A hash
// of the calls so far (Backend::fingerprint) and its complement are sent after the flags: their
// maximum is this rank's own on all ranks only if all hashes are equal.
//
// [Note: failed backward] A backward that throws on one rank would leave the others waiting for its
// calls. That rank completes the reduction with zeros, and a byte after the flags tells the others:
// then all exchange their errors, and the backward of each throws with the name and the error of
// the failed rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

class PassAgreement {
 public:
  // `flags`: their number, the same on all ranks; 0 at first.
  PassAgreement(Group& ranks, int64_t flags);
  // Called before wait() if something else has failed: reports it to the ranks.
  ~PassAgreement() { work_.forget(); }
  PassAgreement(const PassAgreement&) = delete;
  PassAgreement& operator=(const PassAgreement&) = delete;
  // The traffic of one message.
  static int64_t bytes(Group& ranks, int64_t flags);

  std::span<uint8_t> flags() const;
  // `failed`: this rank's backward, with `failure`. The flags must not be touched until wait().
  void issue(bool failed, const std::string& failure, std::string_view tag);
  // The flags are then the maximum over the ranks. DistributedError on every rank if one has failed
  // or its calls differ.
  void wait() const;

 private:
  std::span<uint8_t> fingerprint() const;  // behind the flags and the failure
  [[noreturn]] void raise_failure() const;

  Group* ranks_;
  int64_t count_;
  Tensor message_;
  uint64_t calls_[2] = {};  // as they were issued
  std::optional<std::string> failure_;
  Work work_;
};

}  // namespace tessera::distributed
