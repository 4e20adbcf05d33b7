// A whole training step of GPT-2: forward, loss, backward, clipping, AdamW. The same model, batch
// and loop as bench/compare/pytorch_gpt.py; bench/compare/run.py runs both in turn.
//
//     bench_step --vocab 50304 --dtype bf16 --steps 10 --profile
//
// --dtype: f32; bf16: parameters too, with f32 masters; autocast-bf16: f32 parameters, as
// torch.autocast has it; autocast-fp16: with loss scaling.
//
// Prints one JSON line: median ms/step, tokens/s, resident memory over start-up.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <tessera/core/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/profiler.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/clip.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/grad_scaler.h>

#include "gpt2/model.h"

namespace {

using namespace tessera;

int64_t resident_bytes() {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      int64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  }
  return 0;
}

double cpu_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

precision::Policy policy_of(const std::string& dtype) {
  if (dtype == "f32") return precision::Policy::f32();
  if (dtype == "bf16") return precision::Policy::pure(kBF16);
  if (dtype == "autocast-bf16") return precision::Policy::autocast(kBF16);
  if (dtype == "autocast-fp16") return precision::Policy::autocast(kF16);
  TS_THROW(ValueError, "bench_step", "--dtype is f32, bf16, autocast-bf16 or autocast-fp16; got '",
           dtype, "'");
}

struct Options {
  int64_t layers = 6, width = 384, heads = 6, context = 256, batch_size = 8, vocab = 256;
  int64_t threads = 2, warmup = 3, steps = 10;
  std::string dtype = "f32";
  bool profile = false;
  bool serve = false;  // read counts from stdin, run that many steps, print their times
};

Options parse(int argc, char** argv) {
  Options options;
  const std::pair<const char*, int64_t*> numbers[] = {
      {"--layers", &options.layers},   {"--width", &options.width},
      {"--heads", &options.heads},     {"--context", &options.context},
      {"--vocab", &options.vocab},     {"--batch-size", &options.batch_size},
      {"--threads", &options.threads}, {"--warmup", &options.warmup},
      {"--steps", &options.steps}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--profile") {
      options.profile = true;
      continue;
    }
    if (name == "--serve") {
      options.serve = true;
      continue;
    }
    const auto* number = std::find_if(std::begin(numbers), std::end(numbers),
                                      [&](const auto& entry) { return name == entry.first; });
    const bool known = number != std::end(numbers) || name == "--dtype";
    TS_CHECK(known && i + 1 < argc, "bench_step", "does not know '", name,
             "' or lacks its value; see the head of bench_step.cpp");
    if (number != std::end(numbers)) {
      *number->second = std::atoll(argv[++i]);
    } else {
      options.dtype = argv[++i];
    }
  }
  (void)policy_of(options.dtype);
  return options;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : model_({.vocab_size = options.vocab,
                .context = options.context,
                .width = options.width,
                .layers = options.layers,
                .heads = options.heads}),
        applied_(apply(model_, policy_of(options.dtype))),
        optimizer_(model_.named_parameters(),
                   {.lr = 3e-4, .betas = {0.9, 0.99}, .weight_decay = 0.1}),
        scaler_({.enabled = applied_.policy().needs_loss_scaling()}) {
    optimizer_.begin_masters(applied_.take_originals());
    const Tensor tokens = randint(0, options.vocab, {options.batch_size, options.context + 1});
    inputs_ = tokens.narrow(1, 0, options.context).contiguous();
    targets_ = tokens.narrow(1, 1, options.context).contiguous();
  }

  double step() {
    const gpt2::GptOutput out = model_(inputs_, targets_);
    scaler_.scale(out.loss).backward();
    scaler_.unscale(optimizer_);
    scaler_.note_norm(optimizer_,
                      optim::clip_grad_norm(model_.parameters(), 1.0, {.fold_into = &optimizer_}));
    scaler_.step(optimizer_);
    scaler_.update();
    optimizer_.zero_grad();
    return out.loss.item();
  }

  struct Time {
    double ms;      // on the clock
    double cpu_ms;  // of all threads: what a busy machine leaves comparable, with one thread
  };
  Time timed_step() {
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = cpu_ms();
    loss_ = step();
    return {
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count(),
        cpu_ms() - cpu_start};
  }
  double loss() const { return loss_; }

 private:
  gpt2::Gpt model_;
  precision::AppliedPolicy applied_;
  optim::AdamW optimizer_;
  precision::GradScaler scaler_;
  Tensor inputs_, targets_;
  double loss_ = 0;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void run(const Options& options) {
  const int64_t start_up = resident_bytes();
  set_num_threads(static_cast<int>(options.threads));
  manual_seed(1);
  Bench bench(options);
  for (int64_t i = 0; i < options.warmup; ++i) bench.step();

  std::vector<double> times, cpu_times;
  const auto timed_step = [&] {
    const auto [ms, cpu_ms] = bench.timed_step();
    times.push_back(ms);
    cpu_times.push_back(cpu_ms);
  };
  if (options.serve) {
    std::cout << "{\"ready\": true}" << std::endl;
    for (int64_t count; std::cin >> count;) {
      std::cout << "{\"ms\": [";
      for (int64_t i = 0; i < count; ++i) {
        timed_step();
        std::cout << (i > 0 ? ", " : "") << times.back();
      }
      std::cout << "]}" << std::endl;
    }
  } else {
    for (int64_t i = 0; i < options.steps; ++i) timed_step();
  }
  const double ms = median(times);
  const int64_t resident = resident_bytes() - start_up, peak = peak_resident_bytes() - start_up;
  if (options.profile) {
    Profiler profiler;
    {
      const ProfilerScope scope(profiler);
      for (int i = 0; i < 5; ++i) bench.step();
    }
    std::cerr << "five steps:\n" << profiler.table(40) << memory_stats()->summary();
  }
  std::printf(
      "{\"program\": \"tessera\", \"vocab\": %lld, \"dtype\": \"%s\", \"threads\": %lld, "
      "\"ms_per_step\": %.3f, \"cpu_ms_per_step\": %.3f, \"tokens_per_s\": %.1f, "
      "\"resident_bytes\": %lld, "
      "\"peak_resident_bytes\": %lld, \"loss\": %.6f}\n",
      static_cast<long long>(options.vocab), options.dtype.c_str(),
      static_cast<long long>(options.threads), ms, median(cpu_times),
      ms > 0 ? static_cast<double>(options.batch_size * options.context) / ms * 1e3 : 0.0,
      static_cast<long long>(resident), static_cast<long long>(peak), bench.loss());
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
