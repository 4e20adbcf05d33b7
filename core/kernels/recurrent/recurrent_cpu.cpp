#include <algorithm>
#include <cstring>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/common/scratch.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/recurrent/recurrent.h>
#include <tessera/core/kernels/recurrent/recurrent_steps.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

// The steps of a direction, in the order in which they are taken.
struct StepWalk {
  struct Step {
    int64_t offset;  // of its first row
    int64_t size;    // sequences that reach it
    // The step that was taken before, and how many of its sequences go on; those above start here.
    int64_t before_offset;
    int64_t going_on;
  };
  std::vector<Step> steps;
  int64_t rows = 0;

  StepWalk(const std::vector<int64_t>& sizes, bool reverse) {
    for (const int64_t size : sizes) {
      steps.push_back({rows, size, 0, 0});
      rows += size;
    }
    if (reverse) std::reverse(steps.begin(), steps.end());
    for (size_t i = 1; i < steps.size(); ++i) {
      steps[i].before_offset = steps[i - 1].offset;
      steps[i].going_on = std::min(steps[i].size, steps[i - 1].size);
    }
  }
};

char* step_at(const Tensor& x, int64_t elements) {
  return static_cast<char*>(x.data()) + elements * size_of(x.dtype());
}

bool multiplies_pairs(DType dtype) {
  return dtype == kBF16 && cpu_isa() >= Isa::kBf16 && has_isa(Isa::kBf16);
}

// A matrix (depth, columns), packed for all steps.
class StepMatrix {
 public:
  StepMatrix(const Tensor& source, bool transposed)
      : matrix_{source.dtype(), multiplies_pairs(source.dtype()), source.size(transposed ? 1 : 0),
                source.size(transposed ? 0 : 1), nullptr},
        panels_(TS_SIMD_CALL(panels_of, matrix_)),
        memory_(1, TS_SIMD_CALL(packed_matrix_bytes, matrix_)) {
    matrix_.panels = memory_.take();
    const int64_t k_stride = source.stride(transposed ? 1 : 0);
    const int64_t column_stride = source.stride(transposed ? 0 : 1);
    parallel_for(panels_, grain(1), [&](int64_t first, int64_t last) {
      TS_SIMD_CALL(pack_matrix, matrix_, source.data(), k_stride, column_stride, first, last);
    });
  }
  const PackedMatrix& matrix() const { return matrix_; }
  int64_t panels() const { return panels_; }
  // Panels that make a thread's share for `rows` rows worth its start.
  int64_t grain(int64_t rows) const {
    constexpr int64_t kLeastWork = 1 << 16;
    const int64_t work = rows * matrix_.depth * (matrix_.columns / std::max<int64_t>(1, panels_));
    return std::max<int64_t>(1, kLeastWork / std::max<int64_t>(1, work));
  }
  double work(int64_t rows) const {
    return static_cast<double>(rows) * static_cast<double>(matrix_.depth) *
           static_cast<double>(matrix_.columns);
  }

 private:
  PackedMatrix matrix_;
  int64_t panels_;
  Scratch memory_;
};

// Where the rows of a step's product come from and go to.
struct StepRows {
  const Tensor& source;  // (.., depth) of T
  bool by_step;          // source's rows are those of all steps, else those of the sequences
  // (.., columns) of C: rows of the sequences; null: scratch, of whose rows the first belongs to
  // the first sequence that is asked for.
  const Tensor* target;
  bool accumulate;
};

// Calls before(step, first, last) and then after(step, first, last, products) for sequences [first,
// last) of each step, with the product between them. Sequences do not depend on each other: threads
// share them out and go through all steps alone; where they are too few for that and a step is
// worth it, threads meet at each step and share out its columns, too. Bits are the same.
template <class Before, class After>
void walk_steps(const std::vector<StepWalk::Step>& steps, int64_t N, const StepMatrix& matrix,
                const StepRows& rows, Before&& before, After&& after) {
  const PackedMatrix& m = matrix.matrix();
  const int64_t sum_size = m.dtype == kF64 ? 8 : 4;
  const int64_t packed_bytes = (TS_SIMD_CALL(packed_rows_bytes, m, N) + 63) / 64 * 64;
  const int64_t product_bytes = rows.target != nullptr ? 0 : N * m.columns * sum_size;
  const auto source = [&](const StepWalk::Step& step, int64_t first) {
    return step_at(rows.source, ((rows.by_step ? step.offset : 0) + first) * m.depth);
  };
  const auto product = [&](char* scratch, int64_t first) {
    return rows.target != nullptr ? step_at(*rows.target, first * m.columns)
                                  : scratch + packed_bytes;
  };
  constexpr int64_t kLeastRows = 4;
  constexpr double kLeastStep = 2e6;  // multiplications, a twentieth of a millisecond
  const int64_t threads = in_parallel_region() ? 1 : num_threads();
  if (threads > 1 && N < kLeastRows * threads && matrix.work(N) >= kLeastStep) {
    Scratch memory(1, packed_bytes + product_bytes);
    char* const scratch = memory.take();
    for (const StepWalk::Step& step : steps) {
      const int64_t row_grain = (step.size + threads - 1) / threads;
      parallel_for(step.size, row_grain,
                   [&](int64_t first, int64_t last) { before(step, first, last); });
      TS_SIMD_CALL(pack_step_rows, m, source(step, 0), m.depth, step.size, scratch);
      parallel_for(matrix.panels(), matrix.grain(step.size), [&](int64_t first, int64_t last) {
        TS_SIMD_CALL(multiply_step, m, scratch, step.size, first, last, product(scratch, 0),
                     m.columns, rows.accumulate);
      });
      parallel_for(step.size, row_grain, [&](int64_t first, int64_t last) {
        after(step, first, last, product(scratch, 0) + first * m.columns * sum_size);
      });
    }
    return;
  }
  constexpr double kLeastWork = 1e6;
  const double work = matrix.work(1) * static_cast<double>(steps.size());
  const int64_t grain =
      std::max({kLeastRows, (N + threads - 1) / threads,
                static_cast<int64_t>(std::min(kLeastWork / std::max(1.0, work), 1e9))});
  Scratch memory((N + grain - 1) / grain, packed_bytes + product_bytes);
  parallel_for(N, grain, [&](int64_t first, int64_t end) {
    char* const scratch = memory.take();
    for (const StepWalk::Step& step : steps) {
      const int64_t last = std::min(end, step.size);
      if (last <= first) continue;
      before(step, first, last);
      TS_SIMD_CALL(pack_step_rows, m, source(step, first), m.depth, last - first, scratch);
      char* const products = product(scratch, first);
      TS_SIMD_CALL(multiply_step, m, scratch, last - first, int64_t{0}, matrix.panels(), products,
                   m.columns, rows.accumulate);
      after(step, first, last, products);
    }
  });
}

// A copy in the compute dtype, or zeros of `shape` where x is undefined.
Tensor state_copy(const Tensor& x, const Shape& shape, DType compute) {
  if (!x.defined()) return raw::zeros(shape, compute);
  return contiguous(x.dtype() == compute ? copy(contiguous(x)) : convert(x, compute));
}

// The biases of the input's sums: both, but for the new gate of a GRU, whose recurrent one stays
// with its product.
struct StepBiases {
  Tensor sums;   // (G H) of C
  Tensor fresh;  // (H) of C; of a GRU
};
StepBiases step_biases(const RecurrentLayerInputs& in, int64_t H, DType compute) {
  if (!in.bias_ih.defined()) return {};
  StepBiases biases{state_copy(in.bias_ih, {}, compute), {}};
  const Tensor recurrent = state_copy(in.bias_hh, {}, compute);
  const bool is_gru = in.kind == RecurrentCell::kGru;
  with_compute(compute, [&]<class C>() {
    C* const sums = biases.sums.data_as<C>();
    const C* const more = recurrent.data_as<C>();
    const int64_t count = (is_gru ? 2 : 4) * H;
    for (int64_t i = 0; i < count; ++i) sums[i] += more[i];
  });
  if (is_gru) biases.fresh = raw::narrow(recurrent, 0, 2 * H, H);
  return biases;
}

// Of each row the state before its step: where the weights' gradient is one product.
Tensor states_before(const StepWalk& walk, const Tensor& first_hidden, const Tensor& output) {
  const int64_t H = output.size(1);
  const Tensor first = contiguous(first_hidden);
  const Tensor result = raw::empty({walk.rows, H}, output.dtype());
  const auto copy_rows = [&](const Tensor& from, int64_t row, int64_t to, int64_t count) {
    if (count <= 0) return;
    std::memcpy(step_at(result, to * H), step_at(from, row * H),
                static_cast<size_t>(count * H * size_of(output.dtype())));
  };
  for (const StepWalk::Step& step : walk.steps) {
    copy_rows(output, step.before_offset, step.offset, step.going_on);
    copy_rows(first, step.going_on, step.offset + step.going_on, step.size - step.going_on);
  }
  return result;
}

void nothing_before(const StepWalk::Step&, int64_t, int64_t) {}

}  // namespace

RecurrentLayerResult recurrent_layer(const RecurrentLayerInputs& in, bool keep) {
  const StepWalk walk(in.batch_sizes, in.reverse);
  const int64_t N = in.hidden.size(0), H = in.hidden.size(1), G = gates_of(in.kind);
  const DType dtype = in.x.dtype(), compute = compute_dtype(dtype);
  const bool is_lstm = in.kind == RecurrentCell::kLstm;
  if (in.x.is_meta()) {
    const auto made = [&](const Shape& shape, DType type) {
      return raw::empty(shape, type, in.x.device());
    };
    return {made({walk.rows, H}, dtype), made({N, H}, dtype),
            is_lstm ? made({N, H}, dtype) : Tensor(),
            keep ? made({walk.rows, G * H}, compute) : Tensor(),
            keep ? made({walk.rows, H}, compute) : Tensor()};
  }
  const StepBiases biases = step_biases(in, H, compute);
  const Tensor gates = raw::empty({walk.rows, G * H}, compute);
  gemm({.m = walk.rows,
        .n = G * H,
        .k = in.x.size(1),
        .dtype = dtype,
        .result_dtype = compute,
        .a = {in.x.data(), in.x.stride(0), in.x.stride(1)},
        .b = {in.weight_ih.data(), in.weight_ih.stride(1), in.weight_ih.stride(0)},
        .c = gates.data(),
        .c_row_stride = G * H,
        .bias = biases.sums.defined() ? biases.sums.data() : nullptr,
        .bias_kind = biases.sums.defined() ? GemmBias::kColumn : GemmBias::kNone});
  const Tensor hidden = copy(contiguous(in.hidden)), output = raw::empty({walk.rows, H}, dtype);
  const Tensor cell = is_lstm ? state_copy(in.cell, {N, H}, compute) : Tensor();
  const Tensor kept = keep ? raw::empty({walk.rows, H}, compute) : Tensor();
  const StepMatrix recurrent(in.weight_hh, true);
  walk_steps(walk.steps, N, recurrent, {hidden, false, nullptr, false}, nothing_before,
             [&](const StepWalk::Step& step, int64_t first, int64_t last, const char* products) {
               const int64_t row = step.offset + first;
               void* const keeps = keep ? step_at(kept, row * H) : nullptr;
               if (is_lstm) {
                 TS_SIMD_CALL(lstm_step,
                              LstmStep{dtype, last - first, H, step_at(gates, row * G * H),
                                       products, step_at(cell, first * H), keeps,
                                       step_at(hidden, first * H), step_at(output, row * H)});
               } else {
                 TS_SIMD_CALL(gru_step,
                              GruStep{dtype, last - first, H, step_at(gates, row * G * H), products,
                                      biases.fresh.defined() ? biases.fresh.data() : nullptr, keeps,
                                      step_at(hidden, first * H), step_at(output, row * H)});
               }
             });
  return {output, hidden, is_lstm && compute != dtype ? convert(cell, dtype) : cell,
          keep ? gates : Tensor(), kept};
}

RecurrentLayerGradients recurrent_layer_backward(const RecurrentLayerInputs& in,
                                                 const RecurrentLayerSaved& saved,
                                                 const RecurrentLayerWanted& wanted) {
  const StepWalk walk(in.batch_sizes, in.reverse);
  const int64_t N = in.hidden.size(0), H = in.hidden.size(1), G = gates_of(in.kind);
  const DType dtype = in.x.dtype(), compute = compute_dtype(dtype);
  const bool is_lstm = in.kind == RecurrentCell::kLstm;
  if (in.x.is_meta()) {
    const auto like = [](const Tensor& x, bool is_wanted) {
      return is_wanted ? raw::empty_like(x) : Tensor();
    };
    return {like(in.x, wanted.x),
            like(in.weight_ih, wanted.weight_ih),
            like(in.weight_hh, wanted.weight_hh),
            like(in.bias_ih, wanted.bias_ih),
            like(in.bias_hh, wanted.bias_hh),
            raw::empty_like(in.hidden),
            is_lstm ? raw::empty_like(in.cell) : Tensor()};
  }
  const Tensor grad_output = saved.grad_output.defined() ? contiguous(saved.grad_output) : Tensor();
  const Tensor grad_hidden = state_copy(saved.grad_hidden, {N, H}, compute);
  const Tensor grad_cell = is_lstm ? state_copy(saved.grad_cell, {N, H}, compute) : Tensor();
  const Tensor first_cell = is_lstm ? state_copy(in.cell, {N, H}, compute) : Tensor();
  const Tensor first_hidden = contiguous(in.hidden);
  // Of the input's sums and of the recurrent ones; those of an LSTM are one.
  const Tensor grad_sums = raw::empty({walk.rows, G * H}, dtype);
  const Tensor grad_recurrent = is_lstm ? grad_sums : raw::empty({walk.rows, G * H}, dtype);
  const auto gates_step = [&](const StepWalk::Step& step, int64_t first, int64_t last) {
    // Sequences that come from an earlier step, then those that start here.
    const int64_t middle = std::clamp(step.going_on, first, last);
    const auto part = [&](int64_t begin, int64_t end, bool goes_on) {
      if (end <= begin) return;
      const int64_t row = step.offset + begin, row_before = step.before_offset + begin;
      const void* const dy = grad_output.defined() ? step_at(grad_output, row * H) : nullptr;
      if (is_lstm) {
        TS_SIMD_CALL(
            lstm_step_gradient,
            LstmStepGradient{
                dtype, end - begin, H, step_at(saved.gates, row * G * H),
                step_at(saved.kept, row * H),
                goes_on ? step_at(saved.kept, row_before * H) : step_at(first_cell, begin * H), dy,
                step_at(grad_hidden, begin * H), step_at(grad_cell, begin * H),
                step_at(grad_sums, row * G * H)});
      } else {
        TS_SIMD_CALL(
            gru_step_gradient,
            GruStepGradient{
                dtype, end - begin, H, step_at(saved.gates, row * G * H),
                step_at(saved.kept, row * H),
                goes_on ? step_at(saved.output, row_before * H) : step_at(first_hidden, begin * H),
                dy, step_at(grad_hidden, begin * H), step_at(grad_sums, row * G * H),
                step_at(grad_recurrent, row * G * H)});
      }
    };
    part(first, middle, true);
    part(middle, last, false);
  };
  {
    const StepMatrix recurrent(in.weight_hh, false);
    const std::vector<StepWalk::Step> back(walk.steps.rbegin(), walk.steps.rend());
    walk_steps(back, N, recurrent, {grad_recurrent, true, &grad_hidden, !is_lstm}, gates_step,
               [](const StepWalk::Step&, int64_t, int64_t, const char*) {});
  }
  const auto back_to = [&](const Tensor& gradient) {
    return compute == dtype ? gradient : convert(gradient, dtype);
  };
  RecurrentLayerGradients result;
  result.hidden = back_to(grad_hidden);
  if (is_lstm) result.cell = back_to(grad_cell);
  const auto product = [](const Tensor& gradient, const Tensor& operand) {
    return matmul(raw::transpose(gradient, 0, 1), operand);
  };
  if (wanted.x) result.x = matmul(grad_sums, in.weight_ih);
  if (wanted.weight_ih) result.weight_ih = product(grad_sums, in.x);
  if (wanted.weight_hh) {
    result.weight_hh = product(grad_recurrent, states_before(walk, first_hidden, saved.output));
  }
  if (wanted.bias_ih) result.bias_ih = sum(grad_sums, {0}, false, dtype);
  if (wanted.bias_hh) {
    result.bias_hh =
        is_lstm && wanted.bias_ih ? copy(result.bias_ih) : sum(grad_recurrent, {0}, false, dtype);
  }
  return result;
}

}  // namespace tessera::kernels
