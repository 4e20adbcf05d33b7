#include <algorithm>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/kernels/attention/attention_bytes.h>
#include <tessera/core/kernels/attention/attention_head.h>
#include <tessera/core/kernels/attention/attention_pieces.h>
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
  problem.all_T = problem.T;
  problem.all_S = problem.S;
  problem.E = query.size(3);
  problem.Ev = value.size(3);
  problem.scale = spec.scale;
  problem.causal = spec.causal;
  problem.dropout = spec.dropout;
  problem.stream = spec.stream;
  problem.draws = draws_of(spec.place, problem.H, problem.T);
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

HeadView from_row(HeadView view, DType dtype, int64_t row) {
  if (view.data != nullptr) {
    view.data = static_cast<char*>(view.data) + row * view.row_stride * size_of(dtype);
  }
  return view;
}

// The problem that a piece is.
AttentionProblem of_piece(AttentionProblem problem, const AttentionPieces& pieces,
                          const AttentionPiece& piece) {
  for (HeadView* view :
       {&problem.query, &problem.output, &problem.grad_output, &problem.grad_query}) {
    *view = from_row(*view, problem.dtype, piece.query);
  }
  for (HeadView* view : {&problem.key, &problem.value, &problem.grad_key, &problem.grad_value}) {
    *view = from_row(*view, problem.dtype, piece.key);
  }
  if (piece.ranged) {
    problem.ranges = pieces.ranges.data() + piece.sample * problem.all_T + piece.query;
  }
  problem.first_query = piece.query;
  problem.first_key = piece.key;
  problem.T = piece.queries;
  problem.keys = piece.keys;
  problem.S = piece.keys + piece.padding;
  problem.causal = piece.causal;
  return problem;
}

// Rows of a key head of a piece whose keys are read in place, in parts of kRowsAtOnce.
int64_t parts_of(const AttentionProblem& p) {
  return (p.H / p.Hk * p.T + kRowsAtOnce - 1) / kRowsAtOnce;
}

// Tasks of all pieces in their order.
class Tasks {
 public:
  // tasks_of: of a piece's problem.
  template <class F>
  Tasks(const AttentionProblem& whole, const AttentionPieces& pieces, bool backward, F&& tasks_of)
      : whole_(whole), pieces_(pieces) {
    for (const AttentionPiece& piece : pieces.pieces) {
      const AttentionProblem problem = of_piece(whole, pieces, piece);
      first_.push_back(count_);
      count_ += tasks_of(problem);
      bytes_ = std::max<int64_t>(bytes_, TS_SIMD_CALL(attention_scratch_bytes, problem, backward));
    }
  }
  // run(problem, sample, number of the task among its piece's, scratch)
  template <class F>
  void run(F&& run) const {
    Scratch scratch(count_, bytes_);
    parallel_for(count_, 1, [&](int64_t begin, int64_t end) {
      char* const slice = scratch.take();
      for (int64_t i = begin; i < end; ++i) {
        const auto at = std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1;
        const AttentionPiece& piece = pieces_.pieces[static_cast<size_t>(at)];
        run(of_piece(whole_, pieces_, piece), piece.sample, i - first_[static_cast<size_t>(at)],
            slice);
      }
    });
  }

 private:
  const AttentionProblem& whole_;
  const AttentionPieces& pieces_;
  std::vector<int64_t> first_;  // task of each piece
  int64_t count_ = 0, bytes_ = 0;
};

// The outputs of a problem on the CPU.
void run_forward(const AttentionProblem& problem, const AttentionSpec& spec) {
  const AttentionPieces pieces = attention_pieces(spec, problem.B, problem.T, problem.S);
  const Tasks tasks(problem, pieces, false, [](const AttentionProblem& p) {
    return reads_in_place(p) ? p.Hk * parts_of(p) : p.H;
  });
  tasks.run([](const AttentionProblem& p, int64_t b, int64_t task, char* scratch) {
    if (reads_in_place(p)) {
      const int64_t parts = parts_of(p);
      TS_SIMD_CALL(attention_rows, p, b, task / parts, task % parts * kRowsAtOnce, scratch);
    } else {
      TS_SIMD_CALL(attention_head, p, b, task, scratch);
    }
  });
}

void check_bytes(const Tensor& query, const ByteVectors& key, const ByteVectors& value,
                 const AttentionSpec& spec) {
  constexpr auto kName = "attention_of_bytes";
  TS_CHECK_DTYPE(query.dtype() == kF32 || query.dtype() == kF16 || query.dtype() == kBF16, kName,
                 "expects a query of f32, f16 or bf16; got ", query);
  TS_CHECK_SHAPE(query.dim() == 4 && query.size(2) <= kFewQueries, kName,
                 "expects a query [B, H, T, E] with T up to ", kFewQueries, "; got ", query);
  TS_CHECK(spec.dropout == 0 && !spec.lengths.defined() && !spec.starts.defined() &&
               !spec.ends.defined(),
           kName, "takes a mask or causal, and neither dropout, lengths, starts nor ends");
  if (spec.mask.defined()) {
    const Shape shape{query.size(0), query.size(1), query.size(2), key.bytes.size(2)};
    TS_CHECK(!spec.causal, kName, "takes a mask or causal, and not both");
    TS_CHECK_DTYPE(spec.mask.dtype() == kBool || is_floating(spec.mask.dtype()), kName,
                   "expects a mask of bool or floating numbers; got ", spec.mask);
    TS_CHECK_SHAPE(spec.mask.shape() == shape, kName, "expects a mask of ", shape, "; got ",
                   spec.mask);
    TS_CHECK_DEVICE(spec.mask.device().is_cpu(), kName, "expects a mask on the CPU; got ",
                    spec.mask);
  }
  for (const ByteVectors* each : {&key, &value}) {
    const Tensor& bytes = each->bytes;
    TS_CHECK_DTYPE(
        bytes.dtype() == kU8 && each->least.dtype() == kF32 && each->step.dtype() == kF32, kName,
        "expects bytes of u8 with least and step of f32; got ", bytes, ", ", each->least, " and ",
        each->step);
    TS_CHECK_SHAPE(bytes.dim() == 4 && bytes.size(0) == query.size(0) &&
                       bytes.size(1) == key.bytes.size(1) && bytes.size(2) == key.bytes.size(2) &&
                       bytes.stride(3) == 1,
                   kName, "expects bytes [", query.size(0),
                   ", Hk, S, E] alike in keys and values, each vector in one piece; got ", bytes);
    for (const Tensor& number : {each->least, each->step}) {
      TS_CHECK_SHAPE(number.dim() == 4 && number.size(3) == 1 && number.stride(2) == 1 &&
                         number.size(0) == bytes.size(0) && number.size(1) == bytes.size(1) &&
                         number.size(2) == bytes.size(2),
                     kName, "expects a number for each vector of ", bytes,
                     ", a head's in one piece; got ", number);
    }
    for (const Tensor& one : {bytes, each->least, each->step}) {
      TS_CHECK_DEVICE(one.device().is_cpu() && query.device().is_cpu(), kName,
                      "runs on a CPU; got ", query, " and ", one,
                      "; convert keys and values and call scaled_dot_product_attention");
    }
  }
  TS_CHECK_SHAPE(key.bytes.size(3) == query.size(3) && key.bytes.size(1) > 0 &&
                     query.size(1) % key.bytes.size(1) == 0,
                 kName,
                 "expects keys of the query's width, and its heads a multiple of theirs; got ",
                 query, " and ", key.bytes);
}

// Outputs and logarithms of sums without values.
AttentionResult empty_result(const Tensor& query, int64_t Ev) {
  const int64_t B = query.size(0), H = query.size(1), T = query.size(2);
  return {raw::transpose(raw::empty({B, T, H, Ev}, query.dtype(), query.device()), 1, 2),
          raw::empty({B, H, T}, compute_dtype(query.dtype()), query.device())};
}

}  // namespace

AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value,
                          const AttentionSpec& spec) {
  if (query.device().is_cuda()) {
    return on_cuda<kernels::attention>("scaled_dot_product_attention", query.device(), query, key,
                                       value, spec);
  }
  const AttentionResult result = empty_result(query, value.size(3));
  if (!query.is_meta() && result.log_sums.numel() > 0) {
    run_forward(problem_of(query, key, value, result.output, result.log_sums, spec), spec);
  }
  return result;
}

Tensor attention_of_bytes(const Tensor& query, const ByteVectors& key, const ByteVectors& value,
                          const AttentionSpec& spec) {
  check_bytes(query, key, value, spec);
  const auto [output, log_sums] = empty_result(query, value.bytes.size(3));
  if (log_sums.numel() == 0) return output;
  AttentionProblem problem = problem_of(query, key.bytes, value.bytes, output, log_sums, spec);
  problem.in_bytes = true;
  problem.in_pairs = false;
  problem.key_least = view_of(key.least), problem.key_step = view_of(key.step);
  problem.value_least = view_of(value.least), problem.value_step = view_of(value.step);
  run_forward(problem, spec);
  return output;
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
  const AttentionPieces pieces = attention_pieces(spec, B, problem.T, problem.S);
  const Tasks tasks(problem, pieces, true, [](const AttentionProblem& p) { return p.Hk; });
  tasks.run([](const AttentionProblem& p, int64_t b, int64_t head, char* scratch) {
    TS_SIMD_CALL(attention_head_backward, p, b, head, scratch);
  });
}

}  // namespace tessera::kernels
