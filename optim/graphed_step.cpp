#include <tessera/optim/graphed_step.h>

#include <optional>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/optim/step_graph.h>

namespace tessera::optim {

struct GraphedStep::Impl {
  Device device;
  Function function;
  GraphedStepOptions options;
  int64_t steps = 0;  // since the last reset
  std::shared_ptr<gpu::StreamHandle> stream;
  std::optional<StepGraph> step;
};

GraphedStep::GraphedStep(const Device& device, Function function, const GraphedStepOptions& options)
    : impl_(std::make_unique<Impl>()) {
  constexpr const char* kWhere = "GraphedStep";
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
  Impl& impl = *impl_;
  if (impl.device.is_cpu()) {
    TensorList results;
    for (const Tensor& x : impl.function(inputs)) {
      results.push_back(x.defined() ? x.detach() : Tensor());
    }
    return results;
  }
  if (!impl.stream) impl.stream = gpu::make_stream(impl.device.index);
  if (!impl.step) impl.step.emplace(impl.device, impl.stream, impl.function);
  TensorList results = (*impl.step)(
      inputs, impl.steps < impl.options.warmup ? StepGraph::Way::kAsItIs : StepGraph::Way::kGraph);
  ++impl.steps;
  return results;
}

bool GraphedStep::captured() const { return impl_->step && impl_->step->captured(); }
int64_t GraphedStep::num_nodes() const { return impl_->step ? impl_->step->num_nodes() : 0; }
int64_t GraphedStep::pool_bytes() const { return impl_->step ? impl_->step->pool_bytes() : 0; }

void GraphedStep::reset() {
  impl_->step.reset();
  impl_->steps = 0;
}

}  // namespace tessera::optim
