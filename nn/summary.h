// The cost of a model: parameters, memory and floating point operations of each module.
//
//     std::cout << nn::summary(model, empty({8, 256}, {.dtype = kI64})).table();
//
// The forward pass runs on the meta device: nothing is computed or allocated, so models larger than
// memory work too. The module is unchanged afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

struct SummaryRow {
  std::string name;  // dotted, "" for the root
  std::string type;
  std::string output;          // shapes of the tensors it returned at first, "" if never called
  int64_t parameters = 0;      // of the module and its children, tied ones once
  int64_t own_parameters = 0;  // without its children
  double flops = 0;  // of all its calls: products, convolutions, attention; children included
  int64_t output_bytes = 0;  // bytes of the results of all its calls
  int64_t calls = 0;
};

struct Summary {
  std::vector<SummaryRow> rows;  // in the order of the tree
  int64_t parameters = 0;
  int64_t trainable_parameters = 0;
  int64_t parameter_bytes = 0;
  int64_t buffer_bytes = 0;
  int64_t activation_bytes = 0;                 // outputs of modules without children
  double flops = 0;                             // of one forward pass
  std::string table(int max_depth = -1) const;  // -1: all rows
};

namespace detail {
// Moves the module to the meta device and records its calls; restores it at the end.
class SummaryScope {
 public:
  explicit SummaryScope(ModuleBase& module);
  ~SummaryScope();
  SummaryScope(const SummaryScope&) = delete;
  SummaryScope& operator=(const SummaryScope&) = delete;
  Summary finish() const;

 private:
  struct Held {
    Tensor tensor, contents;
  };
  std::vector<Held> held_;
  std::vector<HookHandle> hooks_;
  Summary summary_;
  FlopCounter previous_;
  std::vector<double> open_;  // operations counted when each running call began
};
}  // namespace detail

// `args` are the arguments of a call; their tensors may be on any device.
template <class M, class... Args>
Summary summary(M& module, Args... args) {
  const NoGradGuard no_grad;
  const auto to_meta = [](Tensor& tensor) {
    if (tensor.defined()) tensor = raw::empty(tensor.shape(), tensor.dtype(), kMeta);
  };
  (visit_tensors(args, to_meta), ...);
  detail::SummaryScope scope(module);
  module(args...);
  return scope.finish();
}

}  // namespace tessera::nn
