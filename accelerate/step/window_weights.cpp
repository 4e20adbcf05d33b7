#include <tessera/accelerate/step/window_weights.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <unordered_set>

#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera {
namespace {

double* value_of(const Tensor& tensor) { return tensor.data_as<double>(); }

// The first weight that is not 0, of one process as of ranks in their order: all must divide by the
// same. 0 where there is none yet. Ranks that have no more batches could not be asked.
double agree_on_nominal(double weight, distributed::Group& ranks, bool joined) {
  if (joined) return 1;
  if (ranks.size() == 1) return weight;
  const Tensor own = raw::empty({1}, kF64), all = raw::empty({ranks.size()}, kF64);
  *value_of(own) = weight;
  ranks.all_gather(all, own, {.channel = distributed::Channel::kControl, .tag = "nominal_weight"})
      .wait();
  const std::span<const double> weights(value_of(all), static_cast<size_t>(ranks.size()));
  const auto first = std::ranges::find_if(weights, [](double one) { return one > 0; });
  return first == weights.end() ? 0 : *first;
}

}  // namespace

// ---- Weights -----------------------------------------------------------------------------------

double WindowWeights::weigh(std::optional<double> given, const data::LoaderBase* loader,
                            distributed::ParallelDims& dims, bool joined, Nominal& nominal) const {
  if (divides_as_huggingface()) {
    TS_CHECK(!given, "backward", "loss_weighting=huggingface (",
             settings_.loss_weighting.origin.describe(),
             ") gives every micro-batch the same weight; got ", *given,
             "; leave the weight out, or take loss_weighting=samples");
    return 1;
  }
  if (given) {
    TS_CHECK(*given >= 0 && std::isfinite(*given), "backward",
             "a weight counts samples or tokens and is not negative; got ", *given);
    if (nominal.weight == 0) nominal.weight = agree_on_nominal(*given, dims.loss_ranks(), joined);
    return *given == 0 ? 0 : *given / nominal.weight;
  }
  if (loader == nullptr) return 1;
  if (nominal.samples == 0) {
    const int64_t batch_size = loader->options().batch_size;
    nominal.samples = batch_size == data::kNoBatching
                          ? agree_on_nominal(static_cast<double>(loader->batch_samples()),
                                             dims.loss_ranks(), joined)
                          : static_cast<double>(batch_size) /
                                (settings_.split_batches ? dims.batch_ranks().size() : 1);
  }
  const int64_t samples = loader->batch_samples();
  return samples == 0 ? 0 : static_cast<double>(samples) / nominal.samples;
}

void WindowWeights::add(Records own, double weight, bool is_given) {
  for (const auto& record : own) {
    StepWindow& window = record->window;
    TS_CHECK(window.weight() == 0 || record->explicit_weights == is_given, "backward",
             "the window's micro-batches are weighed by ",
             record->explicit_weights ? "weights that were given" : "their samples",
             " so far, this one by the other; give all of a window a weight, or none");
    record->explicit_weights = is_given;
    TS_CHECK(window.add_weight(weight), "backward",
             "a micro-batch has one weight; its first backward had ", window.micro_weight(),
             " of the nominal one, this one has ", weight, "; give all of its losses the same");
  }
}

bool WindowWeights::is_undivided(Records own) const {
  return std::ranges::none_of(prepared_.models,
                              [](const auto& record) { return record->reduces(); }) &&
         std::ranges::all_of(own, [](const auto& record) { return record->window.is_whole(); });
}

double WindowWeights::seed_of(const Tensor& loss, double weight, Records own, bool undivided,
                              int64_t steps) const {
  if (divides_as_huggingface()) {
    const std::optional<int64_t> of_model = own.empty() ? std::nullopt : own.front()->steps;
    return 1 / static_cast<double>(of_model.value_or(steps));
  }
  if (undivided) return weight == 0 ? 0 : 1;
  if (weight == 1) return 1;
  const auto leads = [&](const auto& record) { return record->is_reached_by(loss); };
  const auto leads_where_shared = [&](const auto& record) {
    return record->reduces() && leads(record);
  };
  const bool weighs =
      std::ranges::any_of(own, leads) || std::ranges::any_of(prepared_.models, leads_where_shared);
  return weighs ? weight : 1;
}

distributed::StepPlan WindowWeights::plan_backward(const ModelRecord& record,
                                                   const StepWindow* window, bool more,
                                                   double weight,
                                                   const data::LoaderBase* loader) const {
  bool sync = record.no_sync == 0 && !record.local;
  const bool last = window == nullptr || (window->is_boundary() && !more);
  if (window != nullptr) sync = sync && record.reduces_in(last, settings_.sync_each_batch);
  // Accelerate divides in every micro-batch that is reduced.
  const bool divides_each = divides_as_huggingface() && !record.parallel->reduces_every_backward();
  const data::LoaderCursor batch =
      loader == nullptr ? data::LoaderCursor{-1, -1} : loader->cursor();
  return {.micro_index = window != nullptr ? window->index() : 0,
          .is_last = last || divides_each,
          .sync_gradients = sync || record.triggered > 0,
          .weight = window != nullptr ? window->weight() : weight,
          .epoch = batch.epoch,
          .position = batch.position,
          .all_reduce = last};
}

// ---- Sums and means ----------------------------------------------------------------------------

void WindowWeights::begin_sum(ModelRecord& record, const Tensor& loss, bool at_once) const {
  record.kept.clear();
  if (divides_as_huggingface()) {  // a mean over the ranks: adding to it is right as it is
    if (record.reduces()) record.parallel->pass().keep_gradients();
    return;
  }
  const auto has_gradient = [](const NamedTensor& named) { return named.tensor.grad().defined(); };
  if (std::ranges::none_of(record.parameters, has_gradient)) return;
  if (!record.is_reached_by(loss)) return;
  // Hooks of parameters are given what this window brings, and a gradient of what is frozen since is in
  // no sum of it.
  const auto is_apart = [](const NamedTensor& named) {
    return named.tensor.grad().defined() && !named.tensor.requires_grad();
  };
  const bool apart = record.reduces() && (record.parallel->pass().has_hooks_of_parts() ||
                                          std::ranges::any_of(record.parameters, is_apart));
  if (!at_once || apart) {
    record.kept.take(record.parameters);
  } else if (record.reduces()) {
    record.parallel->pass().keep_gradients();
  }
}

void WindowWeights::resume(ModelRecord& record, std::unordered_set<TensorImpl*>& seen) const {
  if (!record.kept.empty()) {
    record.kept.subtract();
    if (record.reduces()) record.parallel->pass().accept_written();
  }
  if (record.reduces()) {
    distributed::BackwardPass& pass = record.parallel->pass();
    return divides_as_huggingface() ? pass.keep_gradients() : pass.resume_sum();
  }
  if (record.divisor == 1) return;
  kernels::multi_tensor_scale(gradients_of(record.parameters, seen), &record.divisor);
}

void WindowWeights::divide(Records records, bool undivided) const {
  std::unordered_set<TensorImpl*> seen;
  for (const auto& record : records) {
    const double weight = record->window.weight();
    record->divisor = undivided || divides_as_huggingface() || weight == 0 ? 1 : weight;
    if (record->divisor != 1) {
      const double factor = 1 / record->divisor;
      kernels::multi_tensor_scale(gradients_of(record->parameters, seen), &factor);
    }
    record->kept.add();
  }
}

}  // namespace tessera
