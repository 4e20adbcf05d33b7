
#include "step.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kPrice = "tessera price";
namespace dry = gpu::dry;

// A model with its batch: what a step computes the loss of.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual nn::ModuleBase& model() = 0;
  virtual void prepare(Accelerator& accelerator, optim::Optimizer& optimizer) = 0;
  virtual Tensor loss() = 0;
  int64_t tokens = 0;
};

int64_t context_of(const PriceOptions& options, int64_t longest) {
  const int64_t context = options.context > 0 ? options.context : longest;
  TS_CHECK_AS(ConfigError, context <= longest, kPrice, "--context is at most ", longest, " for ",
              options.model, "; got ", context);
  return context;
}
int64_t vocabulary_of(const PriceOptions& options, int64_t usual) {
  return options.vocabulary > 0 ? options.vocabulary : usual;
}
Tensor indices(const Shape& shape) { return zeros(shape, {.dtype = kI64, .device = cuda(0)}); }

class GptSubject : public Subject {
 public:
  explicit GptSubject(const PriceOptions& options) : model_(config_of(options)) {
    const int64_t context = model_.config.context;
    inputs_ = indices({options.batch_size, context});
    targets_ = indices({options.batch_size, context});
    tokens = options.batch_size * context;
  }
  nn::ModuleBase& model() override { return model_; }
  void prepare(Accelerator& accelerator, optim::Optimizer& optimizer) override {
    accelerator.prepare(model_, optimizer);
  }
  Tensor loss() override { return model_(inputs_, targets_).loss; }

 private:
  static nn::models::GptConfig config_of(const PriceOptions& options) {
    nn::models::GptConfig config{.vocab_size = vocabulary_of(options, 50304),
                                 .context = context_of(options, 1024)};
    TS_CHECK_AS(ConfigError, options.size != "base", kPrice,
                "--size of gpt2 is 124m or 355m; got base");
    if (options.size == "355m") {
      config.width = 1024;
      config.layers = 24;
      config.heads = 16;
    }
    return config;
  }
  nn::models::Gpt model_;
  Tensor inputs_, targets_;
};

// With two classes, of texts that fill their context.
class BertSubject : public Subject {
 public:
  explicit BertSubject(const PriceOptions& options) : model_(config_of(options)) {
    const int64_t context = model_.config.context;
    ids_ = indices({options.batch_size, context});
    labels_ = indices({options.batch_size});
    tokens = options.batch_size * context;
  }
  nn::ModuleBase& model() override { return model_; }
  void prepare(Accelerator& accelerator, optim::Optimizer& optimizer) override {
    accelerator.prepare(model_, optimizer);
  }
  Tensor loss() override { return model_(ids_, nn::models::TokenFeatures{}, labels_).loss; }

 private:
  static nn::models::BertConfig config_of(const PriceOptions& options) {
    TS_CHECK_AS(ConfigError, options.size.empty() || options.size == "base", kPrice,
                "--size of bert is base; got ", options.size);
    return {.vocab_size = vocabulary_of(options, 30528), .context = context_of(options, 512)};
  }
  nn::models::Bert model_;
  Tensor ids_, labels_;
};

std::unique_ptr<Subject> make_subject(const PriceOptions& options) {
  const nn::ParameterDefaultsGuard on_device({.device = cuda(0), .initialise = false});
  if (options.model == "bert") return std::make_unique<BertSubject>(options);
  return std::make_unique<GptSubject>(options);
}

precision::Policy policy_of(const PriceOptions& options) {
  if (options.dtype == "f32") return precision::Policy::f32();
  if (options.dtype == "autocast-bf16") return precision::Policy::autocast(kBF16);
  if (options.dtype != "fp8") return precision::Policy::pure(kBF16);
  auto recipe = precision::Fp8Recipe::named(options.fp8_recipe);
  recipe.filter = precision::fp8_filter_named(options.fp8_filter);
  return precision::Policy::fp8(recipe);
}
Precision precision_of(const PriceOptions& options) {
  if (options.dtype == "f32") return Precision::kNo;
  return options.dtype == "fp8" ? Precision::kFP8 : Precision::kBF16;
}

// A training whose steps can be called.
class Training {
 public:
  explicit Training(const PriceOptions& options)
      : subject_(make_subject(options)),
        optimizer_(subject_->model().named_parameters(), {.lr = 3e-4}) {
    if (options.accelerator) {
      accelerator_.emplace(AcceleratorOptions{
          .mixed_precision = precision_of(options),
          .precision_policy =
              options.dtype == "bf16" ? PrecisionPolicy::kPure : PrecisionPolicy::kAutocast,
          .device = "cuda:0",
          .fp8 = {.recipe = precision::Fp8Recipe::named(options.fp8_recipe).scaling,
                  .filter = precision::fp8_filter_named(options.fp8_filter)},
          .config_file = ""});
      subject_->prepare(*accelerator_, optimizer_);
    } else {
      applied_ = apply(subject_->model(), policy_of(options));
      optimizer_.begin_masters(applied_->take_originals());
    }
    if (options.graph && options.accelerator) {
      accelerated_graph_ = accelerator_->graphed_step(
          [this](const TensorList&) -> TensorList { return {compute()}; }, {.warmup = 2});
    } else if (options.graph) {
      graph_.emplace(
          cuda(0), [this](const TensorList&) -> TensorList { return {compute()}; },
          optim::GraphedStepOptions{.warmup = 2});
    }
  }

  void step() {
    if (graph_) {
      (*graph_)({});
    } else if (accelerated_graph_) {
      (*accelerated_graph_)({});
    } else {
      compute();
    }
  }
  // Steps until all of them are alike.
  void warm_up() {
    for (int i = 0; i < 2; ++i) step();
    while (graph_ && !graph_->captured()) step();
    while (accelerated_graph_ && accelerated_graph_->num_graphs() == 0) step();
  }
  int64_t tokens() const { return subject_->tokens; }

 private:
  Tensor compute() {
    Tensor loss;
    if (accelerator_) {
      const auto micro = accelerator_->accumulate(subject_->model());
      loss = subject_->loss();
      accelerator_->backward(loss);
      accelerator_->clip_grad_norm(subject_->model().parameters(), 1);
    } else {
      loss = subject_->loss();
      loss.backward();
      optim::clip_grad_norm(subject_->model().parameters(), 1, {.fold_into = &optimizer_});
      if (applied_->fp8()) applied_->fp8()->update();
    }
    optimizer_.step();
    optimizer_.zero_grad();
    return loss.detach();
  }

  std::unique_ptr<Subject> subject_;
  std::optional<precision::AppliedPolicy> applied_;
  optim::AdamW optimizer_;
  std::optional<Accelerator> accelerator_;
  std::optional<optim::GraphedStep> graph_;
  std::optional<accelerate::GraphedStep> accelerated_graph_;
};

// The median of some steps, while nobody listens to ranges.
double host_seconds(Training& training) {
  constexpr size_t kSteps = 5;
  std::vector<double> times;
  while (times.size() < kSteps) {
    const auto begin = std::chrono::steady_clock::now();
    training.step();
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    dry::take_launches();
  }
  std::ranges::sort(times);
  return times[kSteps / 2];
}

}  // namespace

StepPrice price_step(const PriceOptions& options, const dry::Machine& machine) {
  dry::set_device_bytes(machine.memory_bytes);
  dry::reset_peak_reserved_bytes(0);
  Training training(options);
  dry::record([&] { training.warm_up(); });  // names of what a graph captures
  StepPrice price;
  price.launches = dry::record([&] { training.step(); }).launches;
  price.bill = dry::price(price.launches, machine);
  price.facts = {.tokens = training.tokens(),
                 .peak_bytes = dry::peak_reserved_bytes(0),
                 .host_seconds = host_seconds(training)};
  return price;
}

}  // namespace tessera::cli
