// Local SGD (Stich 2019): ranks step by themselves, and average their parameters now and then.
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
// In its life gradients of the model are not reduced: each rank's window has the weight of its own
// samples. Parameters that require grad are averaged, optimizer states and buffers stay each rank's
// own. With one rank, or `enabled = false`, nothing is done.
#pragma once

#include <cstdint>
#include <optional>

#include <tessera/accelerate/accelerator.h>
#include <tessera/core/source_location.h>

namespace tessera {

struct LocalSGDOptions {
  int64_t steps = 8;  // optimizer updates between two averages
  bool enabled = true;
  // Parameters travel packed in messages of about this size, all under way at once.
  int64_t bucket_bytes = int64_t{25} << 20;
};

class LocalSGD {
 public:
  // `accelerator` and `model`, which is prepared (ValueError), must outlive it. ValueError for less
  // than one step, UnsupportedError for parameters in 16 bits and for a sharded model.
  LocalSGD(Accelerator& accelerator, nn::ModuleBase& model, const LocalSGDOptions& options = {});
  // Without finish() (an exception passes) the ranks part as they are.
  ~LocalSGD();
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;

  // After each micro-batch; counts those that end a window. Collective in every `steps`-th.
  void step(const SourceLocation& where = SourceLocation::current());
  // The last average; from here on gradients are reduced again. Collective.
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
