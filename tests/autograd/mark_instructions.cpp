// Small ops without a sharded model, for mark_instructions.py, which counts what the check of marks costs
// them. It is linked with autograd/differentiable.cpp as release builds compile it, and with debug
// information.
#include <cstdio>
#include <span>

#include <tessera/autograd/op_observer.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/factory/factory.h>

namespace tessera {
namespace {

struct Counter final : OpObserver {
  void saw(const Op&, std::span<const Tensor> inputs, std::span<const Tensor>) override {
    ++calls;
    operands += static_cast<long long>(inputs.size());
  }
  long long calls = 0, operands = 0;
};

void run_ops() {
  const Tensor x = ones({4, 4}).set_requires_grad(), weight = ones({4, 4}), bias = ones({4});
  Counter counter;
  Tensor last;
  const ScopedValue<OpObserver*> scope(Context::current().slot<OpObserverSlot>().observer,
                                       &counter);
  for (int i = 0; i < 500; ++i) {
    const Tensor y = add(neg(x), weight);
    const Tensor z = where(gt(y, weight), linear(y, weight, bias), y);
    last = cat({z, y, z, y, z, y, z, y}, 0);
  }
  std::printf("%lld calls %lld operands\n", counter.calls, counter.operands);
}

}  // namespace
}  // namespace tessera

int main() { tessera::run_ops(); }
