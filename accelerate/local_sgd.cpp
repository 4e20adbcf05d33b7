#include <tessera/accelerate/local_sgd.h>

#include <memory>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/nn/module.h>

namespace tessera {

LocalSGD::LocalSGD(Accelerator& accelerator, nn::ModuleBase& model, const LocalSGDOptions& options)
    : accelerator_(accelerator), model_(model), options_(options) {
  TS_CHECK(options.steps >= 1, "LocalSGD", "steps must be at least 1; got ", options.steps);
  if (options.enabled && accelerator.data_ranks().size() > 1) {
    for (const auto& [name, parameter] : model.named_parameters()) {
      TS_CHECK_AS(UnsupportedError, !distributed::is_dtensor(parameter), "LocalSGD",
                  "ranks step by themselves on whole parameters of their own, and '", name, "' is ",
                  parameter, "; train with sharding=ddp (another one comes from ",
                  accelerator.settings().sharding.origin.describe(), ")");
      TS_CHECK_AS(
          UnsupportedError,
          !parameter.requires_grad() || parameter.dtype() == kF32 || parameter.dtype() == kF64,
          "LocalSGD", "averages parameters, and of '", name, "' (", parameter,
          ") only what 16 bits hold of its f32 master; take precision_policy autocast or boundary");
    }
    scope_.emplace(accelerator.without_reduction(model));
  }
}

LocalSGD::~LocalSGD() = default;

void LocalSGD::step(const SourceLocation& where) {
  if (!scope_ || !accelerator_.sync_gradients()) return;
  if (++updates_ % options_.steps == 0) average(where);
}

void LocalSGD::finish(const SourceLocation& where) {
  if (!scope_) return;
  average(where);
  scope_.reset();
}

void LocalSGD::average(const SourceLocation& where) {
  using distributed::CoalescedScope;
  distributed::Group& ranks = accelerator_.data_ranks();
  std::vector<Tensor> parameters;
  for (const Tensor& parameter : model_.parameters()) {
    if (parameter.requires_grad()) parameters.push_back(parameter.detach());
  }
  std::vector<distributed::Work> works;
  for (size_t next = 0; next < parameters.size();) {
    CoalescedScope bucket(
        ranks, {.channel = distributed::Channel::kParameter, .tag = "local_sgd", .where = where});
    for (int64_t bytes = 0; next < parameters.size() && bytes < options_.bucket_bytes; ++next) {
      bucket.all_reduce(parameters[next], distributed::ReduceOp::kMean);
      bytes += parameters[next].nbytes();
    }
    works.push_back(bucket.finish());
  }
  for (const distributed::Work& work : works) work.wait();
  ++averages_;
}

}  // namespace tessera
