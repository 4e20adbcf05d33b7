// Steps by pipeline stages: what a window of micro-batches is there, and what ranks tell each other
// when its last backward has ended.
#include <algorithm>
#include <map>
#include <span>
#include <sstream>
#include <unordered_set>
#include <utility>

#include <tessera/accelerate/accelerator_state.h>
#include <tessera/accelerate/parallelize.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/broadcast.h>
#include <tessera/distributed/pipeline/executor.h>
#include <tessera/distributed/pipeline/staged_model.h>
#include <tessera/distributed/transport/caller.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera {
namespace {

constexpr std::string_view kPipeline = "pipeline";

// What does not run by stages yet says so before anything is dealt.
void check_combination(const accelerate::Settings& settings, const ModelRecord& record) {
  const auto refuse = [&](bool found, const std::string& what, const char* instead) {
    TS_CHECK_AS(UnsupportedError, !found, "prepare", "pp_size=", settings.pp_size.value, " (",
                settings.pp_size.origin.describe(), ") does not go with ", what, " yet; ", instead);
  };
  refuse(settings.sharding.value == accelerate::Sharding::kZero2, "sharding zero2",
         "take zero1 or fsdp: the gradients of a stage are whole until its last backward");
  refuse(settings.sharding.value != accelerate::Sharding::kDdp && settings.dp_replicate_size > 1,
         "dp_replicate_size beside sharded parameters", "give dp_shard_size the ranks of both");
  refuse(!settings.fsdp_ignored_modules.value.empty(), "fsdp_ignored_modules", "leave it out");
  refuse(settings.ddp_comm_hook.value != accelerate::CommHook::kNone, "ddp_comm_hook",
         "leave it out");
  refuse(settings.cp_size > 1 || settings.sp_size > 1, "cp_size and sp_size",
         "take data-parallel ranks beside the stages");
  refuse(accelerate::offloads(settings), "offload", "leave it out");
  const precision::Policy& policy = record.policy.policy();
  refuse(policy.needs_masters() || !record.masters.empty(), "parameters in 16 bits",
         "take precision_policy autocast");
  refuse(settings.precision_policy.value == PrecisionPolicy::kBoundary &&
             settings.mixed_precision.value != Precision::kNo,
         "precision_policy boundary", "take autocast");
}

Tensor host_values(const std::vector<double>& values) {
  const Tensor tensor = raw::empty({std::ssize(values)}, kF64);
  std::ranges::copy(values, tensor.data_as<double>());
  return tensor;
}

// The mean of losses by their weights, in f64, added in their order.
Tensor mean_of(const TensorList& losses, const std::vector<double>& weights) {
  const NoGradGuard no_grad;
  double total = 0;
  Tensor sum = zeros({}, {.dtype = kF64, .device = losses.front().device()});
  for (size_t i = 0; i < losses.size(); ++i) {
    sum = add(sum, mul(losses[i].detach().reshape({}).to(kF64), weights[i]));
    total += weights[i];
  }
  return total == 0 ? sum : div(sum, total);
}

}  // namespace

void Accelerator::State::deal_over_stages(ModelRecord& record) {
  nn::ModuleBase& model = *record.model;
  check_combination(settings, record);
  const auto per_rank = static_cast<int>(settings.pp_stages_per_rank);
  TS_CHECK_AS(
      ConfigError,
      per_rank == 1 || settings.pp_schedule.value == distributed::PipelineSchedule::kOneFOneB,
      "prepare", "pp_stages_per_rank=", per_rank, " (",
      settings.pp_stages_per_rank.origin.describe(), ") does not go with pp_schedule of ",
      settings.pp_schedule.origin.describe(),
      ", which has one stage on each rank; take pp_schedule 1f1b");
  if (settings.ddp_init_sync) {
    NamedTensors values;
    for (const NamedTensor& named : model.named_parameters()) {
      values.push_back({named.name, raw::alias(named.tensor)});
    }
    for (const NamedTensor& named : model.named_buffers()) {
      values.push_back({named.name, raw::alias(named.tensor)});
    }
    const NoGradGuard no_grad;
    // Ranks that divide layers have agreed, and hold different parts.
    distributed::Mesh& mesh = dims->mesh();
    distributed::Group& alike =
        mesh.has("tp") ? mesh.group({"pp", mesh.has("dp_shard") ? "dp_shard" : "dp_replicate"})
                       : dims->state_ranks();
    distributed::broadcast_tensors(values, alike, 0, "parameters");
  }
  std::vector<std::string> wanted = cuts.empty() ? settings.pp_cuts.value : cuts;
  if (wanted.empty()) {
    wanted = distributed::even_cuts(model, accelerate::units_of(model, settings),
                                    static_cast<int>(settings.pp_size) * per_rank);
  }
  auto sharding = distributed::StageSharding::kNone;
  if (dims->loss_ranks().size() > 1 && settings.sharding.value != Sharding::kDdp) {
    sharding = settings.sharding.value == Sharding::kZero1
                   ? distributed::StageSharding::kStates
                   : distributed::StageSharding::kParameters;
  }
  record.stages = std::make_unique<distributed::StagedModel>(
      model, &dims->mesh(),
      distributed::StagingOptions{
          .cuts = std::move(wanted), .stages_per_rank = per_rank, .sharding = sharding});
}

namespace accelerate {

struct Pipeline::Impl {
  using State = Accelerator::State;

  Accelerator* accelerator = nullptr;
  std::shared_ptr<State> state;
  nn::ModuleBase* model = nullptr;
  PipelineOptions options;
  std::unique_ptr<distributed::StagedModel> own_stages;  // of one process with ties_apart
  std::map<int, std::unique_ptr<distributed::PipelineExecutor>> executors;  // by micro-batches

  std::shared_ptr<ModelRecord> record(std::string_view where) const {
    return state->at(*model, where);
  }
  distributed::StagedModel* stages(const ModelRecord& record) const {
    return own_stages ? own_stages.get() : record.stages.get();
  }
  distributed::PipelineGroups groups() const {
    if (own_stages) {
      distributed::Group& alone = distributed::world();
      return {alone, alone};
    }
    return {state->dims->pipeline_outputs(), state->dims->pipeline_gradients()};
  }
  distributed::PipelineTable table(const distributed::StagedModel& staged, int count) const {
    return distributed::make_schedule(state->settings.pp_schedule.value, staged.ranks(),
                                      staged.stages() / staged.ranks(), count);
  }
  distributed::PipelineExecutor& executor(distributed::StagedModel& staged, int count) {
    std::unique_ptr<distributed::PipelineExecutor>& made = executors[count];
    if (!made) {
      made = std::make_unique<distributed::PipelineExecutor>(
          table(staged, count), staged.own_stages(), groups(),
          distributed::ExecutorOptions{.device = state->device,
                                       .shapes_vary = options.shapes_vary});
    }
    return *made;
  }

  // ---- Steps
  std::vector<double> weights_of(int64_t count, const std::vector<double>& given) const;
  Tensor plain_step(ModelRecord& record, int64_t count, const OfBatch& loss,
                    const std::vector<double>& weights);
  Tensor staged_step(const std::shared_ptr<ModelRecord>& record, int count, const OfBatch& loss,
                     const std::vector<double>& weights);
  distributed::StagedModel::Call numbered(distributed::StagedModel& staged, int count,
                                          const OfBatch& call, bool trains);
  // A gradient that a step adds to, and its values, unless they are set apart (`kept`).
  struct Before {
    Tensor gradient, values;
  };
  void give_back(ModelRecord& record, const std::vector<Before>& before);
  void reduce(distributed::StagedModel& staged, TensorList& losses, std::span<const double> weights,
              double& weight);
};

Pipeline::Pipeline(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;

int64_t Pipeline::micro_batches() const {
  return impl_->record("pipeline")->steps.value_or(impl_->state->steps);
}
int Pipeline::stages() const {
  const distributed::StagedModel* staged = impl_->stages(*impl_->record("pipeline"));
  return staged == nullptr ? 1 : staged->stages();
}
bool Pipeline::is_last_stage() const {
  const distributed::StagedModel* staged = impl_->stages(*impl_->record("pipeline"));
  return staged == nullptr || impl_->groups().outputs.rank() == staged->last_rank();
}

void Pipeline::check_generates() const {
  TS_CHECK_AS(UnsupportedError, stages() == 1, kPipeline,
              "generate() is not built for several stages: each token would go round all of them; "
              "save the model and generate from it in one process, or take tp_size");
}

std::string Pipeline::describe() const {
  const distributed::StagedModel* staged = impl_->stages(*impl_->record("pipeline"));
  if (staged == nullptr) return "one stage: the plain loop over micro-batches\n";
  const auto count = static_cast<int>(micro_batches());
  const distributed::Timing timing = distributed::simulate(impl_->table(*staged, count));
  char text[160];
  plain_snprintf(
      text, sizeof text,
      "%d stages on %d ranks, %d micro-batches: a bubble of %.1f%% of the step%s\n",
      staged->stages(), staged->ranks(), count, 100 * timing.bubble,
      count < staged->ranks() ? " (fewer micro-batches than ranks: some always wait)" : "");
  std::string live = "activations of stages that each rank keeps at most:";
  for (const int64_t activations : timing.live_activations)
    live += " " + std::to_string(activations);
  return text + live + "\n" + staged->describe();
}

// ---- One step ----------------------------------------------------------------------------------

// 1 each where nobody gives them.
std::vector<double> Pipeline::Impl::weights_of(int64_t count,
                                               const std::vector<double>& given) const {
  const auto& setting = state->settings.loss_weighting;
  TS_CHECK(given.empty() || setting.value != LossWeighting::kHuggingFace, kPipeline,
           "loss_weighting=huggingface (", setting.origin.describe(),
           ") gives every micro-batch the same weight; leave the weights out, or take "
           "loss_weighting=samples");
  TS_CHECK(given.empty() || std::ssize(given) == count, kPipeline, "the window has ", count,
           " micro-batches, and there are ", given.size(), " weights; give one for each");
  return given.empty() ? std::vector<double>(static_cast<size_t>(count), 1.0) : given;
}

Tensor Pipeline::Impl::plain_step(ModelRecord& record, int64_t count, const OfBatch& loss,
                                  const std::vector<double>& weights) {
  const bool alike = state->settings.loss_weighting.value == LossWeighting::kHuggingFace;
  const ScopedValue<std::optional<int64_t>> steps(record.steps, count);
  const ScopedValue<bool> by_count(state->sync_with_dataloader, false);
  const int64_t number = state->counters.micro_batches;
  TensorList losses;
  for (int64_t i = 0; i < count; ++i) {
    const auto micro = accelerator->accumulate(*model);
    bool added = i > 0;
    // What a step that failed has added goes, and the next one begins a window with its numbers.
    try {
      const Tensor one = loss(i);
      losses.push_back(one.detach());
      added = true;
      accelerator->backward(
          one, {.weight = alike ? std::nullopt : std::optional(weights[static_cast<size_t>(i)])});
    } catch (...) {
      added ? record.leave_window() : record.window.leave();
      state->counters.micro_batches = number;
      throw;
    }
  }
  return mean_of(losses, weights);
}

// Random numbers of a micro-batch are those that it has in one process: of the model by its number, in
// an evaluation those behind the micro-batch before, of the program where the first call of the
// rank's stages found them.
distributed::StagedModel::Call Pipeline::Impl::numbered(distributed::StagedModel& staged, int count,
                                                        const OfBatch& call, bool trains) {
  struct Numbers {
    RandomState program, model;
  };
  const auto before =
      std::make_shared<std::vector<std::optional<Numbers>>>(static_cast<size_t>(count));
  const int64_t base = state->counters.micro_batches;
  return [this, &staged, before, base, count, &call, trains](int micro) {
    std::optional<ScopedValue<int64_t>> number;
    if (trains) {
      number.emplace(state->counters.micro_batches, base + micro * state->data_ranks);
      state->begin_random_numbers();
      // As replicas and shards do where the gradients of the micro-batch are reduced.
      if ((micro + 1 == count || state->settings.sync_each_batch) && model->is_training() &&
          !own_stages && state->dims->loss_ranks().size() > 1 &&
          state->settings.ddp_broadcast_buffers) {
        staged.follow_buffers(state->dims->loss_ranks());
      }
    }
    std::optional<Numbers>& numbers = (*before)[static_cast<size_t>(micro)];
    if (!numbers) {
      numbers = {random_state(), state->random};
      return call(micro);
    }
    const ScopedValue<RandomState> program(random_state(), numbers->program);
    if (trains) return call(micro);
    const ScopedValue<RandomState> of_model(state->random, numbers->model);
    return call(micro);
  };
}

// What the ranks must know of each other: whether they read the same micro-batches, the losses, which
// parameters have gradients, and over data-parallel ranks the sums of gradients and weights.
void Pipeline::Impl::reduce(distributed::StagedModel& staged, TensorList& losses,
                            std::span<const double> weights, double& weight) {
  distributed::ParallelDims& dims = *state->dims;
  std::vector<bool> has = staged.own_gradients();
  const distributed::CollectiveOptions control{.channel = distributed::Channel::kControl,
                                               .tag = "pipeline_step"};
  // The values of each rank, in their order; `has` becomes that of any.
  const auto exchange = [&](distributed::Group& ranks, std::vector<double> values) {
    const size_t own = values.size();
    for (const bool one : has) values.push_back(one ? 1 : 0);
    const Tensor all = raw::empty({ranks.size(), std::ssize(values)}, kF64);
    ranks.all_gather(all, host_values(values), control).wait();
    std::vector<std::vector<double>> of_ranks;
    const double* first = all.data_as<double>();
    for (int rank = 0; rank < ranks.size(); ++rank, first += values.size()) {
      of_ranks.emplace_back(first, first + own);
      for (size_t i = 0; i < has.size(); ++i) has[i] = has[i] || first[own + i] > 0;
    }
    return of_ranks;
  };
  std::string different;
  if (!own_stages) {
    const data::LoaderBase* const loader = state->loader_plan->active();
    const data::LoaderCursor read =
        loader == nullptr ? data::LoaderCursor{-1, -1} : loader->cursor();
    std::vector<double> values = {static_cast<double>(read.epoch),
                                  static_cast<double>(read.position)};
    values.insert(values.end(), weights.begin(), weights.end());
    const size_t alike = values.size();
    for (size_t i = 0; i < weights.size(); ++i) {
      values.push_back(i < losses.size() ? losses[i].to(kF64).item() : 0);
    }
    distributed::Group& ranks = dims.mesh().group("pp");
    const std::vector<std::vector<double>> of_ranks = exchange(ranks, std::move(values));
    for (size_t rank = 1; rank < of_ranks.size() && different.empty(); ++rank) {
      for (size_t i = 0; i < alike && different.empty(); ++i) {
        if (of_ranks[rank][i] == of_ranks[0][i]) continue;
        const char* const what = i == 0 ? "epoch " : i == 1 ? "position " : "the weight ";
        PlainText<std::ostringstream> out;
        out << "rank 0 has " << what << of_ranks[0][i] << ", rank " << rank << " has " << what
            << of_ranks[rank][i];
        different = out.str();
      }
    }
    losses.clear();
    const std::vector<double>& of_last = of_ranks[static_cast<size_t>(staged.last_rank())];
    for (size_t i = 0; i < weights.size(); ++i) {
      losses.push_back(scalar_tensor(of_last[alike + i], kF64));
    }
  }
  if (!own_stages && dims.loss_ranks().size() > 1) {
    double total = 0;
    for (const std::vector<double>& of_rank : exchange(dims.loss_ranks(), {weight})) {
      total += of_rank[0];
    }
    weight = total;
    distributed::CoalescedScope sums(dims.loss_ranks(), {.tag = "pipeline_gradients"});
    for (const Tensor& gradient : staged.gradients_to_reduce(has)) sums.all_reduce(gradient);
    sums.finish().wait();
  }
  staged.finish_reductions(has);
  if (!own_stages) staged.complete_gradients(has);
  staged.share_buffers();
  // When all that was begun has ended.
  TS_CHECK(different.empty(), kPipeline,
           "the ranks of a pipeline have read different micro-batches: ", different,
           "; let all ranks take the same steps through a prepared loader (-1: none)");
}

// After a step that failed: the gradients before it, and the next one begins a window.
void Pipeline::Impl::give_back(ModelRecord& record, const std::vector<Before>& before) {
  const NoGradGuard no_grad;
  for (size_t i = 0; i < before.size(); ++i) {
    const Tensor& gradient = before[i].gradient;
    record.parameters[i].tensor.set_grad(gradient);
    if (!gradient.defined()) continue;
    if (before[i].values.defined()) {
      copy_(raw::alias(gradient), before[i].values);
    } else {
      zero_(raw::alias(gradient));
    }
  }
  record.kept.add();
  record.kept.clear();
  record.window.leave();
}

Tensor Pipeline::Impl::staged_step(const std::shared_ptr<ModelRecord>& held, int count,
                                   const OfBatch& loss, const std::vector<double>& given) {
  ModelRecord& record = *held;
  distributed::StagedModel& staged = *stages(record);
  LossScaling& scaling = state->loss_scaling;
  const bool alike = state->settings.loss_weighting.value == LossWeighting::kHuggingFace;
  std::vector<double> weights;
  for (const double weight : given) {
    weights.push_back(state->weigh(alike ? std::nullopt : std::optional(weight)));
  }
  if (!own_stages) {
    // One number for all of them, in their order.
    double of_all = 0;
    for (const double weight : weights) of_all = weight + 1.0625 * of_all;
    state->check_one_batch(of_all);
  }
  const std::shared_ptr<ModelRecord> list[] = {held};
  for (int i = 0; i < count; ++i) {
    record.window.begin_micro(count, i + 1 == count);
    WindowWeights::add(list, weights[static_cast<size_t>(i)], !alike);
  }
  const bool alone = own_stages || state->dims->loss_ranks().size() == 1;
  const bool undivided = alone && state->weights.is_undivided(list);
  state->sync_gradients = true;
  // Gradients that are there are added to the mean.
  const auto has_gradient = [](const NamedTensor& named) { return named.tensor.grad().defined(); };
  record.kept.clear();
  const bool any = std::ranges::any_of(record.parameters, has_gradient);
  // (Where parameters are sharded the owner would add them to the sum before it is divided.)
  const bool apart = !alike || (!alone && state->settings.sharding.value != Sharding::kDdp);
  // One process that has all stages runs hooks of parameters in its backwards; else they run once,
  // behind them, on what this rank has of the window's gradient.
  const bool hooked = !own_stages && std::ranges::any_of(record.parameters, [](const auto& named) {
    return has_leaf_hooks(named.tensor);
  });
  if (any && (hooked || (!undivided && apart))) record.kept.take(record.parameters);

  const bool on_device = scaling.is_on_device();
  const double scale = on_device ? 1 : scaling.scale();
  distributed::StagedModel::Calls calls;
  calls.call = [&, call = numbered(staged, count, loss, true)](int micro) {
    const Tensor one = call(micro);
    TS_CHECK_SHAPE(one.defined() && one.numel() == 1, kPipeline,
                   "the loss must have one element; got ", one, "; take its mean");
    if (one.is_meta() || scaling.scale() == 1) return one;
    return one.dtype() == kF16 || one.dtype() == kBF16 ? one.to(kF32) : one;
  };
  calls.seed = [&](int micro, const Tensor& one) {
    const double weight = weights[static_cast<size_t>(micro)];
    const double seed = (alike       ? 1 / static_cast<double>(count)
                         : undivided ? (weight == 0 ? 0 : 1)
                                     : weight) *
                        scale;
    if (on_device)
      return scaling.scaler()->scale(raw::full(one.shape(), seed, one.dtype(), one.device()));
    return seed == 1 ? Tensor() : raw::full(one.shape(), seed, one.dtype(), one.device());
  };
  TensorList losses;
  // What ranks tell each other outside of the schedule's actions.
  const auto between = [&](const char* when, const auto& exchange) {
    try {
      exchange();
    } catch (DistributedError& error) {
      error.add_context("pipeline, rank " + std::to_string(groups().outputs.rank()) + ", " + when);
      throw;
    }
  };
  std::vector<Before> before;
  for (const NamedTensor& named : record.parameters) {
    const Tensor gradient = named.tensor.grad();
    const bool copies = gradient.defined() && record.kept.empty();
    before.push_back({gradient, copies ? clone(raw::alias(gradient)) : Tensor()});
  }
  double weight = record.window.weight();
  const int64_t number = state->counters.micro_batches;
  std::optional<distributed::StagedModel::Step> step;
  try {
    between("before the first forward",
            [&] { step.emplace(staged, groups(), std::move(calls), true); });
    losses = executor(staged, count).step();
    between("behind the last backward", [&] { step->finish(); });
    state->counters.micro_batches += static_cast<int64_t>(count) * state->data_ranks;
    const NoGradGuard no_grad;
    between("behind the last backward", [&] { reduce(staged, losses, weights, weight); });
  } catch (...) {
    step.reset();
    give_back(record, before);
    state->counters.micro_batches = number;
    throw;
  }
  step.reset();
  const NoGradGuard no_grad;
  record.window_weight = weight;
  double divisor = undivided || alike || weight == 0 ? 1 : weight;
  if (alike) divisor = alone ? 1 : static_cast<double>(state->dims->loss_ranks().size());
  record.divisor = divisor;
  if (divisor != 1) {
    std::unordered_set<TensorImpl*> seen;
    const double factor = 1 / divisor;
    kernels::multi_tensor_scale(gradients_of(record.parameters, seen), &factor);
  }
  if (hooked) {
    for (const NamedTensor& parameter : record.parameters) run_leaf_hooks(parameter.tensor);
  }
  record.kept.add();
  record.kept.note_versions();
  record.window.set_reduced();
  record.owes_step = true;
  record.consumed = false;
  return mean_of(losses, given);
}

Tensor Pipeline::run(int64_t count, const OfBatch& loss, std::vector<double> given,
                     const SourceLocation& where) {
  const distributed::CallerScope caller(where);
  Impl::State& state = *impl_->state;
  TS_CHECK(count >= 1, kPipeline, "a window has at least one micro-batch; this one is empty");
  state.refuse_in_capture("pipeline.step");
  state.forget_dead();
  const auto record = impl_->record("pipeline");
  const std::vector<double> weights = impl_->weights_of(count, given);
  if (impl_->stages(*record) == nullptr) {
    return impl_->plain_step(*record, count, loss, weights);
  }
  TS_CHECK(state.open.empty(), kPipeline,
           "step() opens the micro-batches itself; call it outside of accumulate()");
  state.end_left_windows();
  state.update_scale();
  state.loss_scaling.forget_norms();
  return impl_->staged_step(record, static_cast<int>(count), loss, weights);
}

std::vector<Tensor> Pipeline::run_forward(int64_t count, const OfBatch& call,
                                          const SourceLocation& where) {
  const distributed::CallerScope caller(where);
  const NoGradGuard no_grad;
  const auto record = impl_->record("pipeline");
  distributed::StagedModel* staged = impl_->stages(*record);
  TensorList results;
  if (staged == nullptr) {
    for (int64_t i = 0; i < count; ++i) results.push_back(call(i));
    return results;
  }
  if (count == 0) return results;
  {
    const auto of_count = static_cast<int>(count);
    distributed::StagedModel::Step step(
        *staged, impl_->groups(), {.call = impl_->numbered(*staged, of_count, call, false)}, false);
    results = impl_->executor(*staged, of_count).evaluate();
    step.finish();
    staged->share_buffers();
  }
  if (impl_->own_stages) return results;
  // Their looks, then their elements.
  distributed::Group& ranks = impl_->state->dims->mesh().group("pp");
  const int last = staged->last_rank();
  constexpr int64_t kDims = 16;
  const Tensor looks = raw::zeros({count, kDims + 2}, kI64);
  int64_t* look = looks.data_as<int64_t>();
  for (const Tensor& result : results) {
    TS_CHECK_SHAPE(result.dim() <= kDims, kPipeline, "results have at most ", kDims,
                   " dimensions; got ", result);
    look[0] = static_cast<int64_t>(result.dtype());
    look[1] = result.dim();
    std::ranges::copy(result.shape(), look + 2);
    look += kDims + 2;
  }
  ranks
      .broadcast(looks, last,
                 {.channel = distributed::Channel::kControl, .tag = "pipeline_results"})
      .wait();
  look = looks.data_as<int64_t>();
  distributed::CoalescedScope calls(ranks, {.tag = "pipeline_results"});
  for (int64_t i = 0; i < count; ++i, look += kDims + 2) {
    const Shape shape(std::span(look + 2, static_cast<size_t>(look[1])));
    const auto at = static_cast<size_t>(i);
    if (ranks.rank() != last) {
      results.push_back(raw::empty(shape, static_cast<DType>(look[0]), impl_->state->device));
    } else {
      results[at] = kernels::contiguous(results[at]);
    }
    calls.broadcast(results[at], last);
  }
  calls.finish().wait();
  return results;
}

}  // namespace accelerate

accelerate::Pipeline Accelerator::pipeline(nn::ModuleBase& model,
                                           const accelerate::PipelineOptions& options) {
  State& state = *state_;
  state.forget_dead();
  if (state.find(model) == nullptr) {
    const ScopedValue<std::vector<std::string>> cuts(state.cuts, options.cuts);
    prepare(model);
  }
  const auto record = state.at(model, kPipeline);
  if (record->stages) {
    TS_CHECK_AS(
        ConfigError, options.cuts.empty() || options.cuts == record->stages->cuts(), kPipeline,
        "prepare() has dealt ", record->type_name,
        " over other stages; call pipeline(model, {.cuts = ...}) in place of prepare(model),"
        " or set pp_cuts");
    TS_CHECK_AS(
        ConfigError, !options.ties_apart, kPipeline,
        "ties_apart is for comparisons on one process; stages add tied gradients so anyway");
  }
  auto impl = std::make_unique<accelerate::Pipeline::Impl>();
  impl->accelerator = this;
  impl->state = state_;
  impl->model = &model;
  impl->options = options;
  if (options.ties_apart) {
    TS_CHECK_AS(UnsupportedError, num_processes() == 1 && record->parallel == nullptr, kPipeline,
                "ties_apart is for one process in f32, autocast or fp16 without offload");
    distributed::StagingOptions staging{.cuts = options.cuts};
    if (staging.cuts.empty()) {
      staging.cuts = distributed::even_cuts(model, accelerate::units_of(model, state.settings), 2);
    }
    staging.stages_per_rank = static_cast<int>(staging.cuts.size()) + 1;
    impl->own_stages = std::make_unique<distributed::StagedModel>(model, nullptr, staging);
  }
  return accelerate::Pipeline(std::move(impl));
}

}  // namespace tessera
