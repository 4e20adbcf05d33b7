// What micro-batches count for in the gradient of their window, and how the sum of their gradients
// becomes the mean: accelerator.h, [Note: weight] and [Note: adding up].
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include <tessera/accelerate/settings/settings.h>
#include <tessera/accelerate/step/prepared_objects.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/mesh/parallel_dims.h>

namespace tessera {

class WindowWeights {
 public:
  using Records = std::span<const std::shared_ptr<ModelRecord>>;

  WindowWeights(const accelerate::Settings& settings, const PreparedObjects& prepared)
      : settings_(settings), prepared_(prepared) {}
  WindowWeights(const WindowWeights&) = delete;
  WindowWeights& operator=(const WindowWeights&) = delete;

  // By what weights are divided on all ranks; 0: not known yet. A restart must know it.
  struct Nominal {
    double samples = 0, weight = 0;
  };
  // The weight of this micro-batch in units of the nominal one: of `given`, else of the batch in
  // hand of `loader`, which may be null. `joined`: ranks that have no more batches cannot be asked.
  double weigh(std::optional<double> given, const data::LoaderBase* loader,
               distributed::ParallelDims& dims, bool joined, Nominal& nominal) const;
  // To the windows of the models. ValueError where a window's weights are not of one kind, or
  // another backward of the micro-batch had another.
  static void add(Records own, double weight, bool is_given);

  // Whether nothing will divide by the weight: outside of a window and without a reduction there is
  // nothing to weigh against, and where no rank shares anything, a window of one micro-batch has
  // its mean already.
  bool is_undivided(Records own) const;
  // What the loss is multiplied by, its scale for f16 aside. `steps`: of a model that has none of
  // its own.
  double seed_of(const Tensor& loss, double weight, Records own, bool undivided,
                 int64_t steps) const;
  // `window`: of the model's own micro-batch; null where a loss of others comes to it. `loader`:
  // that is being read, or null.
  distributed::StepPlan plan_backward(const ModelRecord& record, const StepWindow* window,
                                      bool more, double weight,
                                      const data::LoaderBase* loader) const;

  // Before the first backward of a sum: what lies in `.grad` stays, in addition to it. `at_once`:
  // this backward is all of it.
  void begin_sum(ModelRecord& record, const Tensor& loss, bool at_once) const;
  // A mean that a further backward adds to becomes a sum again.
  void resume(ModelRecord& record) const;
  // What the reduction does where there is one: the sum becomes the mean.
  void divide(Records records, bool undivided) const;

 private:
  bool divides_as_huggingface() const {
    return settings_.loss_weighting.value == LossWeighting::kHuggingFace;
  }

  const accelerate::Settings& settings_;
  const PreparedObjects& prepared_;
};

}  // namespace tessera
