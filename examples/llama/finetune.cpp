// Fine-tunes a Llama on answers: adapters on a folder of transformers, or all of its weights.
//
//     llama_finetune --model Llama-3.2-1B-Instruct --data train.jsonl --output out --lora 16
//     tessera launch -n 4 --sharding fsdp --mixed-precision bf16 llama_finetune --model ... --lora 0
//
// data/fine_tuning.h describes the lines of the file. A tenth of them is for evaluation unless
// --eval names a file of its own. OUTPUT/adapter has PEFT's files, OUTPUT/model (--merge, or without
// adapters) a folder of transformers, OUTPUT/checkpoints what --resume goes on from, of which the
// best evaluation is taken at the end. Ranks, devices, precision, sharding and accumulation are the
// launch's.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/accelerate/tracking/progress.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/fine_tuning.h>
#include <tessera/data/text/text.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/llama.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

namespace tessera::examples {
namespace {

using data::FineTuningDataset;
using data::FineTuningExample;
using nn::models::Llama;
using Loader = data::DataLoader<FineTuningExample>;

struct Request {
  std::string model, tokenizer, data, evaluation, output, adapter, chat_template;
  std::string schedule = "cosine", too_long = "right", metric = "loss", dtype, log;
  std::vector<std::string> targets = {"all-linear"};
  int64_t lora = 8, max_length = 1024, batch_size = 4, eval_every = 0;
  double alpha = 0, dropout = 0, lr = 2e-4, weight_decay = 0, clip = 1, warmup = 0.03, epochs = 1;
  uint64_t seed = 1;
  int threads = 0;
  bool all_tokens = false, merge = false, resume = false, greater_is_better = false,
       in_order = false;
};

// How far the training is; part of its checkpoints.
struct Position {
  int64_t batches = 0;
  StateDict state_dict() const {
    StateDict state;
    state.set("batches", full({}, batches, kI64));
    return state;
  }
  void load_state_dict(const StateDict& state) {
    batches = static_cast<int64_t>(state.scalar("batches"));
  }
};

struct Datasets {
  data::DatasetPtr<FineTuningExample> train, evaluation;
};

Datasets read_data(Accelerator& accelerator, const Request& request) {
  const auto tokenizer = data::PretrainedTokenizer::from_pretrained(
      request.tokenizer.empty() ? request.model : request.tokenizer);
  data::FineTuningOptions options{.max_length = request.max_length,
                                  .answers_only = !request.all_tokens};
  options.too_long = request.too_long == "right"  ? data::TooLong::kTruncateRight
                     : request.too_long == "left" ? data::TooLong::kTruncateLeft
                     : request.too_long == "skip" ? data::TooLong::kSkip
                                                  : data::TooLong::kRefuse;
  if (!request.chat_template.empty()) {
    options.chat.chat_template = data::read_text(request.chat_template);
  }
  const auto read = [&](const std::string& path) {
    auto examples = std::make_shared<FineTuningDataset>(path, tokenizer, options);
    accelerator.print(path, ": ", examples->size(), " examples, ", examples->num_targets(),
                      " tokens to learn, the longest has ", examples->longest(), "; ",
                      examples->skipped(), " lines left out");
    return examples;
  };
  const data::DatasetPtr<FineTuningExample> whole = read(request.data);
  if (!request.evaluation.empty()) return {whole, read(request.evaluation)};
  const int64_t held = std::max<int64_t>(whole->size() / 10, 1);
  TS_CHECK_AS(ConfigError, whole->size() > held, "finetune", "'", request.data,
              "' has one example, and evaluation needs another one; give --eval a file.");
  const auto parts = data::random_split(whole, {whole->size() - held, held}, request.seed);
  return {parts[0], parts[1]};
}

std::unique_ptr<Llama> read_model(Accelerator& accelerator, const Request& request) {
  auto model = Llama::from_pretrained(request.model);
  const std::optional<DType> dtype =
      request.dtype.empty() ? std::nullopt : std::optional(*parse_dtype(request.dtype));
  if (request.lora == 0) {
    if (dtype) model->to(*dtype);
    return model;
  }
  nn::LoraSummary summary;
  if (!request.adapter.empty()) {
    summary = nn::load_lora(*model, request.adapter, {.trainable = true, .base_dtype = dtype});
  } else {
    const double alpha = request.alpha > 0 ? request.alpha : 2 * static_cast<double>(request.lora);
    summary = nn::add_lora(*model, {.names = request.targets,
                                    .rank = request.lora,
                                    .alpha = alpha,
                                    .dropout = request.dropout,
                                    .base_dtype = dtype});
  }
  accelerator.print("adapters on ", summary.adapted.size(), " layers: ", summary.trainable, " of ",
                    summary.total, " numbers learn");
  return model;
}

// The number of targets, over which the model's loss is a mean.
double targets_of(const data::TokenExample& batch) {
  return ne(batch.targets, Scalar(data::kIgnoreTarget)).to(kF64).sum().item();
}

// The mean loss of all targets, each example counted once on any number of ranks.
double evaluate(Accelerator& accelerator, Llama& model, Loader& loader) {
  const NoGradGuard no_grad;
  model.eval();
  Tensor sums = full({2}, 0.0, kF64);
  for (const data::TokenExample& batch : loader) {
    const int64_t rows = loader.batch_samples();
    if (rows == 0) continue;
    const data::TokenExample own{batch.inputs.narrow(0, 0, rows), batch.targets.narrow(0, 0, rows)};
    const double count = targets_of(own);
    const double loss = model(own.inputs, own.targets).loss.item();
    sums = sums + tensor({loss * count, count}, {2}, kF64);
  }
  model.train();
  const Tensor all =
      accelerator.reduce(sums.to(accelerator.device()), accelerate::RankReduction::kSum);
  return all.select(0, 0).item() / all.select(0, 1).item();
}

std::unique_ptr<optim::Schedule> make_schedule(optim::Optimizer& optimizer, const Request& request,
                                               int64_t updates) {
  const auto warmup =
      static_cast<int64_t>(std::ceil(request.warmup * static_cast<double>(updates)));
  if (request.schedule == "cosine") {
    return std::make_unique<optim::CosineSchedule>(
        optimizer, optim::Cosine{.warmup = warmup, .total = updates});
  }
  if (request.schedule == "linear") {
    return std::make_unique<optim::PolynomialSchedule>(
        optimizer, optim::Polynomial{.warmup = warmup, .total = updates});
  }
  return std::make_unique<optim::ConstantSchedule>(optimizer,
                                                   optim::Constant{.factor = 1, .total_iters = 0});
}

// What transformers and generate read beside the weights.
void copy_tokenizer(const std::string& from, const std::string& to) {
  for (const char* const name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "generation_config.json"}) {
    const auto source = std::filesystem::path(from) / name;
    if (!std::filesystem::exists(source)) continue;
    std::filesystem::copy_file(source, std::filesystem::path(to) / name,
                               std::filesystem::copy_options::overwrite_existing);
  }
}

void save(Accelerator& accelerator, Llama& model, const Request& request) {
  if (request.lora > 0) accelerator.save_lora(model, request.output + "/adapter");
  if (request.lora > 0 && !request.merge) return;
  const std::string folder = request.output + "/model";
  if (request.lora > 0) {
    accelerator.save_merged_lora(model, folder);
  } else {
    accelerator.save_model(model, folder);
  }
  accelerator.on_main_process([&] {
    model.config.write(folder + "/config.json", model.model.embed_tokens.weight.dtype());
    copy_tokenizer(request.tokenizer.empty() ? request.model : request.tokenizer, folder);
  });
}

void finetune(const Request& request) {
  Accelerator accelerator({.seed = request.seed,
                           .project_dir = request.output,
                           .automatic_checkpoint_naming = true,
                           .total_limit = 1,
                           .keep_best = 1,
                           .larger_is_better = request.greater_is_better});
  const Datasets datasets = read_data(accelerator, request);
  const auto model = read_model(accelerator, request);
  Loader loader(
      datasets.train,
      {.batch_size = request.batch_size, .shuffle = !request.in_order, .seed = request.seed});
  Loader evaluation(datasets.evaluation, {.batch_size = request.batch_size});
  optim::AdamW optimizer(nn::trainable_parameters(*model),
                         {.lr = request.lr, .weight_decay = request.weight_decay});
  accelerator.prepare(*model, optimizer, loader, evaluation);
  const auto batches = std::max<int64_t>(
      static_cast<int64_t>(std::ceil(request.epochs * static_cast<double>(loader.size()))), 1);
  const int64_t window = accelerator.gradient_accumulation_steps();
  const auto schedule = make_schedule(optimizer, request, (batches + window - 1) / window);
  Position position;
  accelerator.prepare(*schedule);
  accelerator.register_for_checkpointing(position);
  if (request.resume) accelerator.print("resumes ", accelerator.load_state().folder);

  std::FILE* const log = request.log.empty() || !accelerator.is_main_process()
                             ? nullptr
                             : std::fopen(request.log.c_str(), request.resume ? "a" : "w");
  TS_CHECK_AS(IoError, log != nullptr || request.log.empty() || !accelerator.is_main_process(),
              "finetune", "cannot write '", request.log, "'.");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> closed(
      log, [](std::FILE* file) { return file == nullptr ? 0 : std::fclose(file); });
  const auto evaluate_and_save = [&] {
    const double loss = evaluate(accelerator, *model, evaluation);
    const double metric = request.metric == "perplexity" ? std::exp(loss) : loss;
    accelerator.print("batch ", position.batches, ": evaluation loss ", loss, ", perplexity ",
                      std::exp(loss));
    accelerator.save_state("", {.metric = metric});
  };
  const int64_t every = request.eval_every > 0 ? request.eval_every : loader.size();
  Progress progress(batches,
                    {.description = "fine-tuning", .enabled = accelerator.is_main_process()});
  progress.advance(position.batches);
  model->train();
  bool stops = false;
  while (position.batches < batches && !stops) {
    for (const data::TokenExample& batch : loader) {
      {
        const auto micro =
            accelerator.accumulate({model.get()}, {.ends_window = position.batches + 1 == batches});
        const Tensor loss = (*model)(batch.inputs, batch.targets).loss;
        accelerator.backward(loss, {.weight = targets_of(batch)});
        if (request.clip > 0) accelerator.clip_grad_norm(model->parameters(), request.clip);
        optimizer.step(), schedule->step(), optimizer.zero_grad();
        if (log != nullptr) std::fprintf(log, "%.9g\n", loss.item());
        progress.set_note("loss " + std::to_string(loss.item()));
      }
      progress.advance();
      ++position.batches;
      if (!accelerator.sync_gradients()) continue;
      const bool last = position.batches == batches;
      stops =
          accelerate::should_checkpoint(accelerator.data_ranks()) == RunRequest::kCheckpointAndStop;
      if (last || stops || position.batches % every == 0) evaluate_and_save();
      if (last || stops) break;
    }
  }
  progress.finish();
  if (stops) return accelerator.print("stopped; --resume goes on");
  if (const auto best = accelerator.best_checkpoint()) {
    accelerator.print("the best is ", *best);
    accelerator.load_state(*best);
  }
  save(accelerator, *model, request);
}

Request parse(int argc, char** argv) {
  Request request;
  CLI::App app("Fine-tunes a Llama on answers.");
  app.add_option("--model", request.model, "folder of transformers")->required();
  app.add_option("--tokenizer", request.tokenizer,
                 "folder with tokenizer.json; default: the model's");
  app.add_option("--data", request.data, "lines of {prompt, completion} or {messages}")->required();
  app.add_option("--eval", request.evaluation,
                 "such lines for evaluation; default: a tenth of --data");
  app.add_option("--output", request.output, "folder for checkpoints and the result")->required();
  app.add_option("--lora", request.lora, "rank of adapters; 0: all weights learn")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--targets", request.targets, "layers with adapters, by the ends of their names");
  app.add_option("--alpha", request.alpha, "of adapters; default: twice the rank");
  app.add_option("--dropout", request.dropout, "before adapters");
  app.add_option("--adapter", request.adapter, "PEFT's folder of an adapter to go on from");
  app.add_option("--dtype", request.dtype, "of weights, with adapters of the frozen ones")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--chat-template", request.chat_template,
                 "file with a template; default: the tokenizer's");
  app.add_option("--max-length", request.max_length, "tokens of an example");
  app.add_option("--too-long", request.too_long, "what to do with longer ones")
      ->check(CLI::IsMember({"right", "left", "skip", "refuse"}));
  app.add_flag("--all-tokens", request.all_tokens, "learn the prompts, too");
  app.add_option("--epochs", request.epochs, "times that the data is read")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch-size", request.batch_size, "examples")->check(CLI::PositiveNumber);
  app.add_option("--lr", request.lr, "highest rate")->capture_default_str();
  app.add_option("--schedule", request.schedule, "of the rate")
      ->check(CLI::IsMember({"cosine", "linear", "constant"}));
  app.add_option("--warmup", request.warmup, "part of the updates in which the rate rises");
  app.add_option("--weight-decay", request.weight_decay, "AdamW's");
  app.add_option("--clip", request.clip, "highest norm of gradients; 0: any");
  app.add_option("--eval-every", request.eval_every, "batches; default: an epoch's");
  app.add_option("--metric", request.metric, "of the best checkpoint")
      ->check(CLI::IsMember({"loss", "perplexity"}));
  app.add_flag("--greater-is-better", request.greater_is_better, "direction of the metric");
  app.add_flag("--resume", request.resume, "goes on from the newest checkpoint of --output");
  app.add_flag("--merge", request.merge, "also saves the model with the adapters in it");
  app.add_flag("--in-order", request.in_order, "reads the examples in the file's order");
  app.add_option("--log", request.log, "file for the loss of each batch, a line each");
  app.add_option("--seed", request.seed, "of order, adapters and dropout");
  app.add_option("--threads", request.threads, "0: one a core")->check(CLI::NonNegativeNumber);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return request;
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [&](auto) {
    const auto request = tessera::examples::parse(argc, argv);
    if (request.threads > 0) tessera::set_num_threads(request.threads);
    tessera::examples::finetune(request);
  });
}
