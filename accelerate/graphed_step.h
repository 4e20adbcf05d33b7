// The body of a training loop as CUDA graphs, one for each place in the window of gradient
// accumulation: what is said in optim/graphed_step.h, for what an Accelerator has prepared.
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
// Training has the bits that it has without graphs. At each place of the window (its first, its
// last and the micro-batches between, with each shape of inputs and each weight of a batch) the
// first calls run the function as it is, the next one captures it, and later ones are replays: one
// launch, while the host does its own part, the windows, the streams of random numbers, learning
// rates and the steps' numbers. A graph keeps memory for the activations of its micro-batch. So a
// window of one takes one graph, a longer one three.
//
// A call that no graph fits runs the function as it is: inputs of a shape that is new, places
// beyond max_graphs, and what follows such a call within a window (its gradients lie elsewhere).
// calls_as_they_are() counts them. Where steps must not be graphs at all (to debug a model), the
// setting cuda_graphs is false, and every call is a call of the function, as on a CPU.
//
// What a graph would not know is an UnsupportedError at the capture that names it, and then no step
// was done; the training goes on without the graph. So are: a window that the function opens twice
// or not at all, or in which it leaves gradients clipped without a step; a weight that backward()
// is given, a number of the host; random numbers that the function draws outside of prepared
// models; a schedule's step; gradients of before the window that are kept aside; fp16 without
// scaler_on_device; parameters or states that lie in parts or with the host; gradients that a
// communication hook sends.
//
// Several ranks (ddp) capture the reductions of their gradients, too. Beside each replay they agree
// through the host, as in every backward, on what the window weighs and on who was there; where it
// weighs something else than in the capture all of them run the function as it is. One rank may
// replay while another does not. NCCL 2.9 or later captures; ranks that hold parts (zero1 ... fsdp)
// do not: UnsupportedError of the call that makes the step.
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
  int64_t max_graphs = 8;  // each of them keeps its memory
};

class GraphedStep {
 public:
  using Function = std::function<TensorList(const TensorList& inputs)>;

  GraphedStep(GraphedStep&&) noexcept;
  GraphedStep& operator=(GraphedStep&&) noexcept;
  ~GraphedStep();  // waits for the steps that were queued

  // One micro-batch. Inputs may be anywhere; the results are detached, and of a replay the same
  // tensors as at the place's last one: read or copy them before its next. Throws what the function
  // throws, ValueError where the Accelerator is gone.
  TensorList operator()(const TensorList& inputs);

  int64_t num_graphs() const;
  int64_t replays() const;            // of calls so far
  int64_t calls_as_they_are() const;  // of calls so far, those of the warm-up among them
  int64_t pool_bytes() const;         // of device memory that the graphs hold
  // Forgets the graphs: for a model that changed (a loaded state, frozen parameters, eval()).
  void reset();

 private:
  friend class tessera::Accelerator;
  struct Impl;
  explicit GraphedStep(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::accelerate
