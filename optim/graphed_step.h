// A whole training step as a CUDA graph: forward, backward, clipping and the optimizer are queued
// by one launch instead of some hundred.
//
//     optim::GraphedStep step(cuda(0), [&](const TensorList& batch) -> TensorList {
//       const Tensor loss = model(batch[0], batch[1]).loss;
//       loss.backward();
//       const Tensor norm =
//           optim::clip_grad_norm(model.parameters(), 1, {.fold_into = &optimizer});
//       optimizer.step();
//       optimizer.zero_grad();
//       return {loss, norm};
//     });
//     for (auto& batch : loader) {
//       const TensorList results = step({batch.inputs, batch.targets});
//       schedule.step();                                   // the host's part stays outside
//       if (due) log_loss(results[0].item());
//     }
//
// Training gives the same bits as without the graph. The first calls run the function as it is;
// these are steps like all others, in which states are made and libraries choose their algorithms.
// The next call gives the device's unused memory back, since a graph keeps its own, and captures
// (core/cuda/graph.h says what can be); every one from there on is a replay. What changes from step
// to step must be known to the graph: an optimizer's learning rate, step number and next_step(),
// random streams (dropout), a GradScaler with on_device, and all that lies in tensors. Every other
// number of the host is a constant of the capture.
//
// Inputs are copied into tensors that the graph reads, so their shapes and dtypes stay those of the
// first call (one copy on the device of some KiB of tokens; a second buffer would save nothing, as
// the loader's stream brings batches to the device ahead of the step). The tensors returned are the
// same at every replay: read or copy them before the next call.
//
// What an Accelerator has prepared is captured by Accelerator::graphed_step() alone
// (accelerate/graphed_step.h): it decides on the host, for each micro-batch, whether the window
// ends, what a loss weighs and which random numbers come. accumulate(), its backward(), recorded
// calls of prepared models and steps of prepared optimizers (of any with a step gate) throw
// UnsupportedError at the capture. Inference of a prepared model under NoGradGuard can be.
//
// On the CPU, and on a GPU before the capture, a call is a call of the function.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/core/device.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::optim {

struct GraphedStepOptions {
  int64_t warmup = 3;  // calls before the capture, at least 1
};

class GraphedStep {
 public:
  using Function = std::function<TensorList(const TensorList& inputs)>;

  // What the function uses (model, optimizer) must outlive this object or its next reset(). Throws
  // DeviceError for a device that is not there, ValueError for a warm-up without steps.
  GraphedStep(const Device& device, Function function, const GraphedStepOptions& options = {});
  ~GraphedStep();  // waits for the steps that were queued
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  // One step. Inputs may be anywhere; the results are detached. Work of the caller's stream so far
  // comes before it, later work after it. Throws ShapeError, DTypeError for inputs that are not
  // those of the first call; what the function throws, and at the capture an UnsupportedError that
  // names what cannot be captured. Then no step was done, and the next call tries again.
  TensorList operator()(const TensorList& inputs);

  bool captured() const;
  int64_t num_nodes() const;   // of the graph: launches, copies, fills; 0 before the capture
  int64_t pool_bytes() const;  // of device memory that the graph holds
  // Forgets the graph and the inputs' shapes: the next calls warm up and capture again. For a model
  // that changed (a loaded state, frozen parameters, another learning rule), or other shapes.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::optim
