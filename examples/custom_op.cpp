// How an op is added, from formula to proof: softsign(x) = x / (1 + |x|).
//
// In the library an elementwise op touches four files and no build file:
//   core/functors.h         the formula and its gradient, as functors on the compute type
//   autograd/ops/*.cpp      the block that you see here: record, forward, backward
//   autograd/ops.h          the declaration with its contract
//   tests/op_samples_*.cpp  a row of samples, from which tests and benchmarks are made
// A program can add ops of its own in the same way: nothing below is reserved to the library.
#include <cmath>
#include <cstdio>

#include <tessera.h>

#include <tessera/autograd/differentiable.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/copy/copy.h>

using namespace tessera;

// 1. The record: what autocast, the engine, the profiler and error messages know about the op.
// Backward reads input 0, so that is kept; nothing else is.
const Op kSoftsign{.name = "softsign", .reads = {inputs(0)}, .flops_per_element = 3};

// 2. A kernel. Elements are loaded as they are stored, calculated in float (double for f64) and
// stored again. 16 Ki elements are enough work to pay for waking another core.
Tensor softsign_forward(const Tensor& x) {
  const Tensor dense = kernels::contiguous(x);
  const Tensor y = raw::empty_like(dense);
  if (x.is_meta()) return y;  // shapes without bytes: every op knows them
  dispatch_floating(x.dtype(), kSoftsign, [&]<class T>() {
    const T* in = dense.data_as<T>();
    T* out = y.data_as<T>();
    parallel_for(x.numel(), 16384, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto value = load<Compute<T>>(in[i]);
        out[i] = store<T>(value / (1 + std::abs(value)));
      }
    });
  });
  return y;
}

// 3. The op: checks, forward, backward in one block. dy / (1 + |x|)^2 is made of ops, so second
// derivatives work as well.
Tensor softsign(const Tensor& x) {
  TS_CHECK_DTYPE(is_floating(x.dtype()), kSoftsign, "expects a floating tensor; got ", x,
                 "; convert it with to(x, kF32)");
  return differentiable(
      kSoftsign, {x}, [](Inputs in) { return softsign_forward(in[0]); },
      [](Grads dy, const Saved& saved) { return dy[0] / square(1 + abs(saved.input(0))); });
}

// 4. The proof: gradients against central differences in f64, first and second order. The points
// keep away from 0, where |x| has a kink.
bool gradients_are_right() {
  const Tensor x = randn({3, 4}, {.dtype = kF64});
  const Tensor away_from_zero = detach(x + sign(x) * 0.1).set_requires_grad();
  const auto function = [](const TensorList& in) -> TensorList { return {softsign(in[0])}; };
  for (const GradcheckResult& result :
       {gradcheck(function, {away_from_zero}), gradgradcheck(function, {away_from_zero})}) {
    if (!result.ok) {
      std::fprintf(stderr, "%s\n", result.message.c_str());
      return false;
    }
  }
  return true;
}

int main() {
  if (!gradients_are_right()) return 1;

  const Tensor x = linspace(-2, 2, 5).set_requires_grad();
  const Tensor y = softsign(x);
  y.sum().backward();
  for (int64_t i = 0; i < x.numel(); ++i) {
    std::printf("softsign(%4.1f) = %7.4f   slope %.4f\n", x[i].item(), y[i].item(),
                x.grad()[i].item());
  }
  try {
    softsign(arange(3));
  } catch (const DTypeError& error) {
    std::printf("%s\n", error.what());
  }
}
