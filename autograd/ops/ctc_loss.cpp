// Connectionist temporal classification, made of ops: the forward variables of all samples at once,
// step by step.
#include <algorithm>
#include <limits>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/ops/compute_dtype.h>

namespace tessera {
namespace {

constexpr const char* kCtcLoss = "ctc_loss";

// The logarithm of no probability. Finite, so that no difference of two is NaN, and so far from the
// logarithms of probabilities that it stays what it is where these are added.
constexpr double kNever = -1e30;

std::vector<int64_t> read_lengths(const char* what, const Tensor& lengths, int64_t N,
                                  int64_t largest) {
  TS_CHECK(lengths.defined(), kCtcLoss, what, " is undefined; give it a value first");
  TS_CHECK_DTYPE(lengths.dtype() == kI64 || lengths.dtype() == kI32, kCtcLoss, what,
                 " must be i64 or i32; got ", lengths);
  TS_CHECK_SHAPE(lengths.numel() == N && lengths.dim() <= 1, kCtcLoss, what,
                 " must have one element for each of the ", N, " samples; got ", lengths);
  if (lengths.is_meta()) return std::vector<int64_t>(static_cast<size_t>(N), largest);
  std::vector<int64_t> values = lengths.to_vector<int64_t>();
  for (const int64_t value : values) {
    TS_CHECK(value >= 0 && value <= largest, kCtcLoss, what, " must be in [0, ", largest, "]; got ",
             value);
  }
  return values;
}

Tensor on_device(const std::vector<int64_t>& values, const Device& device) {
  return to(tensor(values, {static_cast<int64_t>(values.size())}, kI64), device);
}

}  // namespace

// Letters: T steps, N samples, C classes, S the longest target, L = 2 S + 1 labels with a blank
// before, between and behind them.
Tensor ctc_loss(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, int64_t blank, Reduction reduction,
                bool zero_infinity) {
  TS_CHECK(log_probs.defined() && targets.defined(), kCtcLoss,
           "log_probs or targets is undefined; give it a value first");
  TS_CHECK_DTYPE(is_floating(log_probs.dtype()) && !is_fp8(log_probs.dtype()), kCtcLoss,
                 "log_probs must be f64, f32, f16 or bf16; got ", log_probs);
  TS_CHECK_DTYPE(targets.dtype() == kI64 || targets.dtype() == kI32, kCtcLoss,
                 "targets must be i64 or i32; got ", targets);
  TS_CHECK_SHAPE(log_probs.dim() == 2 || log_probs.dim() == 3, kCtcLoss,
                 "expects log_probs [T, N, C] or [T, C]; got ", log_probs);
  const bool batched = log_probs.dim() == 3;
  const Tensor logs = in_compute(batched ? log_probs : unsqueeze(log_probs, 1));
  const int64_t T = logs.size(0), N = logs.size(1), C = logs.size(2);
  const Device device = logs.device();
  TS_CHECK_SHAPE(T > 0 && N > 0, kCtcLoss, "needs at least one step and one sample; got ",
                 log_probs);
  TS_CHECK(blank >= 0 && blank < C, kCtcLoss, "blank must be one of the ", C, " classes; got ",
           blank);
  const bool in_a_row = batched && targets.dim() == 1;
  TS_CHECK_SHAPE(
      in_a_row || (batched ? targets.dim() == 2 && targets.size(0) == N : targets.dim() == 1),
      kCtcLoss, "targets must be [", N, ", S] or [sum of target_lengths]; got ", targets);
  const std::vector<int64_t> steps = read_lengths("input_lengths", input_lengths, N, T);
  const std::vector<int64_t> lengths =
      read_lengths("target_lengths", target_lengths, N, targets.size(-1));
  const int64_t S = *std::max_element(lengths.begin(), lengths.end());
  const Tensor step_counts = on_device(steps, device), label_counts = on_device(lengths, device);

  // Labels [N, L]; what lies behind a target is blank.
  const Tensor blanks = full({N, 1}, blank, {.dtype = kI64, .device = device});
  Tensor labels = blanks;
  if (S > 0) {
    const Tensor position = to(arange(S), device);
    const Tensor inside = lt(unsqueeze(position, 0), unsqueeze(label_counts, 1));
    Tensor padded = to(targets, kI64);
    if (in_a_row) {
      std::vector<int64_t> first;
      int64_t total = 0;
      for (const int64_t length : lengths) first.push_back(total), total += length;
      TS_CHECK_SHAPE(targets.is_meta() || target_lengths.is_meta() || total == targets.size(0),
                     kCtcLoss, "target_lengths sum to ", total, "; got targets ", targets);
      const Tensor places = masked_fill(add(unsqueeze(on_device(first, device), 1), position),
                                        logical_not(inside), 0);
      padded = reshape(index_select(padded, 0, flatten(places)), {N, S});
    } else {
      padded = narrow(reshape(padded, {N, targets.size(-1)}), 1, 0, S);
    }
    padded = masked_fill(padded, logical_not(inside), blank);
    const Tensor pairs = stack(TensorList{expand(blanks, {N, S}), padded}, 2);
    labels = cat(TensorList{reshape(pairs, {N, 2 * S}), blanks}, 1);
  }
  const int64_t L = 2 * S + 1;

  // A label may follow the one two before it where they differ: the blank between is left out.
  Tensor leap;
  if (L > 2) leap = mul(to(eq(labels, roll(labels, {2}, {1})), logs.dtype()), kNever);
  const Tensor index = expand(unsqueeze(labels, 0), {T, N, L});
  const TensorList emitted = unbind(clamp(gather(logs, 2, index), kNever), 0);
  // The first step may be at the first blank or the first label.
  Tensor begin = full({N, L}, kNever, {.dtype = logs.dtype(), .device = device});
  begin =
      cat(TensorList{zeros({N, std::min<int64_t>(L, 2)}, {.dtype = logs.dtype(), .device = device}),
                     narrow(begin, 1, 0, std::max<int64_t>(L - 2, 0))},
          1);
  TensorList alphas = {add(begin, emitted[0])};
  for (int64_t t = 1; t < T; ++t) {
    const Tensor& before = alphas.back();
    TensorList ways = {before};
    if (L > 1) ways.push_back(pad(before, {1, -1}, Pad::kConstant, kNever));
    if (L > 2) ways.push_back(add(pad(before, {2, -2}, Pad::kConstant, kNever), leap));
    const Tensor arrived = ways.size() == 1 ? before : logsumexp(stack(ways, 0), {0});
    alphas.push_back(add(arrived, emitted[static_cast<size_t>(t)]));
  }

  // Each sample ends at its last step in its last blank or its last label. Without steps only the
  // empty target is possible.
  const Tensor last_step = expand(reshape(clamp(sub(step_counts, 1), 0), {1, N, 1}), {1, N, L});
  const Tensor last = squeeze(gather(stack(alphas, 0), 0, last_step), 0);
  const Tensor end = unsqueeze(mul(label_counts, 2), 1);
  const Tensor at_blank = gather(last, 1, end);
  const Tensor at_label = masked_fill(gather(last, 1, clamp(sub(end, 1), 0)), eq(end, 0), kNever);
  Tensor losses = neg(logsumexp(cat(TensorList{at_blank, at_label}, 1), {1}));
  const Tensor idle = eq(step_counts, 0);
  losses = where(idle, mul(to(gt(label_counts, 0), logs.dtype()), -2 * kNever), losses);
  const Tensor impossible = gt(detach(losses), -0.5 * kNever);
  // Adds nothing, and exp(log_prob) to the gradient of each log_prob of a sample's steps; NaN where
  // the loss is infinite, as torch does.
  const double share = zero_infinity ? 1 : std::numeric_limits<double>::quiet_NaN();
  const Tensor shares = masked_fill(ones({N}, {logs.dtype(), device}), impossible, share);
  const Tensor running =
      lt(unsqueeze(to(arange(T), device), 1), unsqueeze(step_counts, 0));  // [T, N]
  const Tensor weights = masked_fill(expand(shares, {T, N}), logical_not(running), 0);
  const Tensor mass = sum(mul(sum(exp(logs), {2}), weights), {0});
  losses = add(losses, sub(mass, detach(mass)));
  losses =
      masked_fill(losses, impossible, zero_infinity ? 0 : std::numeric_limits<double>::infinity());
  if (reduction == Reduction::kMean) {
    losses = mean(div(losses, to(clamp(label_counts, 1), logs.dtype())));
  } else if (reduction == Reduction::kSum) {
    losses = sum(losses);
  } else if (!batched) {
    losses = squeeze(losses, 0);
  }
  return to(losses, loss_dtype(log_probs));
}

}  // namespace tessera
