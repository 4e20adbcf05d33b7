// Runs a function of tensors on its own stream, eagerly or as a CUDA graph. Internal:
// graphed_step.h and accelerate/graphed_step.h are the interfaces.
#pragma once

#include <functional>
#include <memory>

#include <tessera/core/device.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::gpu {
class Graph;
}

namespace tessera::optim {

class StepGraph {
 public:
  using Function = std::function<TensorList(const TensorList& inputs)>;
  enum class Way { kAsItIs, kGraph };  // captured at the first use

  // `stream` is one of the GPU.
  StepGraph(const Device& device, std::shared_ptr<gpu::StreamHandle> stream, Function function);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // Copies the inputs to where the function reads them, and runs it between the caller's earlier
  // and later work. Results are detached; those of a graph are the same tensors at every replay.
  // Throws as GraphedStep's call does.
  TensorList operator()(const TensorList& inputs, Way way);

  bool captured() const { return graph_ != nullptr; }
  int64_t num_nodes() const;
  int64_t pool_bytes() const;

 private:
  TensorList run(const TensorList& given, Way way);
  void take(const TensorList& given);

  const Device device_;
  const std::shared_ptr<gpu::StreamHandle> stream_;
  const Function function_;
  TensorList inputs_;  // what the function reads
  std::unique_ptr<gpu::Graph> graph_;
  TensorList results_;  // what the graph writes; freed before it
};

}  // namespace tessera::optim
