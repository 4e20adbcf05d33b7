// Local SGD (Stich 2019): ranks step by themselves and average their parameters from time to time.
//
//     LocalSGD local(accelerator, model, {.steps = 8});
//     for (auto& batch : loader) {
//       auto micro = accelerator.accumulate(model);
//       accelerator.backward(model(batch.inputs, batch.targets).loss);
//       optimizer.step(), optimizer.zero_grad();
//       local.step();
//     }
//     local.finish();
//
// During its lifetime gradients of the model are not reduced: each rank's window has the weight of
// its own samples. Parameters that require grad are averaged; optimizer states and buffers remain
// each rank's own. With one rank, or `enabled = false`, it does nothing.
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/accelerate/accelerator.h>
#include <tessera/core/source_location.h>

namespace tessera {

struct LocalSGDOptions {
  int64_t steps = 8;  // optimizer updates between two averages
  bool enabled = true;
  // Parameters are sent in packed messages of about this size, all at once.
  int64_t bucket_bytes = int64_t{25} << 20;
};

class LocalSGD {
 public:
  // `accelerator` and `model`, which must be prepared (ValueError), must outlive it. ValueError for
  // less than one step, UnsupportedError for parameters in 16 bits and for a sharded model.
  LocalSGD(Accelerator& accelerator, nn::ModuleBase& model, const LocalSGDOptions& options = {});
  // Without finish() (an exception passes) the ranks keep their different parameters.
  ~LocalSGD();
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;

  // Called after each micro-batch; counts those that end a window. Every `steps`-th is collective.
  void step(const SourceLocation& where = SourceLocation::current());
  // The last average; afterwards gradients are reduced again. Collective.
  void finish(const SourceLocation& where = SourceLocation::current());
  int64_t averages() const { return averages_; }

 private:
  void average(const SourceLocation& where);

  Accelerator& accelerator_;
  nn::ModuleBase& model_;
  LocalSGDOptions options_;
  std::optional<AcceleratorScope> scope_;  // none: nothing to do
  int64_t updates_ = 0;
  int64_t averages_ = 0;
};

}  // namespace tessera
