#include <tessera/core/kernels/attention/attention_library.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/cuda/libraries/attention_graph.h>
#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256, kRows = kBlock / gpu::kWarp;  // a warp for each row

// ---- Masks --------------------------------------------------------------------------------------

// [Note: masks as a bias] The library adds numbers to the scores, and answers a row without keys
// with NaN. A mask becomes such numbers in f32: hidden keys kHidden, which is finite, so that no
// maximum is infinite and every exponential of a hidden key is 0 beside one that is seen. Rows
// without keys are noted; forward writes their zeros and the infinite logarithm of their sum
// afterwards, and with that all their probabilities are 0 in backward. A row whose largest number
// is of the size of kHidden is moved by it, which softmax does not see.
constexpr float kHidden = -1e30f, kShifted = -1e29f;

// More is not worth its memory: own tiles read the mask where it lies.
constexpr int64_t kMostBias = int64_t{1} << 28;  // bytes

struct Bias {
  // f32 [B, H, T, S] with 1 where the mask is the same for all, rows aligned. Backward has all T
  // rows.
  Tensor values;
  Tensor hidden;  // u8 [B, H, T] of the same: the row has no keys
};

template <class M>
TS_DEVICE float added_by(M mask) {
  if constexpr (std::is_same_v<M, bool>) {
    return mask ? 0.0f : -static_cast<float>(INFINITY);
  } else {
    return load<float>(mask);
  }
}

struct MaskRows {
  int64_t H, T, S;                   // rows: [B, H, T]
  int64_t batch, head, row, column;  // strides of the mask
  int64_t row_length;                // of the bias
};

template <class M>
__global__ void bias_kernel(const M* mask, float* values, uint8_t* hidden, const MaskRows m,
                            int64_t rows) {
  const int64_t r = gpu::first_index() / gpu::kWarp;
  if (r >= rows) return;
  const int64_t lane = threadIdx.x % gpu::kWarp;
  mask += r / m.T / m.H * m.batch + r / m.T % m.H * m.head + r % m.T * m.row;
  float largest = -static_cast<float>(INFINITY);
  for (int64_t s = lane; s < m.S; s += gpu::kWarp) {
    largest = gpu::Larger{}(largest, added_by(mask[s * m.column]));
  }
  largest = gpu::warp_reduce(largest, gpu::Larger{});
  const bool none = largest == -static_cast<float>(INFINITY);
  const float shift = !none && largest < kShifted ? largest : 0.0f;
  for (int64_t s = lane; s < m.S; s += gpu::kWarp) {
    const float value = added_by(mask[s * m.column]) - shift;
    values[r * m.row_length + s] = value < kHidden ? kHidden : value;  // NaN stays
  }
  if (lane == 0) hidden[r] = none;
}

// mask: [B, H, T, S], expanded. Nothing where it takes too much memory.
Bias bias_of(const Tensor& mask, bool backward) {
  const auto kept = [&](int dim) { return mask.stride(dim) == 0 ? 1 : mask.size(dim); };
  const int64_t B = kept(0), H = kept(1), T = backward ? mask.size(2) : kept(2), S = mask.size(3);
  const int64_t row_length = (S + 3) / 4 * 4, rows = B * H * T;
  if (rows * row_length * 4 > kMostBias) return {};
  const Bias bias{raw::empty({B, H, T, row_length}, kF32, mask.device()),
                  raw::empty({B, H, T}, kU8, mask.device())};
  const MaskRows m{H,         T, S, mask.stride(0), mask.stride(1), mask.stride(2), mask.stride(3),
                   row_length};
  const auto run = [&]<class M>() {
    gpu::launch({.name = "attention_mask", .grid = gpu::blocks(rows, kRows), .block = kBlock},
                bias_kernel<M>, mask.data_as<M>(), bias.values.data_as<float>(),
                bias.hidden.data_as<uint8_t>(), m, rows);
  };
  if (mask.dtype() == kBool) {
    run.template operator()<bool>();
  } else {
    dispatch_floating(mask.dtype(), "scaled_dot_product_attention", run);
  }
  return bias;
}

struct HiddenRows {
  const uint8_t* hidden;
  int64_t batch, head, row;  // strides
  int64_t H, T, Ev;
  int64_t output_batch, output_head, output_row;
};

// What own kernels give for rows without keys. log_sums: nullptr where not wanted.
template <class T>
__global__ void clear_hidden_kernel(const HiddenRows p, T* output, float* log_sums, int64_t rows) {
  const int64_t r = gpu::first_index() / gpu::kWarp;
  if (r >= rows) return;
  const int64_t t = r % p.T, h = r / p.T % p.H, b = r / p.T / p.H;
  if (p.hidden[b * p.batch + h * p.head + t * p.row] == 0) return;
  output += b * p.output_batch + h * p.output_head + t * p.output_row;
  for (int64_t e = threadIdx.x % gpu::kWarp; e < p.Ev; e += gpu::kWarp) {
    output[e] = T::from_bits(0);
  }
  if (threadIdx.x % gpu::kWarp == 0) log_sums[r] = static_cast<float>(INFINITY);
}

template <class Run>
void dispatch_16_bits(DType dtype, const Run& run) {
  dtype == kBF16 ? run.template operator()<bf16>() : run.template operator()<f16>();
}

void clear_hidden(const Bias& bias, const AttentionResult& result) {
  const Tensor &y = result.output, &hidden = bias.hidden;
  const auto stride = [&](int dim) { return hidden.size(dim) == 1 ? 0 : hidden.stride(dim); };
  const HiddenRows p{hidden.data_as<uint8_t>(),
                     stride(0),
                     stride(1),
                     stride(2),
                     y.size(1),
                     y.size(2),
                     y.size(3),
                     y.stride(0),
                     y.stride(1),
                     y.stride(2)};
  const int64_t rows = y.size(0) * y.size(1) * y.size(2);
  dispatch_16_bits(y.dtype(), [&]<class T>() {
    gpu::launch({.name = "attention_mask", .grid = gpu::blocks(rows, kRows), .block = kBlock},
                clear_hidden_kernel<T>, p, y.data_as<T>(), result.log_sums.data_as<float>(), rows);
  });
}

// ---- Padding ------------------------------------------------------------------------------------

struct PaddedRows {
  const int32_t* lengths;
  int64_t H, S, columns;
  int64_t batch, head, row, column;  // strides
};

// Zeros where the sample has no keys: the library promises nothing there.
template <class T>
__global__ void clear_padding_kernel(const PaddedRows p, T* grad, int64_t rows) {
  const int64_t r = gpu::first_index() / gpu::kWarp;
  if (r >= rows) return;
  const int64_t s = r % p.S, h = r / p.S % p.H, b = r / p.S / p.H;
  if (s < p.lengths[b]) return;
  grad += b * p.batch + h * p.head + s * p.row;
  for (int64_t e = threadIdx.x % gpu::kWarp; e < p.columns; e += gpu::kWarp) {
    grad[e * p.column] = T::from_bits(0);
  }
}

// grad: [B, H, S, E].
void clear_padding(const Tensor& lengths, const Tensor& grad) {
  const PaddedRows p{lengths.data_as<int32_t>() + grad.size(0),
                     grad.size(1),
                     grad.size(2),
                     grad.size(3),
                     grad.stride(0),
                     grad.stride(1),
                     grad.stride(2),
                     grad.stride(3)};
  const int64_t rows = grad.size(0) * grad.size(1) * grad.size(2);
  dispatch_16_bits(grad.dtype(), [&]<class T>() {
    gpu::launch({.name = "attention_backward", .grid = gpu::blocks(rows, kRows), .block = kBlock},
                clear_padding_kernel<T>, p, grad.data_as<T>(), rows);
  });
}

// ---- The library --------------------------------------------------------------------------------

gpu::AttentionOperand operand_of(const Tensor& x) {
  gpu::AttentionOperand result{x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.data()};
  // A dimension of one element has any stride; the library wants one that fits.
  if (x.size(2) == 1) result.row = x.size(3);
  if (x.size(1) == 1) result.head = x.size(2) * x.size(3);
  if (x.size(0) == 1) result.batch = x.size(1) * x.size(2) * x.size(3);
  return result;
}

gpu::AttentionProblem library_problem(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const AttentionResult& result, const AttentionSpec& spec) {
  return {.dtype = query.dtype(),
          .B = query.size(0),
          .H = query.size(1),
          .Hk = key.size(1),
          .T = query.size(2),
          .S = key.size(2),
          .E = query.size(3),
          .Ev = value.size(3),
          .scale = spec.scale,
          .causal = spec.causal,
          .dropout = spec.dropout,
          .has_lengths = spec.lengths.defined(),
          .query = operand_of(query),
          .key = operand_of(key),
          .value = operand_of(value),
          .output = operand_of(result.output),
          .log_sums = result.log_sums.data(),
          .deterministic = spec.policy.deterministic};
}

// Makes the mask a bias of the problem; false where the library does not serve what is asked for.
// Where the library draws dropout it must do so in both directions, so forward asks for both.
bool prepare(gpu::AttentionProblem& p, const AttentionSpec& spec, bool backward, Bias& bias) {
  const int version = spec.policy.library ? gpu::graph_library_version() : 0;
  if (version == 0 || !validate(p, version).empty()) return false;
  if (spec.dropout > 0 &&
      (spec.policy.equal_dropout || !validate(backward_of(p), version).empty())) {
    return false;
  }
  if (spec.mask.defined()) {
    if (spec.causal) return false;  // a row without keys could not be told from the mask
    // With dropout both directions are asked for: the one's bias is the other's.
    bias = bias_of(spec.mask, backward || spec.dropout > 0);
    if (!bias.values.defined()) return false;
    const Tensor& x = bias.values;
    p.bias = {kF32,        x.size(0),   x.size(1),   x.size(2),
              x.stride(0), x.stride(1), x.stride(2), x.data()};
  }
  return spec.dropout <= 0 ||
         (has_engine(attention_request(p)) && has_engine(attention_request(backward_of(p))));
}

// Seed and offset of the library's generator. Each of its threads draws many numbers from the
// offset on, so that offsets near each other would give shifted copies of one mask: streams differ
// in the seed, 64 bits of Philox of both.
__global__ void store_stream_kernel(int64_t* numbers, MovableStream movable) {
  const RandomStream stream = movable.now();
  const auto mixed = philox4x32(stream.seed, stream.stream, 0);
  numbers[0] = static_cast<int64_t>((uint64_t{mixed[0]} << 32) | mixed[1]);
  numbers[1] = 0;
}

bool run_on_library(const gpu::AttentionProblem& p, const RandomStream& stream,
                    const Tensor& lengths, const Device& device) {
  std::array<void*, gpu::kAttentionSlots> memory{};
  memory[gpu::kQuerySlot] = p.query.data;
  memory[gpu::kKeySlot] = p.key.data;
  memory[gpu::kValueSlot] = p.value.data;
  memory[gpu::kOutputSlot] = p.output.data;
  memory[gpu::kLogSumsSlot] = p.log_sums;
  memory[gpu::kGradOutputSlot] = p.grad_output.data;
  memory[gpu::kGradQuerySlot] = p.grad_query.data;
  memory[gpu::kGradKeySlot] = p.grad_key.data;
  memory[gpu::kGradValueSlot] = p.grad_value.data;
  if (p.has_lengths) {
    memory[gpu::kQueryLengthsSlot] = lengths.data();
    memory[gpu::kKeyLengthsSlot] = lengths.data_as<int32_t>() + p.B;
  }
  memory[gpu::kBiasSlot] = p.bias.data;
  Tensor numbers;
  if (p.dropout > 0) {
    numbers = raw::empty({2}, kI64, device);
    int64_t* const seed = numbers.data_as<int64_t>();
    const MovableStream moved = movable(stream);
    gpu::launch(
        {.name = "scaled_dot_product_attention", .traffic = {moved.state != nullptr ? 16 : 0, 16}},
        store_stream_kernel, seed, moved);
    memory[gpu::kSeedSlot] = seed;
    memory[gpu::kOffsetSlot] = seed + 1;
  }
  return run_graph(attention_request(p), memory);
}

bool run_forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths,
                 const AttentionSpec& spec, const AttentionResult& result) {
  gpu::AttentionProblem problem = library_problem(query, key, value, result, spec);
  Bias bias;
  if (!prepare(problem, spec, false, bias) ||
      !run_on_library(problem, spec.stream, lengths, query.device())) {
    return false;
  }
  if (bias.hidden.defined()) clear_hidden(bias, result);
  return true;
}

bool run_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                  const Tensor& value, const Tensor& lengths, const AttentionSpec& spec,
                  const AttentionResult& result, const AttentionGradients& gradients) {
  gpu::AttentionProblem problem = library_problem(query, key, value, result, spec);
  Bias bias;
  if (!prepare(problem, spec, true, bias)) return false;
  problem.backward = true;
  problem.grad_output = operand_of(grad_output);
  problem.grad_query = operand_of(gradients.query);
  problem.grad_key = operand_of(gradients.key);
  problem.grad_value = operand_of(gradients.value);
  const int version = gpu::graph_library_version();
  Tensor dense = grad_output;
  if (!validate(problem, version).empty()) {  // as the gradient of a sum lies, for example
    dense = raw::transpose(contiguous(raw::transpose(grad_output, 1, 2)), 1, 2);
    problem.grad_output = operand_of(dense);
  }
  const std::string reason = validate(problem, version);
  const bool ran = reason.empty() && run_on_library(problem, spec.stream, lengths, query.device());
  TS_CHECK_AS(UnsupportedError, ran || spec.dropout <= 0, "scaled_dot_product_attention",
              "forward drew dropout by ", gpu::graph_library(), ", which has no backward for it (",
              reason.empty() ? "no engine" : reason,
              "); set kernels::AttentionPolicy::equal_dropout");
  if (ran && lengths.defined()) {
    clear_padding(lengths, gradients.key);
    clear_padding(lengths, gradients.value);
  }
  return ran;
}

// ---- Lengths ------------------------------------------------------------------------------------

// [B, H, rows, E], in memory [B, rows, H, E]; what is behind x's rows is `beyond`.
Tensor longer(const Tensor& x, int64_t rows, const Scalar& beyond) {
  const Tensor memory =
      raw::full({x.size(0), rows, x.size(1), x.size(3)}, beyond, x.dtype(), x.device());
  const Tensor result = raw::transpose(memory, 1, 2);
  copy_into(raw::narrow(result, 2, 0, x.size(2)), x);
  return result;
}
Tensor new_rows(const Tensor& like, int64_t rows) {
  return raw::transpose(
      raw::empty({like.size(0), rows, like.size(1), like.size(3)}, like.dtype(), like.device()), 1,
      2);
}
// [B, H, T] behind which rows have no probabilities.
Tensor longer_sums(const Tensor& x, int64_t rows) {
  const Tensor result = raw::full({x.size(0), x.size(1), rows},
                                  std::numeric_limits<double>::infinity(), x.dtype(), x.device());
  copy_into(raw::narrow(result, 2, 0, x.size(2)), x);
  return result;
}
// The mask hides what is behind it.
Tensor longer_mask(const Tensor& mask, int64_t B, int64_t H, int64_t rows, int64_t keys) {
  Tensor kept = mask;
  for (int dim = 0; dim < 3; ++dim) {
    if (mask.stride(dim) == 0) kept = raw::narrow(kept, dim, 0, 1);
  }
  const int64_t T = mask.stride(2) == 0 ? 1 : rows;
  const Scalar hidden =
      mask.dtype() == kBool ? Scalar(false) : Scalar(-std::numeric_limits<double>::infinity());
  const Tensor result =
      raw::full({kept.size(0), kept.size(1), T, keys}, hidden, mask.dtype(), mask.device());
  copy_into(raw::narrow(raw::narrow(result, 2, 0, kept.size(2)), 3, 0, mask.size(3)), kept);
  return raw::expand(result, {B, H, rows, keys});
}

// The same attention over more queries and keys that are hidden, see [Note: lengths of attention].
struct LongerAttention {
  Tensor query, key, value, lengths;
  AttentionSpec spec;

  LongerAttention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& given,
                  const AttentionSpec& of)
      : lengths(given), spec(of) {
    const int64_t B = q.size(0), T = q.size(2), S = k.size(2);
    const int64_t rows = gpu::attention_length(T), keys = gpu::attention_length(S);
    query = longer(q, rows, 0.0);
    key = longer(k, keys, 0.0);
    value = longer(v, keys, 0.0);
    if (of.mask.defined()) {
      spec.mask = longer_mask(of.mask, B, q.size(1), rows, keys);
    } else if (!given.defined() && !(of.causal && T <= S)) {  // else no query sees beyond its own
      lengths = raw::empty({2, B}, kI32, q.device());
      fill(raw::narrow(lengths, 0, 0, 1), T);
      fill(raw::narrow(lengths, 0, 1, 1), S);
    }
    spec.lengths = lengths;
  }
};

// Whether to go the longer way: the library serves it, lengths and all, but these have no plan.
bool takes_longer_way(const Tensor& query, const Tensor& key, const Tensor& value,
                      const AttentionSpec& spec, const AttentionResult& result) {
  const int version = spec.policy.library ? gpu::graph_library_version() : 0;
  const gpu::AttentionProblem problem = library_problem(query, key, value, result, spec);
  gpu::AttentionProblem hidden = problem;
  hidden.has_lengths = true;
  return version > 0 && validate(hidden, version).empty() &&
         !takes_lengths(problem, spec.mask.defined());
}

}  // namespace

bool attention_by_library(const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& lengths, const AttentionSpec& spec,
                          const AttentionResult& result) {
  if (!takes_longer_way(query, key, value, spec, result)) {
    return run_forward(query, key, value, lengths, spec, result);
  }
  const LongerAttention more(query, key, value, lengths, spec);
  const int64_t T = query.size(2), rows = more.query.size(2);
  const AttentionResult all{new_rows(result.output, rows),
                            raw::empty({query.size(0), query.size(1), rows}, kF32, query.device())};
  if (!run_forward(more.query, more.key, more.value, more.lengths, more.spec, all)) return false;
  copy_into(result.output, raw::narrow(all.output, 2, 0, T));
  copy_into(result.log_sums, raw::narrow(all.log_sums, 2, 0, T));
  return true;
}

bool attention_backward_by_library(const Tensor& grad_output, const Tensor& query,
                                   const Tensor& key, const Tensor& value, const Tensor& lengths,
                                   const AttentionSpec& spec, const AttentionResult& result,
                                   const AttentionGradients& gradients) {
  if (!takes_longer_way(query, key, value, spec, result)) {
    return run_backward(grad_output, query, key, value, lengths, spec, result, gradients);
  }
  const LongerAttention more(query, key, value, lengths, spec);
  const int64_t rows = more.query.size(2), keys = more.key.size(2);
  const AttentionResult all{longer(result.output, rows, 0.0), longer_sums(result.log_sums, rows)};
  const AttentionGradients into{new_rows(gradients.query, rows), new_rows(gradients.key, keys),
                                new_rows(gradients.value, keys)};
  if (!run_backward(longer(grad_output, rows, 0.0), more.query, more.key, more.value, more.lengths,
                    more.spec, all, into)) {
    return false;
  }
  copy_into(gradients.query, raw::narrow(into.query, 2, 0, query.size(2)));
  copy_into(gradients.key, raw::narrow(into.key, 2, 0, key.size(2)));
  copy_into(gradients.value, raw::narrow(into.value, 2, 0, key.size(2)));
  return true;
}

}  // namespace tessera::kernels
