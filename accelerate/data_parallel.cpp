#include <tessera/accelerate/data_parallel.h>

#include <utility>

#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/shard/replicate.h>

namespace tessera::accelerate {
namespace {

DType wire_of(CommWrapper wrapper) {
  switch (wrapper) {
    case CommWrapper::kFP16:
      return kF16;
    case CommWrapper::kBF16:
      return kBF16;
    case CommWrapper::kNone:
      break;
  }
  return kF32;
}

std::shared_ptr<distributed::CommunicationHook> hook_of(const Settings& settings) {
  switch (settings.ddp_comm_hook.value) {
    case CommHook::kFP16:
      return std::make_shared<distributed::CastHook>(kF16);
    case CommHook::kBF16:
      return std::make_shared<distributed::CastHook>(kBF16);
    case CommHook::kPowerSgd:
    case CommHook::kBatchedPowerSgd:
      return std::make_shared<distributed::PowerSgdHook>(distributed::PowerSgdOptions{
          .rank = settings.ddp_power_sgd_rank,
          .start_step = settings.ddp_power_sgd_start_step,
          .batched = settings.ddp_comm_hook.value == CommHook::kBatchedPowerSgd,
          .wire = wire_of(settings.ddp_comm_wrapper.value)});
    case CommHook::kNone:
      break;
  }
  return nullptr;
}

distributed::ReplicateOptions replicate_options(const Settings& settings,
                                                const precision::Policy& policy) {
  const auto bytes = [](double megabytes) { return static_cast<int64_t>(megabytes * 1048576); };
  distributed::ReplicateOptions options;
  options.first_bucket_bytes = bytes(settings.ddp_first_bucket_mb);
  options.bucket_bytes = bytes(settings.ddp_bucket_cap_mb);
  options.gradient_as_bucket_view = settings.ddp_gradient_as_bucket_view;
  options.average = settings.loss_weighting.value == LossWeighting::kHuggingFace
                        ? distributed::GradientAverage::kRanks
                        : distributed::GradientAverage::kWeight;
  options.init_sync = settings.ddp_init_sync;
  options.broadcast_buffers = settings.ddp_broadcast_buffers;
  if (policy.needs_masters()) options.gradient_dtype = policy.reduce;
  return options;
}

}  // namespace

std::unique_ptr<distributed::DataParallelModel> make_data_parallel(
    nn::ModuleBase& model, const Settings& settings, const precision::Policy& policy) {
  auto replica = std::make_unique<distributed::Replica>(
      distributed::replicate(model, distributed::mesh(), replicate_options(settings, policy)));
  if (auto hook = hook_of(settings)) replica->set_communication_hook(std::move(hook));
  return replica;
}

}  // namespace tessera::accelerate
