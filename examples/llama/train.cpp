// Trains a Llama: from nothing, on from a folder of transformers, or adapters on such a model.
//
//     llama_train --data shakespeare.txt --save model               # bytes are tokens
//     llama_train --model TinyLlama --data ids.tokens --save more
//     llama_train --model model --data mine.txt --lora 8 --save adapters
//     tessera launch -n 4 --sharding fsdp llama_train --data shakespeare.txt --save model
//
// A token file is data/token_file.h's, adapters are files of PEFT. The last tenth of the data is
// for validation. Ranks, devices, precision, sharding and accumulation are the launch's; a step is
// a micro-batch.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/token_dataset.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/llama.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

namespace tessera::examples {
namespace {

using namespace nn::models;

struct Request {
  std::string data, folder, save;
  LlamaConfig config;
  int64_t steps = 200, batch_size = 16, context = 0, lora = 0;
  double lr = 1e-3;
  uint64_t seed = 1;
  int threads = 0;
  std::optional<int64_t> tp_size;
  bool merge = false;
};

// A token file, or the bytes of a text.
data::TokenArray read_tokens(const std::string& path) {
  const MappedFile file(path);
  if (file.text().starts_with("TSTOKENS")) return data::TokenArray::open(path);
  return data::TokenArray::from_ids(data::ByteTokenizer().encode(file.text()), 256);
}

double validation_loss(Llama& model, const data::TokenArray& tokens, int64_t context,
                       const Device& device) {
  const NoGradGuard no_grad;
  model.eval();
  const data::ConsecutiveWindows windows(tokens, context);
  double sum = 0;
  const int64_t count = std::min<int64_t>(windows.size(), 32);
  for (int64_t i = 0; i < count; ++i) {
    const data::TokenExample window = windows.get(i);
    sum += model(window.inputs.unsqueeze(0).to(device), window.targets.unsqueeze(0).to(device))
               .loss.item();
  }
  model.train();
  return sum / static_cast<double>(count);
}

std::unique_ptr<Llama> make_model(const Request& request, const data::TokenArray& tokens) {
  auto model = request.folder.empty() ? std::make_unique<Llama>(request.config)
                                      : Llama::from_pretrained(request.folder);
  TS_CHECK_AS(ConfigError, tokens.vocab_size() <= model->config.vocab_size, "train", "'",
              request.data, "' has ids below ", tokens.vocab_size(), ", the model knows ",
              model->config.vocab_size, "; make the ids with the model's own tokenizer");
  if (request.lora > 0) {
    const nn::LoraSummary adapted =
        nn::add_lora(*model, {.names = {"all-linear"},
                              .rank = request.lora,
                              .alpha = 2 * static_cast<double>(request.lora)});
    std::printf("adapters on %zu layers: %lld of %lld numbers learn\n", adapted.adapted.size(),
                static_cast<long long>(adapted.trainable), static_cast<long long>(adapted.total));
  }
  return model;
}

void save(Accelerator& accelerator, Llama& model, const Request& request) {
  if (request.lora > 0 && !request.merge) return accelerator.save_lora(model, request.save);
  if (request.lora > 0) {
    accelerator.save_merged_lora(model, request.save);
  } else {
    accelerator.save_model(model, request.save);
  }
  accelerator.on_main_process([&] {
    model.config.write(request.save + "/config.json", model.model.embed_tokens.weight.dtype());
  });
}

void train(const Request& request) {
  Accelerator accelerator({.tp_size = request.tp_size});
  manual_seed(request.seed);
  const data::TokenArray all = read_tokens(request.data);
  const auto model = make_model(request, all);
  const int64_t context = request.context > 0 ? request.context : model->config.context;
  const int64_t boundary = all.size() * 9 / 10;
  TS_CHECK_AS(ConfigError, boundary > context && all.size() - boundary >= 2, "train", "'",
              request.data, "' has ", all.size(), " tokens; windows of ", context,
              " need more. Give a longer text or a shorter --context");
  const data::TokenArray held_out = all.slice(boundary, all.size());
  const distributed::Group& readers = accelerator.data_ranks();
  const int64_t ranks = readers.size(), rows = ranks * request.batch_size;
  const data::RandomWindows windows(all.slice(0, boundary), context, request.seed, rows);

  optim::AdamW optimizer(nn::trainable_parameters(*model),
                         {.lr = request.lr, .betas = {0.9, 0.95}, .weight_decay = 0.01});
  const int64_t updates = request.steps / accelerator.gradient_accumulation_steps();
  optim::CosineSchedule schedule(optimizer, {.warmup = updates / 20, .total = updates});
  accelerator.prepare(*model, optimizer, schedule);
  const Device device = accelerator.device();
  const auto tell_validation = [&](const char* when) {
    const double loss = validation_loss(*model, held_out, context, device);
    if (accelerator.is_main_process()) std::printf("%s: validation loss %.4f\n", when, loss);
  };
  tell_validation("before");
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= request.steps; ++step) {
    const data::TokenExample batch =
        windows.batch(step - 1, request.batch_size, readers.rank() * request.batch_size);
    const auto micro = accelerator.accumulate(*model);
    const Tensor loss = (*model)(batch.inputs.to(device), batch.targets.to(device)).loss;
    accelerator.backward(loss);
    accelerator.clip_grad_norm(model->parameters(), 1.0);
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    if (step % 20 != 0 && step != request.steps) continue;
    const double mean = accelerator.reduce(loss.detach()).item();
    if (!accelerator.is_main_process()) continue;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    std::printf("step %lld  loss %.4f  %.0f tokens/s\n", static_cast<long long>(step), mean,
                static_cast<double>(step * rows * context) / passed.count());
    std::fflush(stdout);
  }
  tell_validation("after");
  if (!request.save.empty()) save(accelerator, *model, request);
}

Request parse(int argc, char** argv) {
  Request request;
  CLI::App app("Trains a Llama, or adapters on one.");
  app.add_option("--data", request.data, "a token file, or a text, whose bytes are tokens")
      ->required();
  app.add_option("--model", request.folder, "folder of transformers to go on from");
  app.add_option("--save", request.save, "folder for the model, or for the adapters");
  app.add_option("--lora", request.lora, "rank of adapters on all linear layers; 0: train all");
  app.add_flag("--merge", request.merge, "save the model with the adapters in it");
  app.add_option("--layers", request.config.layers, "of a new model, as those below");
  app.add_option("--width", request.config.width, "features of a token");
  app.add_option("--inner", request.config.inner, "features within the perceptron");
  app.add_option("--heads", request.config.heads, "of queries");
  app.add_option("--kv-heads", request.config.kv_heads, "of keys and values");
  app.add_option("--context", request.context, "tokens of a window; default: the model's");
  app.add_option("--steps", request.steps, "batches")->check(CLI::PositiveNumber);
  app.add_option("--batch-size", request.batch_size, "windows")->check(CLI::PositiveNumber);
  app.add_option("--lr", request.lr, "highest rate")->capture_default_str();
  app.add_option("--seed", request.seed, "of values and windows");
  app.add_option("--tp-size,--tp_size", request.tp_size,
                 "ranks that share each layer; default: as the launch says");
  app.add_option("--threads", request.threads, "0: one a core");
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
    tessera::examples::train(request);
  });
}
