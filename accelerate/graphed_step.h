// The body of a training loop as CUDA graphs, one for each place in the accumulation window: the
// counterpart of optim/graphed_step.h for prepared objects.
//
//     auto step = accelerator.graphed_step([&](const TensorList& batch) -> TensorList {
//       const auto micro = accelerator.accumulate(model);
//       const Tensor loss = model(batch[0], batch[1]).loss;
//       accelerator.backward(loss);
//       accelerator.clip_grad_norm(model.parameters(), 1);
//       optimizer.step();
//       optimizer.zero_grad();
//       return {loss};
//     });
//     for (auto& batch : loader) {
//       const Tensor loss = step({batch.inputs, batch.targets})[0];
//       schedule.step();  // of the host: outside
//     }
//
// Training has the same bits as without graphs. At each place of the window (its first micro-batch,
// its last and those between, for each shape of inputs and each weight of a batch) the first calls
// run the function eagerly, the next one captures it, and later ones are replays: one launch, while
// the host handles windows, random streams, learning rates and step numbers. A graph keeps memory
// for the activations of its micro-batch. A window of one micro-batch needs one graph, a longer one
// three.
//
// A call that fits no graph runs the function eagerly: inputs of a new shape, places beyond
// max_graphs, and later calls in the same window (since gradients have other addresses).
// calls_as_they_are() counts them. To debug a model set cuda_graphs to false: every call then runs
// the function, as on a CPU.
//
// A graph cannot contain the following; each is an UnsupportedError at the capture that names it,
// no step is done then, and training can continue without the graph: a window that the function
// opens twice or not at all, or in which it clips gradients without a step; a weight given to
// backward(), which is a host value; random numbers that the function draws outside of prepared
// models; a schedule's step; gradients from before the window; fp16 without scaler_on_device;
// sharded or offloaded parameters or states; gradients that a communication hook sends.
//
// Several ranks (ddp) also capture the reductions of their gradients. At each replay they agree
// through the host, as in every backward, on the weight of the window and on the ranks that take
// part; if the weight differs from the capture's, all run the function eagerly. One rank may replay
// while another does not. Capture needs NCCL 2.9 or later; sharded modes (zero1 ... fsdp) are an
// UnsupportedError of the call that makes the step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/core/tensor/tensor.h>

namespace tessera {
class Accelerator;
}

namespace tessera::accelerate {

struct GraphedStepOptions {
  int64_t warmup = 3;      // calls at a place before its capture, at least 2
  int64_t max_graphs = 8;  // each keeps its own memory
};

class GraphedStep {
 public:
  using Function = std::function<TensorList(const TensorList& inputs)>;

  GraphedStep(GraphedStep&&) noexcept;
  GraphedStep& operator=(GraphedStep&&) noexcept;
  ~GraphedStep();  // waits for the steps that were queued

  // Runs one micro-batch. Inputs may be on any device; the results are detached, and a replay
  // returns the same tensors as the place's last one: read or copy them before the next. Throws the
  // function's own errors, ValueError if the Accelerator was destroyed.
  TensorList operator()(const TensorList& inputs);

  int64_t num_graphs() const;
  int64_t replays() const;            // of calls so far
  int64_t calls_as_they_are() const;  // eager calls so far, warm-up included
  int64_t pool_bytes() const;         // of device memory that the graphs hold
  // Forgets the graphs, after changes of the model (a loaded state, frozen parameters, eval()).
  void reset();

 private:
  friend class tessera::Accelerator;
  struct Impl;
  explicit GraphedStep(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::accelerate
