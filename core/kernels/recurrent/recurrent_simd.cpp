#include <tessera/core/functors.h>
#include <tessera/core/kernels/common/lanes.h>
#include <tessera/core/kernels/gemm/gemm_block.h>
#include <tessera/core/kernels/gemm/gemm_dot.h>
#include <tessera/core/kernels/recurrent/recurrent_steps.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// ---- Products of a step -------------------------------------------------------------------------

// A step has few rows: a kernel for each number of them up to kStepRows, so that none are
// multiplied for nothing (the 14 rows of FmaKernel would leave a quarter of a step of 32 empty).
// Groups of rows are equal up to one.
#if defined(__AVX512F__)
inline constexpr int kStepRows = 8;
#else
inline constexpr int kStepRows = 4;
#endif
template <class C>
struct StepKernel : FmaPanels<C, kStepRows, 3> {
  static void multiply(int64_t rows, int64_t depth, const C* a, const C* b, C* c, int64_t ldc,
                       bool accumulate) {
    const auto run = [&]<int kCount>() TS_LANES {
      if constexpr (kCount <= kStepRows) {
        StepKernel::template multiply_rows<kCount>(depth, a, b, c, ldc, accumulate);
      }
    };
    switch (rows) {
      case 1:
        return run.template operator()<1>();
      case 2:
        return run.template operator()<2>();
      case 3:
        return run.template operator()<3>();
      case 4:
        return run.template operator()<4>();
      case 5:
        return run.template operator()<5>();
      case 6:
        return run.template operator()<6>();
      case 7:
        return run.template operator()<7>();
      default:
        return run.template operator()<8>();
    }
  }
};

#if defined(TESSERA_DOT_KERNEL)
struct StepDotKernel : GemmDotKernel {
  // Panels are always of kRows, the rest of them zeros.
  static void multiply(int64_t rows, int64_t depth, const Value* a, const Value* b, float* c,
                       int64_t ldc, bool accumulate) {
    if (rows == kRows) return GemmDotKernel::multiply(depth, a, b, c, ldc, accumulate);
    alignas(64) float whole[kRows * kColumns];
    GemmDotKernel::multiply(depth, a, b, whole, kColumns, false);
    for (int64_t i = 0; i < rows; ++i) {
      for (int j = 0; j < kColumns; ++j) {
        c[i * ldc + j] =
            accumulate ? c[i * ldc + j] + whole[i * kColumns + j] : whole[i * kColumns + j];
      }
    }
  }
};
#endif

// Stretches of the depth: kRows rows of one are in the L1, a panel of columns is in the L2.
constexpr int64_t kStepDepth = 1024;

// Calls f(first k, depth) for the stretches.
template <class F>
TS_HD void for_depths(int64_t depth, F&& f) {
  for (int64_t k = 0; k < depth; k += kStepDepth) {
    f(k, depth - k < kStepDepth ? depth - k : kStepDepth);
  }
}

template <class Kernel>
TS_HD int64_t groups_of(int64_t rows) {
  return (rows + Kernel::kRows - 1) / Kernel::kRows;
}

// Calls f<Kernel, T>().
template <class F>
TS_HD decltype(auto) with_step_kernel(const PackedMatrix& matrix, F&& f) {
#if defined(TESSERA_DOT_KERNEL)
  if (matrix.pairs) return f.template operator()<StepDotKernel, bf16>();
#endif
  switch (matrix.dtype) {
    case DType::kFloat64:
      return f.template operator()<StepKernel<double>, double>();
    case DType::kFloat16:
      return f.template operator()<StepKernel<float>, f16>();
    case DType::kBFloat16:
      return f.template operator()<StepKernel<float>, bf16>();
    default:
      return f.template operator()<StepKernel<float>, float>();
  }
}

template <class Kernel, class T>
void pack_matrix_with(const PackedMatrix& matrix, const T* source, int64_t k_stride,
                      int64_t column_stride, int64_t first, int64_t last) {
  constexpr int64_t kColumns = Kernel::kColumns;
  const int64_t width = round_up(matrix.columns, kColumns);
  auto* panels = static_cast<typename Kernel::Value*>(matrix.panels);
  for_depths(matrix.depth, [&](int64_t k, int64_t depth) {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t column = panel * kColumns;
      const int64_t count = matrix.columns - column < kColumns ? matrix.columns - column : kColumns;
      Kernel::pack_b(source + k * k_stride + column * column_stride, k_stride, column_stride, count,
                     depth, panels + k * width + column * Kernel::padded_depth(depth));
    }
  });
}

template <class Kernel, class T>
void pack_step_rows_with(const PackedMatrix& matrix, const T* source, int64_t row_stride,
                         int64_t rows, void* packed) {
  const int64_t groups = groups_of<Kernel>(rows);
  auto* panel = static_cast<typename Kernel::Value*>(packed);
  for_depths(matrix.depth, [&](int64_t k, int64_t depth) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = group * rows / groups, end = (group + 1) * rows / groups;
      Kernel::pack_a(source + row * row_stride + k, row_stride, 1, end - row, depth, panel);
      panel += Kernel::kRows * Kernel::padded_depth(depth);
    }
  });
}

template <class Kernel>
void multiply_step_with(const PackedMatrix& matrix, const void* packed, int64_t rows, int64_t first,
                        int64_t last, void* target, int64_t row_stride, bool accumulate) {
  using Value = typename Kernel::Value;
  using C = typename Kernel::Accumulator;
  constexpr int64_t kRows = Kernel::kRows, kColumns = Kernel::kColumns;
  const int64_t width = round_up(matrix.columns, kColumns), groups = groups_of<Kernel>(rows);
  const auto* left = static_cast<const Value*>(packed);
  const auto* right = static_cast<const Value*>(matrix.panels);
  // A panel of columns comes to the L2 once for all rows.
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t column = panel * kColumns;
    const int64_t count = matrix.columns - column < kColumns ? matrix.columns - column : kColumns;
    for_depths(matrix.depth, [&](int64_t k, int64_t depth) {
      const int64_t padded = Kernel::padded_depth(depth);
      const Value* b = right + k * width + column * padded;
      const bool adds = accumulate || k > 0;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = group * rows / groups, end = (group + 1) * rows / groups;
        const Value* a = left + (k * groups + group * padded) * kRows;
        C* c = static_cast<C*>(target) + row * row_stride + column;
        if (count == kColumns) {
          Kernel::multiply(end - row, padded, a, b, c, row_stride, adds);
          continue;
        }
        alignas(64) C edge[kRows * kColumns];
        Kernel::multiply(end - row, padded, a, b, edge, kColumns, false);
        for (int64_t i = 0; i < end - row; ++i) {
          for (int64_t j = 0; j < count; ++j) {
            C& to = c[i * row_stride + j];
            to = adds ? to + edge[i * kColumns + j] : edge[i * kColumns + j];
          }
        }
      }
    });
  }
}

// ---- Between products ---------------------------------------------------------------------------

template <class C>
TS_HD C sigmoid_of(C x) {
  return fn::Sigmoid{}(x);
}

// Calls f(first, count) for the blocks of H units.
template <class F>
TS_HD void for_units(int64_t H, F&& f) {
  for (int64_t begin = 0; begin < H; begin += kBlock) {
    f(begin, H - begin < kBlock ? H - begin : kBlock);
  }
}

template <class T>
void lstm_step_of(const LstmStep& s) {
  using C = Compute<T>;
  const int64_t H = s.H;
  C buffer[kBlock];
  for (int64_t row = 0; row < s.rows; ++row) {
    for_units(H, [&](int64_t begin, int64_t count) TS_LANES {
      C* const in = static_cast<C*>(s.gates) + row * 4 * H + begin;
      C *const forget = in + H, *const fresh = in + 2 * H, *const out = in + 3 * H;
      const C* const sums = static_cast<const C*>(s.products) + row * 4 * H + begin;
      C* const cell = static_cast<C*>(s.cell) + row * H + begin;
      T* const hidden = static_cast<T*>(s.hidden) + row * H + begin;
      C* const h = stage_for_write<C>(hidden, static_cast<C*>(buffer));
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const C i = sigmoid_of(in[j] + sums[j]), f = sigmoid_of(forget[j] + sums[H + j]);
        const C g = math::tanh(fresh[j] + sums[2 * H + j]),
                o = sigmoid_of(out[j] + sums[3 * H + j]);
        const C c = f * cell[j] + i * g;
        in[j] = i, forget[j] = f, fresh[j] = g, out[j] = o;
        cell[j] = c;
        h[j] = o * math::tanh(c);
      }
      stage_out<C>(hidden, count, static_cast<const C*>(buffer));
      __builtin_memcpy(static_cast<T*>(s.output) + row * H + begin, hidden,
                       static_cast<size_t>(count) * sizeof(T));
      if (s.cells != nullptr) {
        __builtin_memcpy(static_cast<C*>(s.cells) + row * H + begin, cell,
                         static_cast<size_t>(count) * sizeof(C));
      }
    });
  }
}

template <class T>
void lstm_step_gradient_of(const LstmStepGradient& s) {
  using C = Compute<T>;
  const int64_t H = s.H;
  C incoming[kBlock], staged[4][kBlock];
  for (int64_t row = 0; row < s.rows; ++row) {
    for_units(H, [&](int64_t begin, int64_t count) TS_LANES {
      const C* const in = static_cast<const C*>(s.gates) + row * 4 * H + begin;
      const C *const forget = in + H, *const fresh = in + 2 * H, *const out = in + 3 * H;
      const C* const cell = static_cast<const C*>(s.cell) + row * H + begin;
      const C* const before = static_cast<const C*>(s.cell_before) + row * H + begin;
      const C* const later = static_cast<const C*>(s.grad_hidden) + row * H + begin;
      C* const grad_cell = static_cast<C*>(s.grad_cell) + row * H + begin;
      T* const grad = static_cast<T*>(s.grad_gates) + row * 4 * H + begin;
      if (s.grad_output != nullptr) {
        const T* const dy = static_cast<const T*>(s.grad_output) + row * H + begin;
        for (int64_t j = 0; j < count; ++j) incoming[j] = later[j] + load<C>(dy[j]);
      } else {
        __builtin_memcpy(incoming, later, static_cast<size_t>(count) * sizeof(C));
      }
      C* const d_in = stage_for_write<C>(grad, static_cast<C*>(staged[0]));
      C* const d_forget = stage_for_write<C>(grad + H, static_cast<C*>(staged[1]));
      C* const d_fresh = stage_for_write<C>(grad + 2 * H, static_cast<C*>(staged[2]));
      C* const d_out = stage_for_write<C>(grad + 3 * H, static_cast<C*>(staged[3]));
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const C i = in[j], f = forget[j], g = fresh[j], o = out[j];
        const C bent = math::tanh(cell[j]), dh = incoming[j];
        const C dc = grad_cell[j] + dh * o * (C(1) - bent * bent);
        grad_cell[j] = dc * f;
        d_in[j] = dc * g * ((C(1) - i) * i);
        d_forget[j] = dc * before[j] * ((C(1) - f) * f);
        d_fresh[j] = dc * i * (C(1) - g * g);
        d_out[j] = dh * bent * ((C(1) - o) * o);
      }
      for (int gate = 0; gate < 4; ++gate) {
        stage_out<C>(grad + gate * H, count, static_cast<const C*>(staged[gate]));
      }
    });
  }
}

template <class T>
void gru_step_of(const GruStep& s) {
  using C = Compute<T>;
  const int64_t H = s.H;
  C staged[kBlock], result[kBlock], sums_new[kBlock];
  for (int64_t row = 0; row < s.rows; ++row) {
    for_units(H, [&](int64_t begin, int64_t count) TS_LANES {
      C* const reset = static_cast<C*>(s.gates) + row * 3 * H + begin;
      C *const update = reset + H, *const fresh = reset + 2 * H;
      const C* const sums = static_cast<const C*>(s.products) + row * 3 * H + begin;
      T* const hidden = static_cast<T*>(s.hidden) + row * H + begin;
      const C* const before = stage_in<C>(hidden, count, static_cast<C*>(staged));
      C* const h = stage_for_write<C>(hidden, static_cast<C*>(result));
      C* const recurrent = s.recurrent_new != nullptr
                               ? static_cast<C*>(s.recurrent_new) + row * H + begin
                               : static_cast<C*>(sums_new);
      if (s.bias_new != nullptr) {
        const C* const bias = static_cast<const C*>(s.bias_new) + begin;
        for (int64_t j = 0; j < count; ++j) recurrent[j] = sums[2 * H + j] + bias[j];
      } else {
        __builtin_memcpy(recurrent, sums + 2 * H, static_cast<size_t>(count) * sizeof(C));
      }
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const C r = sigmoid_of(reset[j] + sums[j]), z = sigmoid_of(update[j] + sums[H + j]);
        const C n = math::tanh(fresh[j] + r * recurrent[j]);
        reset[j] = r, update[j] = z, fresh[j] = n;
        h[j] = n + z * (before[j] - n);
      }
      stage_out<C>(hidden, count, static_cast<const C*>(result));
      __builtin_memcpy(static_cast<T*>(s.output) + row * H + begin, hidden,
                       static_cast<size_t>(count) * sizeof(T));
    });
  }
}

template <class T>
void gru_step_gradient_of(const GruStepGradient& s) {
  using C = Compute<T>;
  const int64_t H = s.H;
  C incoming[kBlock], staged[kBlock], grads[4][kBlock];
  for (int64_t row = 0; row < s.rows; ++row) {
    for_units(H, [&](int64_t begin, int64_t count) TS_LANES {
      const C* const reset = static_cast<const C*>(s.gates) + row * 3 * H + begin;
      const C *const update = reset + H, *const fresh = reset + 2 * H;
      const C* const recurrent = static_cast<const C*>(s.recurrent_new) + row * H + begin;
      const C* const before = stage_in<C>(static_cast<const T*>(s.hidden_before) + row * H + begin,
                                          count, static_cast<C*>(staged));
      C* const grad_hidden = static_cast<C*>(s.grad_hidden) + row * H + begin;
      T* const grad_input = static_cast<T*>(s.grad_input) + row * 3 * H + begin;
      T* const grad_recurrent = static_cast<T*>(s.grad_recurrent) + row * 3 * H + begin;
      if (s.grad_output != nullptr) {
        const T* const dy = static_cast<const T*>(s.grad_output) + row * H + begin;
        for (int64_t j = 0; j < count; ++j) incoming[j] = grad_hidden[j] + load<C>(dy[j]);
      } else {
        __builtin_memcpy(incoming, grad_hidden, static_cast<size_t>(count) * sizeof(C));
      }
      C* const d_reset = stage_for_write<C>(grad_input, static_cast<C*>(grads[0]));
      C* const d_update = stage_for_write<C>(grad_input + H, static_cast<C*>(grads[1]));
      C* const d_fresh = stage_for_write<C>(grad_input + 2 * H, static_cast<C*>(grads[2]));
      C* const d_recurrent = stage_for_write<C>(grad_recurrent + 2 * H, static_cast<C*>(grads[3]));
#pragma GCC ivdep
      for (int64_t j = 0; j < count; ++j) {
        const C r = reset[j], z = update[j], n = fresh[j], dh = incoming[j];
        const C dn = dh * (C(1) - z) * (C(1) - n * n);
        grad_hidden[j] = dh * z;
        d_reset[j] = dn * recurrent[j] * ((C(1) - r) * r);
        d_update[j] = dh * (before[j] - n) * ((C(1) - z) * z);
        d_fresh[j] = dn;
        d_recurrent[j] = dn * r;
      }
      for (int gate = 0; gate < 3; ++gate) {
        stage_out<C>(grad_input + gate * H, count, static_cast<const C*>(grads[gate]));
      }
      stage_out<C>(grad_recurrent + 2 * H, count, static_cast<const C*>(grads[3]));
      for (int gate = 0; gate < 2; ++gate) {
        __builtin_memcpy(grad_recurrent + gate * H, grad_input + gate * H,
                         static_cast<size_t>(count) * sizeof(T));
      }
    });
  }
}

}  // namespace

int64_t packed_matrix_bytes(const PackedMatrix& matrix) {
  return with_step_kernel(matrix, [&]<class Kernel, class T>() -> int64_t {
    return round_up(matrix.columns, Kernel::kColumns) * round_up(matrix.depth, 2) *
           static_cast<int64_t>(sizeof(typename Kernel::Value));
  });
}
int64_t packed_rows_bytes(const PackedMatrix& matrix, int64_t rows) {
  return with_step_kernel(matrix, [&]<class Kernel, class T>() -> int64_t {
    return round_up(rows, Kernel::kRows) * round_up(matrix.depth, 2) *
           static_cast<int64_t>(sizeof(typename Kernel::Value));
  });
}
int64_t panels_of(const PackedMatrix& matrix) {
  return with_step_kernel(matrix, [&]<class Kernel, class T>() -> int64_t {
    return (matrix.columns + Kernel::kColumns - 1) / Kernel::kColumns;
  });
}
void pack_matrix(const PackedMatrix& matrix, const void* source, int64_t k_stride,
                 int64_t column_stride, int64_t first, int64_t last) {
  with_step_kernel(matrix, [&]<class Kernel, class T>() {
    pack_matrix_with<Kernel>(matrix, static_cast<const T*>(source), k_stride, column_stride, first,
                             last);
  });
}
void pack_step_rows(const PackedMatrix& matrix, const void* source, int64_t row_stride,
                    int64_t rows, void* packed) {
  with_step_kernel(matrix, [&]<class Kernel, class T>() {
    pack_step_rows_with<Kernel>(matrix, static_cast<const T*>(source), row_stride, rows, packed);
  });
}
void multiply_step(const PackedMatrix& matrix, const void* packed, int64_t rows, int64_t first,
                   int64_t last, void* target, int64_t row_stride, bool accumulate) {
  with_step_kernel(matrix, [&]<class Kernel, class T>() {
    multiply_step_with<Kernel>(matrix, packed, rows, first, last, target, row_stride, accumulate);
  });
}

void lstm_step(const LstmStep& step) {
  visit_floating(step.dtype, [&]<class T>() { lstm_step_of<T>(step); });
}
void lstm_step_gradient(const LstmStepGradient& step) {
  visit_floating(step.dtype, [&]<class T>() { lstm_step_gradient_of<T>(step); });
}
void gru_step(const GruStep& step) {
  visit_floating(step.dtype, [&]<class T>() { gru_step_of<T>(step); });
}
void gru_step_gradient(const GruStepGradient& step) {
  visit_floating(step.dtype, [&]<class T>() { gru_step_gradient_of<T>(step); });
}

}  // namespace tessera::kernels::TS_SIMD
