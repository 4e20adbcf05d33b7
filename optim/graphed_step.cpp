#include <tessera/optim/graphed_step.h>

#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/core/cuda/backend.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera::optim {
namespace {

constexpr const char* kWhere = "GraphedStep";

TensorList detached(const TensorList& tensors) {
  TensorList result;
  for (const Tensor& x : tensors) result.push_back(x.defined() ? x.detach() : Tensor());
  return result;
}

}  // namespace

struct GraphedStep::Impl {
  Device device;
  Function function;
  GraphedStepOptions options;
  int64_t steps = 0;  // since the last reset
  std::shared_ptr<gpu::StreamHandle> stream;
  TensorList inputs;  // what the graph reads
  std::unique_ptr<gpu::Graph> graph;
  TensorList results;  // what it writes; freed before the graph

  void check(const TensorList& given) const {
    TS_CHECK(given.size() == inputs.size(), kWhere, "the step was captured with ", inputs.size(),
             " inputs; got ", given.size(), "; call reset() to capture another step");
    for (size_t i = 0; i < given.size(); ++i) {
      TS_CHECK_SHAPE(given[i].shape() == inputs[i].shape(), kWhere, "input ", i, " was ", inputs[i],
                     " in the first step; got ", given[i],
                     "; pad or drop the last batch, or call reset() to capture anew");
      TS_CHECK_DTYPE(given[i].dtype() == inputs[i].dtype(), kWhere, "input ", i, " was ", inputs[i],
                     " in the first step; got ", given[i], "; convert it");
    }
  }

  void take(const TensorList& given) {
    if (inputs.empty()) {
      for (const Tensor& x : given) inputs.push_back(raw::empty(x.shape(), x.dtype(), device));
    }
    check(given);
    for (size_t i = 0; i < given.size(); ++i) kernels::copy_into(inputs[i], given[i].detach());
  }

  TensorList step(const TensorList& given) {
    if (!stream) stream = gpu::make_stream(device.index);
    const gpu::CurrentDevice current_device(device.index);
    const auto callers = gpu::current_stream_handle(device.index);
    gpu::wait_event(*stream, *gpu::record_event(*callers));
    const auto join = [&] { gpu::wait_event(*callers, *gpu::record_event(*stream)); };
    try {
      const TensorList returned = run(given);
      join();
      ++steps;
      return returned;
    } catch (...) {  // the caller may free what the stream still reads
      join();
      throw;
    }
  }

  TensorList run(const TensorList& given) {
    const gpu::CurrentStream current(stream);
    take(given);
    if (steps < options.warmup) return detached(function(inputs));
    if (!graph) {
      // The graph allocates from a pool of its own, beside what the warm-up has left in the cache.
      gpu::device_allocator(device.index).release_cached();
      TensorList captured;
      graph = std::make_unique<gpu::Graph>(stream, [&] { captured = detached(function(inputs)); });
      results = std::move(captured);
    }
    graph->replay();
    return results;
  }
};

GraphedStep::GraphedStep(const Device& device, Function function, const GraphedStepOptions& options)
    : impl_(std::make_unique<Impl>()) {
  TS_CHECK(options.warmup >= 1, kWhere,
           "warmup must be at least 1, as states are made in the first step; got ", options.warmup);
  TS_CHECK(function != nullptr, kWhere, "expects a function; got an empty one");
  if (device.is_cuda()) gpu::require_device(device.index, kWhere);
  TS_CHECK_DEVICE(device.is_cpu() || device.is_cuda(), kWhere, "there is nothing to run on ",
                  device);
  impl_->device = device;
  impl_->function = std::move(function);
  impl_->options = options;
}
GraphedStep::~GraphedStep() { reset(); }

TensorList GraphedStep::operator()(const TensorList& inputs) {
  if (impl_->device.is_cuda()) return impl_->step(inputs);
  return detached(impl_->function(inputs));
}

bool GraphedStep::captured() const { return impl_->graph != nullptr; }
int64_t GraphedStep::num_nodes() const { return impl_->graph ? impl_->graph->num_nodes() : 0; }
int64_t GraphedStep::pool_bytes() const { return impl_->graph ? impl_->graph->pool_bytes() : 0; }

void GraphedStep::reset() {
  impl_->results.clear();
  impl_->graph.reset();
  impl_->inputs.clear();
  impl_->steps = 0;
}

}  // namespace tessera::optim
