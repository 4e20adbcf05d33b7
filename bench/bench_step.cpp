// A whole training step of a model: forward, loss, backward, clipping, AdamW. The same model,
// batch and loop as bench/compare/pytorch_gpt.py; bench/compare/run.py runs both in turn.
//
//     bench_step --vocab 50304 --dtype bf16 --steps 10 --profile
//     bench_step --device cuda --dtype bf16 --layers 12 --width 768 --heads 12 --context 1024
//
// --model: gpt2; bert: a text of --context tokens is put into one of two classes; llama, lstm: as
// gpt2 (step_models.h); vit: images of --context patches, a square number, in --vocab classes; cnn:
// digits, of which --batch-size alone counts.
// --dtype: f32; bf16: parameters too, with f32 masters; autocast-bf16: f32 parameters, as
// torch.autocast has it; autocast-fp16: with loss scaling; fp8-RECIPE: autocast-bf16 with all
// linear layers in fp8 (precision/fp8_recipe.h).
//
// On a GPU the steps of a turn are queued one after the other and timed together, as a training
// runs them. --graph: as replays of a CUDA graph (optim/graphed_step.h), captured after the
// warm-up.
//
// --launch-times FILE: on a GPU, of one more step each launch in its order, as JSON: {"name", "op",
// "layer", "request", "ms"} (core/cuda/launch_times.h); to be read beside `tessera price`
// (scripts/beside_price.py).
// --fp8-filter: with fp8-RECIPE, which linear layers: all (default), default, pays.
// --weights FOLDER --batches FILE: a GPT-2 as transformers saves it, and "tokens" i64
// [steps, B, context + 1] of a safetensors file, one batch for each step; sizes come from them, and
// nothing is warmed up. What bench/compare/fp8_losses.py compares losses by.
//
// Prints one JSON line: median ms/step, tokens/s, memory of the process over start-up, the most
// bytes that tensors held, how often own kernels ran on a GPU what its libraries did not get, and
// the losses of the steps that had batches of their own.
#include <time.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cuda/launch_times.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/isa.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/grad_scaler.h>

#include "resident.h"
#include "step_models.h"

namespace {

using namespace tessera;

double cpu_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

precision::Policy policy_of(const std::string& dtype, const std::string& fp8_filter) {
  if (dtype == "f32") return precision::Policy::f32();
  if (dtype == "bf16") return precision::Policy::pure(kBF16);
  if (dtype == "autocast-bf16") return precision::Policy::autocast(kBF16);
  if (dtype == "autocast-fp16") return precision::Policy::autocast(kF16);
  if (dtype.starts_with("fp8-")) {
    precision::Policy policy = precision::policy_named(dtype);
    policy.fp8_recipe->filter = precision::fp8_filter_named(fp8_filter);
    return policy;
  }
  TS_THROW(ValueError, "bench_step",
           "--dtype is f32, bf16, autocast-bf16, autocast-fp16 or fp8-RECIPE; got '", dtype, "'");
}

struct Options {
  int64_t layers = 6, width = 384, heads = 6, context = 256, batch_size = 8, vocab = 256;
  int64_t threads = 2, warmup = 3, steps = 10;
  std::string dtype = "f32", device = "cpu", model = "gpt2", fp8_filter = "all";
  std::string weights, batches, launch_times;
  bool profile = false;
  bool graph = false;
  bool serve = false;  // read counts from stdin, run that many steps, print their times
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("A whole training step of a model: forward, loss, backward, clipping, AdamW.");
  const auto number = [&](const char* name, int64_t& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str()->check(CLI::PositiveNumber);
  };
  number("--layers", options.layers, "blocks");
  number("--width", options.width, "size of the residual stream");
  number("--heads", options.heads, "attention heads");
  number("--context", options.context, "tokens of a sequence; patches of an image");
  number("--vocab", options.vocab, "tokens, or classes");
  number("--batch-size", options.batch_size, "sequences of a step");
  number("--threads", options.threads, "for compute");
  app.add_option("--warmup", options.warmup, "steps before")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  number("--steps", options.steps, "measured steps");
  app.add_option("--dtype", options.dtype,
                 "f32, bf16, autocast-bf16, autocast-fp16 or fp8-RECIPE, as fp8-tensorwise")
      ->capture_default_str();
  app.add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--model", options.model, "which one, of these sizes")
      ->capture_default_str()
      ->check(CLI::IsMember({"gpt2", "bert", "llama", "lstm", "vit", "cnn"}));
  app.add_option("--fp8-filter", options.fp8_filter,
                 "with fp8-RECIPE, which linear layers: all, default or pays")
      ->capture_default_str();
  app.add_option("--weights", options.weights, "folder of a GPT-2 as transformers saves it");
  app.add_option("--batches", options.batches, "safetensors of its tokens, a batch for each step");
  app.add_option("--launch-times", options.launch_times,
                 "on a GPU, file for the launches of one more step");
  app.add_flag("--profile", options.profile, "also the time of each op");
  app.add_flag("--graph", options.graph, "on a GPU, steps are replays of a CUDA graph");
  app.add_flag("--serve", options.serve,
               "read counts from the standard input, run that many steps, print their times");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  (void)policy_of(options.dtype, options.fp8_filter);
  TS_CHECK(!options.graph || (!options.profile && options.launch_times.empty()), "bench_step",
           "--profile and --launch-times tell of ops and launches, and a graph is one; leave them "
           "out, or --graph");
  TS_CHECK(options.weights.empty() == options.batches.empty() &&
               (options.weights.empty() || (options.model == "gpt2" && !options.graph)),
           "bench_step", "--weights and --batches go together, with --model gpt2 and no --graph");
  return options;
}

// A model with its batch: what a step computes the loss of.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual nn::ModuleBase& model() = 0;
  virtual Tensor loss() = 0;
};

class GptSubject : public Subject {
 public:
  GptSubject(const Options& options, const Device& device)
      : model_({.vocab_size = options.vocab,
                .context = options.context,
                .width = options.width,
                .layers = options.layers,
                .heads = options.heads}) {
    const Tensor tokens = randint(0, options.vocab, {options.batch_size, options.context + 1});
    inputs_ = tokens.narrow(1, 0, options.context).contiguous().to(device);
    targets_ = tokens.narrow(1, 1, options.context).contiguous().to(device);
  }
  nn::ModuleBase& model() override { return model_; }
  Tensor loss() override { return model_(inputs_, targets_).loss; }

 private:
  nn::models::Gpt model_;
  Tensor inputs_, targets_;
};

// Weights and batches from files: step after step the next batch.
class GivenSubject : public Subject {
 public:
  GivenSubject(const Options& options, const Device& device)
      : model_(nn::models::Gpt::from_pretrained(options.weights)),
        tokens_(SafeTensorsFile(options.batches).load("tokens").to(device)) {}
  nn::ModuleBase& model() override { return *model_; }
  Tensor loss() override {
    const Tensor batch = tokens_.select(0, next_++);
    const int64_t context = batch.size(1) - 1;
    return (*model_)(batch.narrow(1, 0, context).contiguous(),
                     batch.narrow(1, 1, context).contiguous())
        .loss;
  }

 private:
  std::unique_ptr<nn::models::Gpt> model_;
  Tensor tokens_;
  int64_t next_ = 0;
};

class BertSubject : public Subject {
 public:
  BertSubject(const Options& options, const Device& device)
      : model_({.vocab_size = options.vocab,
                .width = options.width,
                .layers = options.layers,
                .heads = options.heads,
                .context = options.context}),
        ids_(randint(0, options.vocab, {options.batch_size, options.context}).to(device)),
        labels_(randint(0, 2, {options.batch_size}).to(device)) {}
  nn::ModuleBase& model() override { return model_; }
  Tensor loss() override { return model_(ids_, nn::models::TokenFeatures{}, labels_).loss; }

 private:
  nn::models::Bert model_;
  Tensor ids_, labels_;
};

// A model that takes inputs and targets and gives the loss. Images come in the weights' dtype.
template <class M>
class PairSubject : public Subject {
 public:
  PairSubject(std::unique_ptr<M> model, const Tensor& inputs, const Tensor& targets,
              const Device& device)
      : model_(std::move(model)), inputs_(inputs.to(device)), targets_(targets.to(device)) {}
  nn::ModuleBase& model() override { return *model_; }
  Tensor loss() override {
    if (is_floating(inputs_.dtype())) inputs_ = inputs_.to(model_->parameters()[0].dtype());
    return (*model_)(inputs_, targets_);
  }

 private:
  std::unique_ptr<M> model_;
  Tensor inputs_, targets_;
};

template <class M, class... Sizes>
std::unique_ptr<Subject> pair_subject(const Tensor& inputs, const Tensor& targets,
                                      const Device& device, Sizes... sizes) {
  return std::make_unique<PairSubject<M>>(std::make_unique<M>(sizes...), inputs, targets, device);
}

// llama, lstm, vit, cnn.
std::unique_ptr<Subject> small_subject(const Options& o, const Device& device) {
  if (o.model == "cnn") {
    return pair_subject<bench::Cnn>(randn({o.batch_size, 1, 28, 28}),
                                    randint(0, 10, {o.batch_size}), device);
  }
  if (o.model == "vit") {
    const auto side = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(o.context))));
    TS_CHECK(side * side == o.context, "bench_step", "--context of a vit is a square; got ",
             o.context);
    return pair_subject<bench::Vit>(randn({o.batch_size, 3, 4 * side, 4 * side}),
                                    randint(0, o.vocab, {o.batch_size}), device, o.layers, o.width,
                                    o.heads, o.context, o.vocab);
  }
  const Tensor tokens = randint(0, o.vocab, {o.batch_size, o.context + 1});
  const Tensor inputs = tokens.narrow(1, 0, o.context).contiguous();
  const Tensor targets = tokens.narrow(1, 1, o.context).contiguous();
  if (o.model == "lstm") {
    return pair_subject<bench::LstmLm>(inputs, targets, device, o.layers, o.width, o.vocab);
  }
  return pair_subject<bench::Llama>(inputs, targets, device, o.layers, o.width, o.heads, o.context,
                                    o.vocab);
}

std::unique_ptr<Subject> make_subject(const Options& options, const Device& device) {
  std::unique_ptr<Subject> subject;
  if (!options.weights.empty()) {
    subject = std::make_unique<GivenSubject>(options, device);
  } else if (options.model == "bert") {
    subject = std::make_unique<BertSubject>(options, device);
  } else if (options.model != "gpt2") {
    subject = small_subject(options, device);
  } else {
    subject = std::make_unique<GptSubject>(options, device);
  }
  subject->model().to(device);
  return subject;
}

class Bench {
 public:
  Bench(const Options& options, const Device& device)
      : device_(device),
        subject_(make_subject(options, device)),
        applied_(apply(subject_->model(), policy_of(options.dtype, options.fp8_filter))),
        optimizer_(subject_->model().named_parameters(),
                   {.lr = 3e-4, .betas = {0.9, 0.99}, .weight_decay = 0.1}),
        scaler_({.enabled = applied_.policy().needs_loss_scaling(), .on_device = options.graph}) {
    optimizer_.begin_masters(applied_.take_originals());
    if (options.graph) {
      graph_.emplace(
          device, [this](const TensorList&) -> TensorList { return {compute()}; },
          optim::GraphedStepOptions{.warmup = std::max<int64_t>(options.warmup, 1)});
    }
  }

  // Leaves the loss where it is.
  void step() { last_ = graph_ ? (*graph_)({})[0] : compute(); }

  // Steps that are not measured: `count`, and with a graph one more, which captures it.
  void warm_up(int64_t count) {
    timed_steps(count);
    while (graph_ && !graph_->captured()) timed_steps(1);
  }
  int64_t graph_nodes() const { return graph_ ? graph_->num_nodes() : 0; }

  struct Time {
    double ms;      // on the clock
    double cpu_ms;  // of all threads: what a busy machine leaves comparable, with one thread
  };
  // Of each of `count` steps. On a GPU the host reads the last loss alone.
  std::vector<Time> timed_steps(int64_t count) {
    const int64_t at_once = device_.is_cuda() ? count : 1;
    std::vector<Time> times;
    for (int64_t done = 0; done < count; done += at_once) {
      const auto start = std::chrono::steady_clock::now();
      const double cpu_start = cpu_ms();
      for (int64_t i = 0; i < at_once; ++i) step();
      loss();
      const double ms =
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
              .count();
      const auto steps = static_cast<double>(at_once);
      times.insert(times.end(), static_cast<size_t>(at_once),
                   {ms / steps, (cpu_ms() - cpu_start) / steps});
    }
    return times;
  }
  double loss() const { return last_.defined() ? last_.item() : 0; }  // waits for the device

 private:
  Tensor compute() {
    const Tensor loss = subject_->loss();
    const TensorList parameters = subject_->model().parameters();
    if (applied_.policy().needs_loss_scaling()) {
      scaler_.scale(loss).backward();
      scaler_.unscale(optimizer_);
      scaler_.note_norm(optimizer_,
                        optim::clip_grad_norm(parameters, 1.0, {.fold_into = &optimizer_}));
      scaler_.step(optimizer_);
      scaler_.update();
    } else {
      loss.backward();
      optim::clip_grad_norm(parameters, 1.0, {.fold_into = &optimizer_});
      optimizer_.step();
    }
    if (applied_.fp8()) applied_.fp8()->update();
    optimizer_.zero_grad();
    return loss.detach();
  }

  const Device device_;
  std::unique_ptr<Subject> subject_;
  precision::AppliedPolicy applied_;
  optim::AdamW optimizer_;
  precision::GradScaler scaler_;
  std::optional<optim::GraphedStep> graph_;  // of compute(), with --graph
  Tensor last_;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Products and attention of a GPU that its libraries did not get.
int64_t own_kernels() {
  const auto& products = Context::current().slot<gpu::GemmCounts>();
  return products.not_served + products.other_strides + products.unmerged_batches +
         Context::current().slot<gpu::GraphCounts>().own;
}

void run(Options options) {
  if (!options.batches.empty()) {
    const Shape shape = SafeTensorsFile(options.batches).load("tokens").shape();
    options.steps = shape[0], options.batch_size = shape[1], options.context = shape[2] - 1;
    options.warmup = 0;
  }
  const int64_t start_up = bench::resident_bytes();
  set_num_threads(static_cast<int>(options.threads));
  manual_seed(1);
  const Device device = parse_device(options.device);
  if (device.is_cuda()) gpu::require_device(device.index, "bench_step");
  TS_CHECK(!options.graph || device.is_cuda(), "bench_step",
           "--graph repeats the steps of a GPU; give --device cuda, or leave it out");
  Bench bench(options, device);
  bench.warm_up(options.warmup);

  std::vector<double> times, cpu_times, losses;
  const auto timed_steps = [&](int64_t count) {
    for (const auto& [ms, cpu_ms] : bench.timed_steps(count)) {
      times.push_back(ms);
      cpu_times.push_back(cpu_ms);
    }
  };
  if (options.serve) {
    std::cout << "{\"ready\": true, \"instruction_set\": \"" << kernels::name_of(kernels::cpu_isa())
              << "\"}" << std::endl;
    for (int64_t count; std::cin >> count;) {
      std::cout << "{\"ms\": [";
      const size_t before = times.size();
      timed_steps(count);
      for (size_t i = before; i < times.size(); ++i) {
        std::cout << (i > before ? ", " : "") << times[i];
      }
      std::cout << "]}" << std::endl;
    }
  } else if (!options.batches.empty()) {
    for (int64_t i = 0; i < options.steps; ++i) {
      timed_steps(1);
      losses.push_back(bench.loss());
    }
  } else {
    timed_steps(options.steps);
  }
  const double ms = median(times);
  const int64_t resident = bench::resident_bytes() - start_up,
                peak = bench::peak_resident_bytes() - start_up;
  if (options.profile) {
    Profiler profiler;
    {
      const ProfilerScope scope(profiler);
      for (int i = 0; i < 5; ++i) bench.step();
    }
    std::cerr << "five steps:\n" << profiler.table(40) << memory_stats()->summary();
  }
  if (!options.launch_times.empty()) {
    std::ofstream out(options.launch_times);
    const char* between = "[\n";
    for (const gpu::LaunchTime& time : gpu::time_launches([&] { bench.step(); })) {
      out << between << "  {\"name\": " << std::quoted(time.name)
          << ", \"op\": " << std::quoted(time.op) << ", \"layer\": " << std::quoted(time.layer)
          << ", \"request\": " << std::quoted(time.request) << ", \"ms\": " << time.seconds * 1e3
          << "}";
      between = ",\n";
    }
    out << (*between == '[' ? "[]\n" : "\n]\n");
    out.close();
    TS_CHECK(out.good(), "bench_step", "cannot write ", options.launch_times);
  }
  std::printf(
      "{\"program\": \"tessera\", \"vocab\": %lld, \"dtype\": \"%s\", \"threads\": %lld, "
      "\"ms_per_step\": %.3f, \"cpu_ms_per_step\": %.3f, \"tokens_per_s\": %.1f, "
      "\"resident_bytes\": %lld, "
      "\"peak_resident_bytes\": %lld, \"peak_tensor_bytes\": %lld, \"device\": \"%s\", "
      "\"graph_nodes\": %lld, \"own_kernels\": %lld, \"loss\": %.6f, \"losses\": [",
      static_cast<long long>(options.vocab), options.dtype.c_str(),
      static_cast<long long>(options.threads), ms, median(cpu_times),
      ms > 0 ? static_cast<double>(options.batch_size * options.context) / ms * 1e3 : 0.0,
      static_cast<long long>(resident), static_cast<long long>(peak),
      static_cast<long long>(memory_stats()->peak()), options.device.c_str(),
      static_cast<long long>(bench.graph_nodes()), static_cast<long long>(own_kernels()),
      bench.loss());
  for (size_t i = 0; i < losses.size(); ++i) std::printf(i > 0 ? ", %.9g" : "%.9g", losses[i]);
  std::printf("]}\n");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const tessera::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
