// What the ranks tell each other at the end of a backward, in one small reduction.
//
// [Note: fingerprint] NCCL does not compare what ranks call, and may carry out calls that differ. A
// hash of the calls so far (Backend::fingerprint) and its complement travel behind the flags: their
// maximum is this rank's own on all ranks only where all hashes are equal.
//
// [Note: failed backward] A backward that throws on one rank would leave the others waiting for
// what it has not sent. That rank brings the reduction to its end with zeros, and a byte behind the
// flags tells the others of it: then all say what they have thrown, and the backward of each throws
// with the name of the rank and its words.
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
  // Before wait() where something else has failed: the ranks hear of that.
  ~PassAgreement() { work_.forget(); }
  PassAgreement(const PassAgreement&) = delete;
  PassAgreement& operator=(const PassAgreement&) = delete;
  // Of one message.
  static int64_t bytes(Group& ranks, int64_t flags);

  std::span<uint8_t> flags() const;
  // `failed`: this rank's backward, with `failure`. The flags must not be touched until wait().
  void issue(bool failed, const std::string& failure, std::string_view tag);
  // The flags are then the largest of any rank. DistributedError on every rank where one has failed
  // or has called something else.
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
