#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/kernels/attention/attention_head.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/common/scratch.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

HeadView view_of(const Tensor& x) {
  return {x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

AttentionProblem problem_of(const Tensor& query, const Tensor& key, const Tensor& value,
                            const Tensor& output, const Tensor& log_sums,
                            const AttentionSpec& spec) {
  AttentionProblem problem{};
  problem.dtype = query.dtype();
  problem.isa = cpu_isa();
  problem.in_pairs = query.dtype() == kBF16 && cpu_isa() >= Isa::kBf16 && has_isa(Isa::kBf16);
  problem.B = query.size(0);
  problem.H = query.size(1);
  problem.Hk = key.size(1);
  problem.T = query.size(2);
  problem.S = problem.keys = key.size(2);
  problem.E = query.size(3);
  problem.Ev = value.size(3);
  problem.scale = spec.scale;
  problem.causal = spec.causal;
  problem.dropout = spec.dropout;
  problem.stream = spec.stream;
  problem.draws = draws_of(spec.place, problem.H, problem.T, problem.S);
  problem.has_mask = spec.mask.defined();
  if (problem.has_mask) {
    problem.mask = view_of(spec.mask);
    problem.mask_dtype = spec.mask.dtype();
  }
  problem.query = view_of(query);
  problem.key = view_of(key);
  problem.value = view_of(value);
  problem.output = view_of(output);
  problem.log_sums = log_sums.data();
  return problem;
}

// Of each sample; empty where all have all keys.
std::vector<int64_t> lengths_of(const AttentionSpec& spec, int64_t S) {
  std::vector<int64_t> lengths;
  if (spec.lengths.defined()) lengths = spec.lengths.to_vector<int64_t>();
  for (size_t b = 0; b < lengths.size(); ++b) {
    TS_CHECK_INDEX(lengths[b] >= 1 && lengths[b] <= S, "scaled_dot_product_attention", "sample ", b,
                   " has a length of ", lengths[b], ", which is not in [1, ", S, "]");
  }
  return lengths;
}
AttentionProblem of_sample(AttentionProblem problem, const std::vector<int64_t>& lengths,
                           int64_t b) {
  if (!lengths.empty()) problem.keys = lengths[static_cast<size_t>(b)];
  return problem;
}

}  // namespace

AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionSpec& spec) {
  if (query.device().is_cuda()) {
    return on_cuda<kernels::attention>("scaled_dot_product_attention", query.device(), query, key,
                                       value, spec);
  }
  const int64_t B = query.size(0), H = query.size(1), T = query.size(2), Ev = value.size(3);
  AttentionResult result{
      raw::transpose(raw::empty({B, T, H, Ev}, query.dtype(), query.device()), 1, 2),
      raw::empty({B, H, T}, compute_dtype(query.dtype()), query.device())};
  if (query.is_meta() || B * H * T == 0) return result;
  const AttentionProblem problem =
      problem_of(query, key, value, result.output, result.log_sums, spec);
  const std::vector<int64_t> lengths = lengths_of(spec, problem.S);
  const bool in_place = reads_in_place(problem);
  const int64_t heads = in_place ? problem.Hk : H;
  const int64_t rows = in_place ? H / problem.Hk * T : 1;
  const int64_t parts = in_place ? (rows + kRowsAtOnce - 1) / kRowsAtOnce : 1;
  const int64_t tasks = B * heads * parts;
  Scratch scratch(tasks, TS_SIMD_CALL(attention_scratch_bytes, problem, false));
  parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    char* const slice = scratch.take();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / parts / heads, head = i / parts % heads;
      const AttentionProblem sample = of_sample(problem, lengths, b);
      if (in_place) {
        TS_SIMD_CALL(attention_rows, sample, b, head, i % parts * kRowsAtOnce, slice);
      } else {
        TS_SIMD_CALL(attention_head, sample, b, head, slice);
      }
    }
  });
  return result;
}

void attention_backward(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& output, const Tensor& log_sums,
                        const AttentionSpec& spec, const Tensor& grad_query, const Tensor& grad_key,
                        const Tensor& grad_value) {
  if (query.device().is_cuda()) {
    return on_cuda<kernels::attention_backward>("attention", query.device(), grad_output, query,
                                                key, value, output, log_sums, spec, grad_query,
                                                grad_key, grad_value);
  }
  const int64_t B = key.size(0), Hk = key.size(1);
  if (query.is_meta() || B * Hk == 0) return;
  AttentionProblem problem = problem_of(query, key, value, output, log_sums, spec);
  problem.grad_output = view_of(grad_output);
  problem.grad_query = view_of(grad_query);
  problem.grad_key = view_of(grad_key);
  problem.grad_value = view_of(grad_value);
  const std::vector<int64_t> lengths = lengths_of(spec, problem.S);
  Scratch scratch(B * Hk, TS_SIMD_CALL(attention_scratch_bytes, problem, true));
  parallel_for(B * Hk, 1, [&](int64_t begin, int64_t end) {
    char* const slice = scratch.take();
    for (int64_t i = begin; i < end; ++i) {
      TS_SIMD_CALL(attention_head_backward, of_sample(problem, lengths, i / Hk), i / Hk, i % Hk,
                   slice);
    }
  });
}

}  // namespace tessera::kernels
