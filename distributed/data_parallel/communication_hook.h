// How a bucket of gradients is reduced: uncompressed or compressed.
//
// A hook is a small state machine for each bucket. All ranks start the buckets in one order, and at
// the end of backward advance them round after round, in the same order, until each is done, so
// every rank issues the same collectives in the same sequence.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/backward/gradient_bucket.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/traffic.h>

namespace tessera::distributed {

class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;
  virtual std::string name() const = 0;  // compared across ranks
  // The bucket's gradients() hold this rank's contribution. At the end they must hold the sum over
  // all ranks divided by `divisor`, with the same bits on every rank.
  virtual void start(const GradientBucket& bucket, double divisor) = 0;
  // Waits for the bucket's current collective and issues the next; returns true when it is done.
  virtual bool advance(const GradientBucket& bucket) = 0;
  virtual Traffic traffic(const GradientBucket& bucket) const = 0;  // of the next reduction
  // Whether reductions in the middle of a step may be left undivided and added to, as [Note: sums
  // of a step] in backward_pass.h says. Sums that are rounded for sending are divided each time,
  // since otherwise they would grow out of range.
  virtual bool leaves_sums() const { return false; }
  // State that must survive a restart, by parameter names, so that it fits any buckets.
  virtual StateDict state_dict() const { return {}; }
  virtual void load_state_dict(const StateDict&) {}
};

// One all_reduce in place, multiplied once at the end. The default of replicate().
class AllReduceHook : public CommunicationHook {
 public:
  std::string name() const override { return "all_reduce"; }
  bool leaves_sums() const override { return true; }
  void start(const GradientBucket& bucket, double divisor) override;
  bool advance(const GradientBucket& bucket) override;
  Traffic traffic(const GradientBucket& bucket) const override { return {1, bucket.bytes()}; }

 private:
  struct Pending {
    Work work;
    double divisor;  // 1: the collective has taken the mean
  };
  std::map<int, Pending> pending_;
};

// Sends gradients as f16 or bf16: half the bytes of f32. They are divided before they are rounded,
// so that sums stay in range, and contributions are added in f32.
class CastHook : public CommunicationHook {
 public:
  explicit CastHook(DType wire);  // kF16 or kBF16; throws DTypeError
  std::string name() const override;
  void start(const GradientBucket& bucket, double divisor) override;
  bool advance(const GradientBucket& bucket) override;
  Traffic traffic(const GradientBucket& bucket) const override;

 private:
  struct Pending {
    Work work;
    Tensor payload;
  };
  DType wire_;
  std::map<int, Pending> pending_;
};

struct PowerSgdOptions {
  int64_t rank = 1;            // of the approximation
  int64_t start_step = 1000;   // earlier reductions are uncompressed
  double min_compression = 2;  // a matrix is compressed if this many times smaller at least
  bool error_feedback = true;  // the compression error is added to the next gradient
  bool warm_start = true;      // the factors of the last reduction begin the next
  uint64_t seed = 0;
  bool batched =
      false;          // a bucket is one matrix, whatever lies in it: torch's batched_powerSGD_hook
  DType wire = kF32;  // kF16 or kBF16: what is sent, as under torch's fp16_compress_wrapper
};

// PowerSGD (Vogels, Karimireddy, Jaggi 2019): a gradient M [n, m] (dimensions after the first
// flattened) is sent as P = M Q [n, r] and Q = M^T P [m, r] with orthonormal P; the result is P
// Q^T. There are two small collectives for each bucket, and one for uncompressed parameters: a
// matrix is compressed if (n + m) * r * min_compression < n * m. f32 gradients only.
//
// Batched, the bucket's gradients one behind the other are the rows of one square matrix, filled up
// with zeros: two collectives and two products for each bucket, and everything is compressed. Rows
// do not correspond to layers, so a higher rank need not be more accurate.
//
// `wire` rounds what is sent: both factors, uncompressed parameters, the plain reductions before
// start_step. Everything else stays f32 (torch rounds the gradient itself and calculates in 16
// bits), and rounding errors of factors are fed back too. Contributions are divided before they are
// rounded.
//
// A reduction with values that are not finite (a loss scale that was too high) does not change the
// state, since the optimizer skips that step.
class PowerSgdHook : public CommunicationHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options = {});  // ValueError, DTypeError
  std::string name() const override;
  void start(const GradientBucket& bucket, double divisor) override;
  bool advance(const GradientBucket& bucket) override;
  Traffic traffic(const GradientBucket& bucket) const override;
  // "NAME.steps" of every parameter, "NAME.error" and "NAME.q" of each compressed one. Batched, the
  // bucket's Q and the error of its filling, "NAME.padding", are stored under its first parameter:
  // with other buckets they restart, while errors are kept.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  enum class Stage { kPlain, kRest, kFirstFactor, kSecondFactor };
  // f32 values being sent, in the dtype of the wire.
  struct Sent {
    Work work;
    Tensor values, payload;
  };
  struct Pending {
    Stage stage = Stage::kPlain;
    double divisor = 1;
    Sent rest, factor;     // uncompressed parts; the factor under way
    Tensor first, second;  // flat: all P, all Q
    Tensor square;         // batched: the matrix
  };
  struct State {
    Tensor error, q, padding;
    int64_t steps = 0;
  };
  // A unit of compression: a parameter, or batched the bucket under the name of its first
  // parameter.
  struct Matrix {
    size_t slot = 0;
    int64_t rows = 0, columns = 0, rank = 0;
  };
  std::optional<Matrix> matrix(const GradientBucket& bucket, size_t slot) const;
  std::vector<Matrix> matrices(const GradientBucket& bucket) const;
  int64_t uncompressed(const GradientBucket& bucket) const;  // elements
  bool warming_up(const GradientBucket& bucket) const;
  Tensor random_factor(const std::string& name, const Matrix& part, int64_t step) const;
  Sent send(const GradientBucket& bucket, const Tensor& values) const;
  void add_errors(const GradientBucket& bucket, const Tensor& square);
  void finish(const GradientBucket& bucket, const Matrix& part, const Pending& pending,
              const Tensor& p, const Tensor& q);

  PowerSgdOptions options_;
  std::unique_ptr<CommunicationHook> plain_;  // before start_step
  std::map<int, Pending> pending_;
  std::map<std::string, State> states_;
};

}  // namespace tessera::distributed
