#include <tessera/optim/step_graph.h>

#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera::optim {
namespace {

constexpr const char* kStep = "GraphedStep";

TensorList detached(const TensorList& tensors) {
  TensorList result;
  for (const Tensor& x : tensors) result.push_back(x.defined() ? x.detach() : Tensor());
  return result;
}

}  // namespace

StepGraph::StepGraph(const Device& device, std::shared_ptr<gpu::StreamHandle> stream,
                     Function function)
    : device_(device), stream_(std::move(stream)), function_(std::move(function)) {}

StepGraph::~StepGraph() { results_.clear(); }

int64_t StepGraph::num_nodes() const { return graph_ ? graph_->num_nodes() : 0; }
int64_t StepGraph::pool_bytes() const { return graph_ ? graph_->pool_bytes() : 0; }

void StepGraph::take(const TensorList& given) {
  if (inputs_.empty()) {
    for (const Tensor& x : given) inputs_.push_back(raw::empty(x.shape(), x.dtype(), device_));
  }
  TS_CHECK(given.size() == inputs_.size(), kStep, "the step was captured with ", inputs_.size(),
           " inputs; got ", given.size(), "; call reset() to capture another step");
  for (size_t i = 0; i < given.size(); ++i) {
    TS_CHECK_SHAPE(given[i].shape() == inputs_[i].shape(), kStep, "input ", i, " was ", inputs_[i],
                   " in the first step; got ", given[i],
                   "; pad or drop the last batch, or call reset() to capture anew");
    TS_CHECK_DTYPE(given[i].dtype() == inputs_[i].dtype(), kStep, "input ", i, " was ", inputs_[i],
                   " in the first step; got ", given[i], "; convert it");
  }
  for (size_t i = 0; i < given.size(); ++i) kernels::copy_into(inputs_[i], given[i].detach());
}

TensorList StepGraph::operator()(const TensorList& inputs, Way way) {
  const gpu::CurrentDevice current_device(device_.index);
  const auto callers = gpu::current_stream_handle(device_.index);
  gpu::wait_event(*stream_, *gpu::record_event(*callers));
  const auto join = [&] { gpu::wait_event(*callers, *gpu::record_event(*stream_)); };
  try {
    const TensorList returned = run(inputs, way);
    join();
    // They lie in memory of the step's stream; the caller's reads them, perhaps when they are
    // freed.
    for (const Tensor& x : returned) {
      if (x.defined() && x.device().is_cuda() && x.numel() > 0) {
        gpu::record_use(x.device().index, x.storage()->data());
      }
    }
    return returned;
  } catch (...) {  // the caller may free what the stream still reads
    join();
    throw;
  }
}

TensorList StepGraph::run(const TensorList& given, Way way) {
  const gpu::CurrentStream current(stream_);
  take(given);
  if (way == Way::kAsItIs) return detached(function_(inputs_));
  if (!graph_) {
    // The graph allocates from a pool of its own, beside what the calls so far left in the cache.
    gpu::device_allocator(device_.index).release_cached();
    TensorList captured;
    graph_ =
        std::make_unique<gpu::Graph>(stream_, [&] { captured = detached(function_(inputs_)); });
    results_ = std::move(captured);
  }
  graph_->replay();
  return results_;
}

}  // namespace tessera::optim
