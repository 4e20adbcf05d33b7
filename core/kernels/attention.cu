// Attention without a library and without tensor cores: one block for each row of queries (and, in
// backward, of keys), scores in shared memory. It serves any mask, dropout, grouped heads and every
// dtype where a faster path does not, and is what the emulation runs. Sums have a fixed order.
#include <tessera/core/kernels/attention.h>

#include <cmath>

#include <tessera/core/factory.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/math.h>
#include <tessera/core/raw_views.h>
#include <tessera/core/kernels/rows.cuh>

namespace tessera::kernels {
namespace {

// Threads for a row of n scores.
unsigned threads_for(int64_t n) { return row_threads(n) < 128 ? row_threads(n) : 128; }

template <class T>
struct View {  // [B, H, rows, columns], strides in elements
  T* data;
  int64_t batch, head, row, column;
  TS_DEVICE T* at(int64_t b, int64_t h, int64_t r) const {
    return data + b * batch + h * head + r * row;
  }
};
template <class T>
View<T> view_of(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.data_as<T>(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

struct Problem {
  int64_t H, group, T, S, E, Ev;  // group: query heads of a key head
  double scale, dropout;
  bool causal, has_mask;
  DType mask_dtype;
  View<char> mask;  // its strides in bytes
  RandomStream stream;
};

// scale q k + mask, or -infinity where the query does not see the key.
template <class T>
TS_DEVICE Compute<T> score(const Problem& p, const T* q, int64_t q_column, const T* k,
                           int64_t k_column, int64_t b, int64_t h, int64_t t, int64_t s) {
  using A = Compute<T>;
  if (p.causal && s > t) return -static_cast<A>(INFINITY);
  A added = 0;
  if (p.has_mask) {
    const char* const m = p.mask.at(b, h, t) + s * p.mask.column;
    switch (p.mask_dtype) {
      case kBool:
        if (!*reinterpret_cast<const bool*>(m)) return -static_cast<A>(INFINITY);
        break;
      case kF64:
        added = static_cast<A>(*reinterpret_cast<const double*>(m));
        break;
      case kF32:
        added = static_cast<A>(*reinterpret_cast<const float*>(m));
        break;
      case kBF16:
        added = static_cast<A>(to_float(*reinterpret_cast<const bf16*>(m)));
        break;
      default:
        added = static_cast<A>(to_float(*reinterpret_cast<const f16*>(m)));
    }
  }
  A sum = 0;
  for (int64_t e = 0; e < p.E; ++e) sum += load<A>(q[e * q_column]) * load<A>(k[e * k_column]);
  return sum * static_cast<A>(p.scale) + added;
}

// What dropout multiplies a probability with.
template <class A>
TS_DEVICE A kept(const Problem& p, int64_t b, int64_t h, int64_t t, int64_t s) {
  if (p.dropout <= 0) return A(1);
  const int64_t element = ((b * p.H + h) * p.T + t) * p.S + s;
  const auto drawn = philox4x32(p.stream.seed, p.stream.stream, static_cast<uint64_t>(element) / 4);
  const float u = uniform_from_bits(drawn[static_cast<size_t>(element % 4)]);
  if (u < static_cast<float>(p.dropout)) return A(0);
  return static_cast<A>(p.dropout < 1 ? 1 / (1 - p.dropout) : 0);
}

// A block for each (b, h, t).
template <class T>
__global__ void attention_kernel(const Problem p, const View<T> query, const View<T> key,
                                 const View<T> value, const View<T> output, Compute<T>* log_sums) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(A, slot);
  TS_REDUCE_SLOT(double, sum_slot);
  A* const scores = gpu::dynamic_shared<A>();  // (S)
  const int64_t row = blockIdx.x, t = row % p.T, h = row / p.T % p.H, b = row / p.T / p.H;
  const T* const q = query.at(b, h, t);
  A largest = -static_cast<A>(INFINITY);
  for (int64_t s = threadIdx.x; s < p.S; s += blockDim.x) {
    scores[s] = score(p, q, query.column, key.at(b, h / p.group, s), key.column, b, h, t, s);
    largest = gpu::Larger{}(largest, scores[s]);
  }
  largest = gpu::block_reduce(largest, gpu::Larger{}, -static_cast<A>(INFINITY), slot);
  T* const out = output.at(b, h, t);
  if (largest == -static_cast<A>(INFINITY)) {  // no key: the whole block
    for (int64_t e = threadIdx.x; e < p.Ev; e += blockDim.x)
      out[e * output.column] = store<T>(A(0));
    if (threadIdx.x == 0) log_sums[row] = static_cast<A>(INFINITY);
    return;
  }
  double sum = 0;
  for (int64_t s = threadIdx.x; s < p.S; s += blockDim.x) {
    scores[s] = math::exp(scores[s] - largest);
    sum += static_cast<double>(scores[s]);
  }
  sum = gpu::block_reduce(sum, gpu::Plus{}, 0.0, sum_slot);
  if (threadIdx.x == 0) {
    log_sums[row] = static_cast<A>(static_cast<double>(largest) + ::log(sum));
  }
  const A scale = static_cast<A>(1 / sum);
  if (p.dropout > 0) {
    for (int64_t s = threadIdx.x; s < p.S; s += blockDim.x) scores[s] *= kept<A>(p, b, h, t, s);
  }
  __syncthreads();
  const T* const v = value.at(b, h / p.group, 0);
  for (int64_t e = threadIdx.x; e < p.Ev; e += blockDim.x) {
    A total = 0;
    for (int64_t s = 0; s < p.S; ++s) {
      total += scores[s] * load<A>(v[s * value.row + e * value.column]);
    }
    out[e * output.column] = store<T>(total * scale);
  }
}

template <class T>
struct Gradients {
  View<T> query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  const Compute<T>* log_sums;  // (B, H, T)
  Compute<T>* deltas;          // (B, H, T): sum of dy y
};

// exp(score - log sum) of one pair; 0 where the row sees no key.
template <class T>
TS_DEVICE Compute<T> probability(const Problem& p, const Gradients<T>& g, int64_t b, int64_t h,
                                 int64_t t, int64_t s) {
  const Compute<T> value = score(p, g.query.at(b, h, t), g.query.column,
                                 g.key.at(b, h / p.group, s), g.key.column, b, h, t, s);
  return math::exp(value - g.log_sums[(b * p.H + h) * p.T + t]);
}

template <class T>
TS_DEVICE Compute<T> grad_probability(const Problem& p, const Gradients<T>& g, int64_t b, int64_t h,
                                      int64_t t, int64_t s) {
  using A = Compute<T>;
  const T* const dy = g.grad_output.at(b, h, t);
  const T* const v = g.value.at(b, h / p.group, s);
  A sum = 0;
  for (int64_t e = 0; e < p.Ev; ++e) {
    sum += load<A>(dy[e * g.grad_output.column]) * load<A>(v[e * g.value.column]);
  }
  return sum * kept<A>(p, b, h, t, s);
}

// A block for each (b, h, t): its delta and grad_query.
template <class T>
__global__ void query_gradient_kernel(const Problem p, const Gradients<T> g) {
  using A = Compute<T>;
  TS_REDUCE_SLOT(A, slot);
  A* const grad_scores = gpu::dynamic_shared<A>();  // (S)
  const int64_t row = blockIdx.x, t = row % p.T, h = row / p.T % p.H, b = row / p.T / p.H;
  const T* const dy = g.grad_output.at(b, h, t);
  const T* const y = g.output.at(b, h, t);
  A delta = 0;
  for (int64_t e = threadIdx.x; e < p.Ev; e += blockDim.x) {
    delta += load<A>(dy[e * g.grad_output.column]) * load<A>(y[e * g.output.column]);
  }
  delta = gpu::block_reduce(delta, gpu::Plus{}, A(0), slot);
  if (threadIdx.x == 0) g.deltas[row] = delta;
  for (int64_t s = threadIdx.x; s < p.S; s += blockDim.x) {
    const A weight = probability(p, g, b, h, t, s);
    grad_scores[s] = weight == A(0) ? A(0) : weight * (grad_probability(p, g, b, h, t, s) - delta);
  }
  __syncthreads();
  const T* const k = g.key.at(b, h / p.group, 0);
  T* const dq = g.grad_query.at(b, h, t);
  for (int64_t e = threadIdx.x; e < p.E; e += blockDim.x) {
    A total = 0;
    for (int64_t s = 0; s < p.S; ++s) {
      total += grad_scores[s] * load<A>(k[s * g.key.row + e * g.key.column]);
    }
    dq[e * g.grad_query.column] = store<T>(total * static_cast<A>(p.scale));
  }
}

// A block for each (b, key head, s): grad_key and grad_value, summed over the group's heads and all
// queries in their order. deltas are there by now.
template <class T>
__global__ void key_gradient_kernel(const Problem p, const Gradients<T> g) {
  using A = Compute<T>;
  A* const weights = gpu::dynamic_shared<A>();  // (T) after dropout
  A* const grad_scores = weights + p.T;         // (T)
  const int64_t Hk = p.H / p.group;
  const int64_t s = blockIdx.x % p.S, hk = blockIdx.x / p.S % Hk, b = blockIdx.x / p.S / Hk;
  T* const dk = g.grad_key.at(b, hk, s);
  T* const dv = g.grad_value.at(b, hk, s);
  const int64_t columns = p.E > p.Ev ? p.E : p.Ev;
  // Each thread owns columns threadIdx.x, threadIdx.x + blockDim.x, ...; its sums over the heads of
  // the group stay in registers for one column at a time.
  for (int64_t first = 0; first < columns; first += blockDim.x) {
    const int64_t e = first + threadIdx.x;
    A key_sum = 0, value_sum = 0;
    for (int64_t h = hk * p.group; h < (hk + 1) * p.group; ++h) {
      for (int64_t t = threadIdx.x; t < p.T; t += blockDim.x) {
        const A weight = probability(p, g, b, h, t, s);
        const A delta = g.deltas[(b * p.H + h) * p.T + t];
        weights[t] = weight * kept<A>(p, b, h, t, s);
        grad_scores[t] =
            weight == A(0) ? A(0) : weight * (grad_probability(p, g, b, h, t, s) - delta);
      }
      __syncthreads();
      for (int64_t t = 0; t < p.T; ++t) {
        if (e < p.E) key_sum += grad_scores[t] * load<A>(g.query.at(b, h, t)[e * g.query.column]);
        if (e < p.Ev) {
          value_sum += weights[t] * load<A>(g.grad_output.at(b, h, t)[e * g.grad_output.column]);
        }
      }
      __syncthreads();
    }
    if (e < p.E) dk[e * g.grad_key.column] = store<T>(key_sum * static_cast<A>(p.scale));
    if (e < p.Ev) dv[e * g.grad_value.column] = store<T>(value_sum);
  }
}

Problem problem_of(const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionSpec& spec) {
  Problem p{.H = query.size(1),
            .group = key.size(1) == 0 ? 1 : query.size(1) / key.size(1),
            .T = query.size(2),
            .S = key.size(2),
            .E = query.size(3),
            .Ev = value.size(3),
            .scale = spec.scale,
            .dropout = spec.dropout,
            .causal = spec.causal,
            .has_mask = spec.mask.defined(),
            .mask_dtype = kBool,
            .mask = {},
            .stream = spec.stream};
  if (p.has_mask) {
    const int64_t bytes = size_of(spec.mask.dtype());
    p.mask_dtype = spec.mask.dtype();
    p.mask = {static_cast<char*>(spec.mask.data()), spec.mask.stride(0) * bytes,
              spec.mask.stride(1) * bytes, spec.mask.stride(2) * bytes,
              spec.mask.stride(3) * bytes};
  }
  constexpr int64_t kLongest = 24 << 10;  // of f64 scores in 227 KiB, with room for reductions
  const int64_t longest = p.S > 2 * p.T ? p.S : 2 * p.T;
  TS_CHECK_AS(UnsupportedError, longest <= kLongest, "scaled_dot_product_attention",
              "the fallback for GPUs takes at most ", kLongest / 2, " queries and ", kLongest,
              " keys; got ", query, " and ", key, "; split the sequence");
  return p;
}

AttentionResult attention_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionSpec& spec) {
  const Problem p = problem_of(query, key, value, spec);
  const int64_t B = query.size(0);
  const DType compute = query.dtype() == kF64 ? kF64 : kF32;
  AttentionResult result{
      raw::transpose(raw::empty({B, p.T, p.H, p.Ev}, query.dtype(), query.device()), 1, 2),
      raw::empty({B, p.H, p.T}, compute, query.device())};
  if (B * p.H * p.T == 0) return result;
  dispatch_floating(query.dtype(), "scaled_dot_product_attention", [&]<class T>() {
    using A = Compute<T>;
    gpu::launch({.name = "attention",
                 .grid = static_cast<unsigned>(B * p.H * p.T),
                 .block = threads_for(p.S),
                 .shared_bytes = static_cast<size_t>(p.S) * sizeof(A)},
                attention_kernel<T>, p, view_of<T>(query), view_of<T>(key), view_of<T>(value),
                view_of<T>(result.output), result.log_sums.data_as<A>());
  });
  return result;
}

void attention_backward_cuda(const Tensor& grad_output, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& output, const Tensor& log_sums,
                             const AttentionSpec& spec, const Tensor& grad_query,
                             const Tensor& grad_key, const Tensor& grad_value) {
  const Problem p = problem_of(query, key, value, spec);
  const int64_t B = query.size(0), Hk = key.size(1);
  const Tensor deltas = raw::empty({B, p.H, p.T}, log_sums.dtype(), query.device());
  dispatch_floating(query.dtype(), "scaled_dot_product_attention", [&]<class T>() {
    using A = Compute<T>;
    const Gradients<T> g{.query = view_of<T>(query),
                         .key = view_of<T>(key),
                         .value = view_of<T>(value),
                         .output = view_of<T>(output),
                         .grad_output = view_of<T>(grad_output),
                         .grad_query = view_of<T>(grad_query),
                         .grad_key = view_of<T>(grad_key),
                         .grad_value = view_of<T>(grad_value),
                         .log_sums = log_sums.data_as<A>(),
                         .deltas = deltas.data_as<A>()};
    if (B * p.H * p.T > 0) {
      gpu::launch({.name = "attention_backward",
                   .grid = static_cast<unsigned>(B * p.H * p.T),
                   .block = threads_for(p.S),
                   .shared_bytes = static_cast<size_t>(p.S) * sizeof(A)},
                  query_gradient_kernel<T>, p, g);
    }
    if (B * Hk * p.S > 0) {
      gpu::launch({.name = "attention_backward",
                   .grid = static_cast<unsigned>(B * Hk * p.S),
                   .block = threads_for(p.T),
                   .shared_bytes = static_cast<size_t>(2 * p.T) * sizeof(A)},
                  key_gradient_kernel<T>, p, g);
    }
  });
}

}  // namespace

void register_attention() {
  cuda_form<attention> = attention_cuda;
  cuda_form<attention_backward> = attention_backward_cuda;
}

}  // namespace tessera::kernels
