// How a bucket of gradients is reduced: plainly, or compressed on the wire.
//
// A hook is a small state machine for each bucket. All ranks start the buckets in one order, and
// at the end of backward advance them round after round, again in one order, until each says that
// it is done: every rank so issues the same collectives in the same sequence.
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
  // The bucket's gradients() hold this rank's contribution. At the end they must hold the sum of
  // all ranks' divided by `divisor`, the same bits on every rank.
  virtual void start(const GradientBucket& bucket, double divisor) = 0;
  // Waits for what the bucket has under way and issues what comes next; true when it is done.
  virtual bool advance(const GradientBucket& bucket) = 0;
  virtual Traffic traffic(const GradientBucket& bucket) const = 0;  // of the next reduction
  // Whether reductions in the middle of a step may be left undivided and added to, as
  // [Note: sums of a step] in backward_pass.h says. Sums that were rounded as they travelled are
  // divided each time: they would grow out of range, and have no bits to keep.
  virtual bool leaves_sums() const { return false; }
  // What must go on after a restart; by parameter names, so that it fits any buckets.
  virtual StateDict state_dict() const { return {}; }
  virtual void load_state_dict(const StateDict&) {}
};

// One all_reduce in place, multiplied once at the end. What replicate() uses by itself.
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

// Gradients travel as f16 or bf16: half the bytes of f32. They are divided before they are rounded,
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
  int64_t start_step = 1000;   // plain all-reduce in the reductions before
  double min_compression = 2;  // a matrix is compressed where this many times smaller at least
  bool error_feedback = true;  // what was lost is added to the next gradient
  bool warm_start = true;      // the factors of the last reduction begin the next
  uint64_t seed = 0;
  bool batched =
      false;          // a bucket is one matrix, whatever lies in it: torch's batched_powerSGD_hook
  DType wire = kF32;  // kF16 or kBF16: what is sent, as under torch's fp16_compress_wrapper
};

// PowerSGD (Vogels, Karimireddy, Jaggi 2019): a gradient M [n, m] (dimensions after the first taken
// together) travels as P = M Q [n, r] and Q = M^T P [m, r] with orthonormal P; the result is
// P Q^T. Two small collectives for each bucket, and one for what is not worth compressing: a matrix
// is compressed where (n + m) * r * min_compression < n * m. f32 gradients only.
//
// Batched, the bucket's gradients one behind the other are rows of one square matrix, filled up
// with zeros: two collectives and two products for each bucket, and nothing that travels plainly.
// Rows are then not those of any layer, so that a higher rank need not be more accurate.
//
// `wire` rounds what is sent: both factors, what is not compressed, the plain reductions before
// start_step. All else stays f32 (torch rounds the gradient itself and calculates in 16 bits), and
// what rounding of factors loses is fed back, too. Contributions are divided before they are
// rounded.
//
// A reduction with values that are not finite (a loss scale that was too high) leaves the state as
// it was: what the optimizer does not take is not fed back.
class PowerSgdHook : public CommunicationHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options = {});  // ValueError, DTypeError
  std::string name() const override;
  void start(const GradientBucket& bucket, double divisor) override;
  bool advance(const GradientBucket& bucket) override;
  Traffic traffic(const GradientBucket& bucket) const override;
  // "NAME.steps" of every parameter, "NAME.error" and "NAME.q" of each compressed one. Batched, the
  // bucket's Q and the error of what fills it up, "NAME.padding", are its first parameter's: in
  // other buckets they begin anew, errors stay.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  enum class Stage { kPlain, kRest, kFirstFactor, kSecondFactor };
  // f32 values on their way, in the dtype of the wire.
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
  // What is compressed as one: a parameter, or batched the bucket in the name of its first.
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
