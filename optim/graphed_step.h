// A whole training step as a CUDA graph: one launch queues forward, backward, clipping and the
// optimizer, instead of some hundred launches.
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
// Training has the same bits as without the graph. The first calls run the function eagerly; they
// are ordinary steps, in which states are made and libraries choose their algorithms. The next call
// releases the device's cached memory, since a graph keeps its own, and captures (core/cuda/graph.h
// lists what can be captured); each later call is a replay. The graph must know all values that
// change between steps: an optimizer's learning rate, step number and next_step(), random streams
// (dropout), a GradScaler with on_device, and the contents of tensors. Every other host value is a
// constant of the capture.
//
// Inputs are copied into tensors that the graph reads, so their shapes and dtypes must be those of
// the first call (the copy is some KiB of tokens on the device; double buffering would not help,
// since the loader's stream brings batches to the device ahead of the step). The returned tensors
// are overwritten by the next replay: read or copy them before.
//
// Objects that an Accelerator has prepared can be captured by Accelerator::graphed_step() only
// (accelerate/graphed_step.h), since it decides on the host, for each micro-batch, whether the
// window ends, the weight of the loss and the random numbers. accumulate(), its backward(),
// recorded calls of prepared models and steps of prepared optimizers (of any with a step gate)
// throw UnsupportedError at the capture. Inference of a prepared model under NoGradGuard can be
// captured.
//
// On the CPU, and on a GPU before the capture, a call runs the function eagerly.
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

  // Objects that the function uses (model, optimizer) must outlive this object or its next reset().
  // Throws DeviceError for a missing device, ValueError for a warm-up without steps.
  GraphedStep(const Device& device, Function function, const GraphedStepOptions& options = {});
  ~GraphedStep();  // waits for the steps that were queued
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  // Runs one step. Inputs may be on any device; the results are detached. The step runs after
  // earlier work of the caller's stream and before later work. Throws ShapeError, DTypeError for
  // inputs that differ from the first call's, the function's own errors, and at the capture an
  // UnsupportedError that names what cannot be captured. After an error no step was done, and the
  // next call tries again.
  TensorList operator()(const TensorList& inputs);

  bool captured() const;
  int64_t num_nodes() const;   // of the graph: launches, copies, fills; 0 before the capture
  int64_t pool_bytes() const;  // of device memory that the graph holds
  // Forgets the graph and the inputs' shapes: the next calls warm up and capture again. Needed
  // after changes of the model (a loaded state, frozen parameters, other optimizer options), or for
  // other shapes.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::optim
