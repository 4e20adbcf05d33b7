// Accelerate's example of the same name, line by line: a classifier trained under any sharding,
// with checkpoints by step or by epoch, a resume, and the peak of memory of every epoch in the
// tracker.
//
//     fsdp_with_peak_mem_tracking [FOLDER] [--checkpointing-steps epoch | N] [--resume CHECKPOINT]
//     tessera launch -n 2 --use_fsdp fsdp_with_peak_mem_tracking out
//
// FOLDER (default out/peak_mem) gets epoch_0, ... or step_10, ... and the tracker's metrics.
#include <algorithm>
#include <memory>
#include <string>

#include <tessera.h>

#include "curve.h"

using namespace tessera;

namespace {

// Points inside of a circle, and outside.
auto make_points(int64_t size, uint64_t seed) {
  const NoGradGuard no_grad;
  const Tensor x = randn({size, 2}, {}, RandomStream{seed, 0});
  return std::make_shared<data::TensorDataset<2>>(x, gt(x.pow(2).sum({1}), 1.4).to(kI64));
}

struct Classifier : nn::Module<Classifier> {
  Classifier()
      : embed(add<nn::Linear>("embed", 2, 64)),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::LayerNorm>("norm", 64)),
        head(add<nn::Linear>("head", 64, 2)) {
    for (int i = 0; i < 4; ++i) blocks.append<examples::CurveBlock>(64);
  }
  struct Output {
    Tensor loss, logits;
    void visit_tensors(auto&& visit) { visit(loss), visit(logits); }
  };
  Output forward(const Tensor& x, const Tensor& labels) {
    Tensor h = embed(x);
    for (size_t i = 0; i < blocks.num_children(); ++i) h = blocks.at<examples::CurveBlock>(i)(h);
    const Tensor logits = head(norm(h));
    return {cross_entropy(logits, labels), logits};
  }
  nn::Linear& embed;
  nn::ModuleList& blocks;
  nn::LayerNorm& norm;
  nn::Linear& head;
};

struct Arguments {
  std::string output_dir = "out/peak_mem", checkpointing_steps = "epoch", resume;
};
Arguments parse(std::span<const std::string> words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--checkpointing-steps" && i + 1 < words.size()) {
      arguments.checkpointing_steps = words[++i];
    } else if (words[i] == "--resume" && i + 1 < words.size()) {
      arguments.resume = words[++i];
    } else {
      arguments.output_dir = words[i];
    }
  }
  return arguments;
}

// Tensors of this rank, in KiB.
void print_memory(Accelerator& accelerator, const std::string& phase, const MemoryReport& report) {
  const auto& [begin, end, peak] = report.tensors;
  accelerator.print("memory before the ", phase, ": ", begin / 1024,
                    " KiB, kept: ", (end - begin) / 1024, ", peak: ", (peak - begin) / 1024,
                    ", total peak: ", peak / 1024);
}

double train(const Arguments& arguments) {
  constexpr int64_t kEpochs = 3, kBatchSize = 16;
  Accelerator accelerator({.seed = 42,
                           .logging_dir = arguments.output_dir,
                           .log_with = std::vector<std::string>{"jsonl"}});
  accelerator.print("distributed type: ", accelerator.distributed_type());
  accelerator.init_trackers("fsdp_no_trainer", {{"batch_size", kBatchSize}});
  data::DataLoader loader(make_points(1024, 1), {.batch_size = kBatchSize, .shuffle = true});
  data::DataLoader validation(make_points(203, 2), {.batch_size = 32});

  Classifier model;
  NamedTensors decayed, others;
  for (const NamedTensor& parameter : model.named_parameters()) {
    const bool plain = parameter.name.ends_with("bias") || parameter.name.starts_with("norm.");
    (plain ? others : decayed).push_back(parameter);
  }
  optim::AdamW optimizer(
      {{decayed, {.lr = 3e-3, .weight_decay = 0.003}}, {others, {.lr = 3e-3, .weight_decay = 0}}});
  accelerator.prepare(model, optimizer, loader, validation);
  // Made when the loader knows its share: it counts updates.
  optim::PolynomialSchedule schedule(optimizer, {.warmup = 10, .total = kEpochs * loader.size()});
  accelerator.prepare(schedule);

  if (!arguments.resume.empty()) {
    // Epoch and place in it come back with the loader.
    accelerator.load_state(arguments.resume);
    accelerator.print("resumed from ", arguments.resume);
  }
  const int64_t every =
      arguments.checkpointing_steps == "epoch" ? 0 : std::stoll(arguments.checkpointing_steps);
  int64_t overall_step = schedule.current_step();
  double accuracy = 0;
  for (int64_t epoch = overall_step / loader.size(); epoch < kEpochs; ++epoch) {
    {
      MemoryTracker memory;
      model.train();
      double total_loss = 0;
      for (auto& [x, labels] : loader) {
        {
          const auto micro = accelerator.accumulate(model);
          const auto outputs = model(x, labels);
          total_loss += outputs.loss.item();
          accelerator.backward(outputs.loss);
          optimizer.step();
          schedule.step();
          optimizer.zero_grad();
        }
        if (++overall_step % std::max<int64_t>(every, 1) == 0 && every > 0) {
          accelerator.save_state(arguments.output_dir + "/step_" + std::to_string(overall_step));
        }
      }
      const MemoryReport& report = memory.stop();
      print_memory(accelerator, "training", report);
      accelerator.log({{"train_total_peak_memory", report.tensors.peak},
                       {"train_loss", total_loss / static_cast<double>(loader.size())}},
                      epoch);
    }
    MemoryTracker memory;
    model.eval();
    int64_t right = 0, samples = 0;
    for (auto& [x, labels] : validation) {
      const NoGradGuard no_grad;
      const auto [predictions, references] =
          accelerator.gather_for_metrics(std::pair(model(x, labels).logits.argmax(-1), labels));
      right += static_cast<int64_t>(predictions.eq(references).to(kF32).sum().item());
      samples += references.size(0);
    }
    accuracy = static_cast<double>(right) / static_cast<double>(samples);
    accelerator.print("epoch ", epoch, ": accuracy ", accuracy);
    accelerator.log({{"accuracy", accuracy}}, epoch);
    if (every == 0) {
      accelerator.save_state(arguments.output_dir + "/epoch_" + std::to_string(epoch));
    }
    const MemoryReport& report = memory.stop();
    print_memory(accelerator, "evaluation", report);
    accelerator.log({{"eval_total_peak_memory", report.tensors.peak}}, epoch);
  }
  accelerator.end_training();
  return accuracy;
}

}  // namespace

int main(int argc, char** argv) {
  double accuracy = 0;
  const int failed =
      run(argc, argv, [&](std::span<const std::string> words) { accuracy = train(parse(words)); });
  return failed || accuracy < 0.9;
}
