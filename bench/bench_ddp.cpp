// A training step of GPT-2 on several ranks: what it communicates, beside the formula, and how much
// of that backward hides.
//
//     bench_ddp --ranks 2                          # ranks are threads
//     tessera launch -n 2 -- bench_ddp             # ranks are processes
//     bench_ddp --ranks 1 --batch-size 16          # the same work on one rank
//
// Prints one JSON line. "hidden" is the share of the time under way, over all buckets, in which no
// wait stood still for it. Exits with 1 where counts or bytes differ from the report.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <tessera/accelerate/run.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/rendezvous/process_group.h>
#include <tessera/distributed/rendezvous/run_ranks.h>
#include <tessera/distributed/shard/replicate.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "gpt2/model.h"

namespace {

using namespace tessera;

struct Options {
  int ranks = 2;
  int64_t layers = 6, width = 384, heads = 6, context = 256, batch_size = 8, vocab = 256;
  int64_t threads = 1, warmup = 2, steps = 10, accumulate = 1;
  int64_t bucket_bytes = distributed::kBucketBytes;
  std::string hook = "all_reduce";
};

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("GPT-2 on several ranks: communication of a step and what backward hides of it.");
  const auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->check(CLI::PositiveNumber);
  };
  add("--ranks", options.ranks, "threads as ranks, where no launcher started this process");
  add("--layers", options.layers, "transformer blocks");
  add("--width", options.width, "size of the residual stream");
  add("--heads", options.heads, "attention heads");
  add("--context", options.context, "tokens of a sequence");
  add("--vocab", options.vocab, "size of the vocabulary");
  add("--batch-size", options.batch_size, "sequences of a rank");
  add("--threads", options.threads, "for compute, of each rank");
  add("--warmup", options.warmup, "steps before");
  add("--steps", options.steps, "measured steps");
  add("--accumulate", options.accumulate, "micro-batches a step");
  add("--bucket-bytes", options.bucket_bytes, "where a bucket is closed");
  app.add_option("--hook", options.hook, "how gradients travel")
      ->capture_default_str()
      ->check(CLI::IsMember({"all_reduce", "f16", "bf16", "power_sgd", "batched_power_sgd"}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return options;
}

std::shared_ptr<distributed::CommunicationHook> make_hook(const std::string& name) {
  if (name == "f16") return std::make_shared<distributed::CastHook>(kF16);
  if (name == "bf16") return std::make_shared<distributed::CastHook>(kBF16);
  if (name == "power_sgd" || name == "batched_power_sgd") {
    return std::make_shared<distributed::PowerSgdHook>(
        distributed::PowerSgdOptions{.start_step = 0, .batched = name == "batched_power_sgd"});
  }
  return std::make_shared<distributed::AllReduceHook>();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void run(const Options& options) {
  set_num_threads(static_cast<int>(options.threads));
  manual_seed(1);
  gpt2::Gpt model({.vocab_size = options.vocab,
                   .context = options.context,
                   .width = options.width,
                   .layers = options.layers,
                   .heads = options.heads});
  distributed::Replica replica = distributed::replicate(
      model, distributed::mesh(),
      {.bucket_bytes = options.bucket_bytes, .average = distributed::GradientAverage::kWindow});
  replica.set_communication_hook(make_hook(options.hook));
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
  const Tensor tokens = randint(0, options.vocab, {options.batch_size, options.context + 1});
  const Tensor inputs = tokens.narrow(1, 0, options.context).contiguous();
  const Tensor targets = tokens.narrow(1, 1, options.context).contiguous();
  distributed::Traffic gradients;
  std::vector<double> times, hidden, waited;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const distributed::CommTrace::Scope scope(distributed::world().trace());
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t micro = 0; micro < options.accumulate; ++micro) {
      replica.set_plan(distributed::StepPlan::of(micro, options.accumulate));
      model(inputs, targets).loss.backward();
    }
    optim::clip_grad_norm(model.parameters(), 1.0, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    gradients = {};
    for (const distributed::CommRecord& record : scope.records()) {
      if (record.channel != distributed::Channel::kGradient) continue;
      gradients += {1, record.bytes};
    }
    const distributed::ShardReport report = replica.report();
    TS_CHECK(gradients == report.gradients, "bench_ddp", "step ", step, " issued ",
             gradients.collectives, " collectives of ", gradients.bytes,
             " bytes; the formula says ", report.gradients.collectives, " of ",
             report.gradients.bytes);
    if (step < options.warmup) continue;
    times.push_back(time.count());
    hidden.push_back(hidden_share(scope.records(), distributed::Channel::kGradient));
    waited.push_back(replica.pass().record().waited * 1e3);
  }
  if (distributed::rank() != 0) return;
  const double ms = median(times);
  const auto tokens_in_step = static_cast<double>(options.batch_size * options.context *
                                                  options.accumulate * distributed::world_size());
  std::printf(
      "{\"ranks\": %d, \"threads\": %lld, \"hook\": \"%s\", \"parameters\": %lld, "
      "\"ms_per_step\": %.3f, \"tokens_per_s\": %.1f, \"collectives\": %lld, \"bytes\": %lld, "
      "\"hidden\": %.3f, \"waited_ms\": %.3f}\n",
      distributed::world_size(), static_cast<long long>(options.threads), options.hook.c_str(),
      static_cast<long long>(model.num_parameters()), ms, tokens_in_step / ms * 1e3,
      static_cast<long long>(gradients.collectives), static_cast<long long>(gradients.bytes),
      median(hidden), median(waited));
}

}  // namespace

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [&](auto) {
    const Options options = parse(argc, argv);
    const distributed::ProcessGroup processes;
    if (distributed::world_size() > 1) {
      run(options);
    } else {
      distributed::run_ranks(options.ranks, [&](int) { run(options); });
    }
  });
}
