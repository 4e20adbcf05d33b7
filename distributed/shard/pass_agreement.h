// What the ranks tell each other at the end of a backward, in one small reduction.
//
// [Note: fingerprint] NCCL does not compare what ranks call, and may carry out calls that differ. A
// hash of the calls so far (Backend::fingerprint) and its complement travel behind the flags: their
// maximum is this rank's own on all ranks only where all hashes are equal.
//
// [Note: failed backward] A backward that throws on one rank would leave the others waiting for
// what it has not sent. That rank brings the reduction to its end with zeros, and a byte behind the
// flags tells the others who it was: their backward throws too, at once.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <tessera/core/tensor.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

class PassAgreement {
 public:
  // `flags`: their number, the same on all ranks; 0 at first.
  PassAgreement(Group& ranks, int64_t flags);
  // Of one message.
  static int64_t bytes(Group& ranks, int64_t flags);

  std::span<uint8_t> flags() const;
  // `failed`: this rank's backward. The flags must not be touched until wait().
  void issue(bool failed, std::string_view tag);
  // The flags are then the largest of any rank. DistributedError on every rank where one has failed
  // or has called something else.
  void wait() const;

 private:
  std::span<uint8_t> fingerprint() const;  // behind the flags and the failure

  Group* ranks_;
  int64_t count_;
  Tensor message_;
  uint64_t calls_[2] = {};  // as they were issued
  Work work_;
};

}  // namespace tessera::distributed
