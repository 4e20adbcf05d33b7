// The weights of micro-batches in the gradient of their window, and the division of the sum:
// accelerator.h, [Note: weight] and [Note: adding up].
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_set>

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

  // The divisor of weights on all ranks; 0: not known yet. A restart must restore it.
  struct Nominal {
    double samples = 0, weight = 0;
  };
  // The weight of this micro-batch in units of the nominal one: `given`, else from the current
  // batch of `loader`, which may be null. `joined`: ranks without further batches cannot be asked.
  double weigh(std::optional<double> given, const data::LoaderBase* loader,
               distributed::ParallelDims& dims, bool joined, Nominal& nominal) const;
  // Adds it to the windows of the models. ValueError if a window's weights are of different kinds,
  // or another backward of the micro-batch had another weight.
  static void add(Records own, double weight, bool is_given);

  // Whether nothing will divide by the weight: outside of a window without a reduction, and, if
  // ranks share nothing, in a window of one micro-batch, which is a mean already.
  bool is_undivided(Records own) const;
  // The factor of the loss, apart from the loss scale. `steps`: for a model without steps of its
  // own.
  double seed_of(const Tensor& loss, double weight, Records own, bool undivided,
                 int64_t steps) const;
  // `window`: of the model's own micro-batch; null for a loss outside of it. `loader`: the active
  // one, or null.
  distributed::StepPlan plan_backward(const ModelRecord& record, const StepWindow* window,
                                      bool more, double weight,
                                      const data::LoaderBase* loader) const;

  // Called before the first backward of a sum: keeps `.grad` in addition to it. `at_once`: this
  // backward is the whole sum.
  void begin_sum(ModelRecord& record, const Tensor& loss, bool at_once) const;
  // Turns a mean that a further backward adds to into a sum again. `seen`: what other models of this
  // backward have resumed, which may share parameters.
  void resume(ModelRecord& record, std::unordered_set<TensorImpl*>& seen) const;
  // Does what a reduction does, if there is none: turns the sum into the mean.
  void divide(Records records, bool undivided) const;

 private:
  bool divides_as_huggingface() const {
    return settings_.loss_weighting.value == LossWeighting::kHuggingFace;
  }

  const accelerate::Settings& settings_;
  const PreparedObjects& prepared_;
};

}  // namespace tessera
