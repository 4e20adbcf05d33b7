// Training by pipeline stages: what takes the place of the loop over micro-batches.
//
//     accelerator.prepare(model, optimizer, loader);      // settings: pp_size 4, accumulation 8
//     Pipeline pipeline = accelerator.pipeline(model);
//     for (auto& window : pipeline.windows(loader)) {     // 8 batches each
//       const Tensor loss = pipeline.step(window, [&](const auto& batch) -> Tensor {
//         return model(batch.inputs, batch.targets).loss;
//       });
//       accelerator.clip_grad_norm(model.parameters(), 1.0);
//       optimizer.step(), optimizer.zero_grad();
//     }
//
// With pp_size 1 step() is the plain loop: accumulate(), the loss, backward() for each batch. With
// more, stages (distributed/pipeline/staged_model.h) run micro-batches by the schedule of the
// settings, and losses and parameters have the bits of that loop on one process; dropout too.
// Weights of unequal batches, fp16's scale, clipping and optimizers work as they do there, each with
// one value for all stages. Ranks along pp read the same batches; data-parallel ranks beside them
// add gradients up when the last backward has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/source_location.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {
class Accelerator;
}

namespace tessera::accelerate {

struct PipelineOptions {
  // Names of the modules with which stages 1, 2... begin; none: those of the setting pp_cuts, else
  // even ones (distributed::even_cuts).
  std::vector<std::string> cuts = {};
  // Micro-batches of one window may have different shapes, for a header per message.
  bool shapes_vary = false;
  // For comparisons on one process: gradients of parameters that are tied across cuts are added up
  // in the order that stages have, (sum of the first place's) + (sum of the other's).
  bool ties_apart = false;
};

struct PipelineStepOptions {
  // What each loss is a mean over: samples or tokens of the micro-batch. None: the window's samples,
  // else all alike.
  std::vector<double> weights = {};
};

// The batches of an optimizer step.
template <class Batch>
struct PipelineWindow {
  std::vector<Batch> batches;
  std::vector<double> samples;  // of each batch that count

  int64_t size() const { return std::ssize(batches); }
  Batch& operator[](int64_t i) { return batches[static_cast<size_t>(i)]; }
  const Batch& operator[](int64_t i) const { return batches[static_cast<size_t>(i)]; }
  auto begin() { return batches.begin(); }
  auto end() { return batches.end(); }
};

// The windows of an epoch; the last one has what is left.
template <class Loader>
class PipelineWindows {
 public:
  using Window = PipelineWindow<typename Loader::Batch>;
  PipelineWindows(Loader& loader, int64_t count) : loader_(loader), count_(count) {}

  class Iterator {
   public:
    Iterator(Loader& loader, int64_t count) : loader_(loader), count_(count), at_(loader.begin()) {
      fill();
    }
    Window& operator*() { return window_; }
    Iterator& operator++() {
      fill();
      return *this;
    }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) {
      return iterator.window_.batches.empty();
    }

   private:
    void fill() {
      window_ = {};
      // The loader goes on where the next batch is wanted: until then its last one is in hand.
      while (window_.size() < count_) {
        if (std::exchange(taken_, false)) ++at_;
        if (at_ == std::default_sentinel) return;
        window_.batches.push_back(std::move(*at_));
        window_.samples.push_back(static_cast<double>(loader_.batch_samples()));
        taken_ = true;
      }
    }
    Loader& loader_;
    int64_t count_;
    typename Loader::Iterator at_;
    bool taken_ = false;
    Window window_;
  };
  Iterator begin() { return Iterator(loader_, count_); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Loader& loader_;
  int64_t count_;
};

// The Accelerator and the model outlive it.
class Pipeline {
 public:
  Pipeline(Pipeline&&) noexcept;
  ~Pipeline();

  // The gradients of a window: `loss(batch)` is called for each batch and stage and returns one
  // element; on ranks without the last stage it is meta, so read no numbers from it. Returns the
  // mean of the losses by their weights, f64, on every rank of the pipeline. Gradients are then as
  // after the backward of a window's last micro-batch: the optimizer may step. ConfigError that
  // names the cut where the model does not come by it once, or the loss is not of the last stage;
  // DeviceError for what crosses a cut unseen. Collective.
  template <class Window, class Loss>
  Tensor step(Window&& window, Loss&& loss, const PipelineStepOptions& options = {},
              const SourceLocation& where = SourceLocation::current()) {
    return run(
        std::ssize(window),
        [&](int64_t i) -> Tensor {
          return loss(window[static_cast<decltype(std::ssize(window))>(i)]);
        },
        weights_of(window, options), where);
  }
  // The results of `call` for each batch, one tensor of any shape, on every rank of the pipeline:
  // losses, logits. Without gradients, in the mode that the model has. Collective.
  template <class Window, class Call>
  std::vector<Tensor> evaluate(Window&& window, Call&& call,
                               const SourceLocation& where = SourceLocation::current()) {
    return run_forward(
        std::ssize(window),
        [&](int64_t i) -> Tensor {
          return call(window[static_cast<decltype(std::ssize(window))>(i)]);
        },
        where);
  }
  // UnsupportedError if there are several stages: tokens would go round one by one.
  template <class Generate>
  auto generate(Generate&& generate) {
    check_generates();
    return generate();
  }
  // As many batches of a prepared loader as gradient_accumulation_steps says.
  template <class Loader>
  PipelineWindows<Loader> windows(Loader& loader) {
    return PipelineWindows<Loader>(loader, micro_batches());
  }

  int64_t micro_batches() const;  // of a window
  int stages() const;
  bool is_last_stage() const;  // whether this rank has it
  // Stages with their ranks, bytes and arithmetic, and the schedule with its bubble.
  std::string describe() const;

 private:
  friend class tessera::Accelerator;
  struct Impl;
  explicit Pipeline(std::unique_ptr<Impl> impl);
  using OfBatch = std::function<Tensor(int64_t)>;
  template <class Window>
  static std::vector<double> weights_of(const Window& window, const PipelineStepOptions& options) {
    if constexpr (requires { window.samples; }) {
      if (options.weights.empty()) return window.samples;
    }
    return options.weights;
  }
  Tensor run(int64_t count, const OfBatch& loss, std::vector<double> weights,
             const SourceLocation& where);
  std::vector<Tensor> run_forward(int64_t count, const OfBatch& call, const SourceLocation& where);
  void check_generates() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::accelerate

namespace tessera {
using accelerate::Pipeline;
}
