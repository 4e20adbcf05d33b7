// Trains a Llama: from nothing, on from a folder of transformers, or adapters on such a model.
//
//     llama_train --data shakespeare.txt --save model               # bytes are tokens
//     llama_train --model TinyLlama --data ids.tokens --save more
//     llama_train --model model --data mine.txt --lora 8 --save adapters
//
// A token file is data/text/token_file.h's, adapters are files of PEFT. The last tenth of the data is
// for validation.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>

#include <tessera/autograd/autograd.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/token_dataset.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/llama.h>
#include <tessera/optim/clip.h>
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
  bool merge = false;
};

// A token file, or the bytes of a text.
data::TokenArray read_tokens(const std::string& path) {
  const MappedFile file(path);
  if (file.text().starts_with("TSTOKENS")) return data::TokenArray::open(path);
  return data::TokenArray::from_ids(data::ByteTokenizer().encode(file.text()), 256);
}

double validation_loss(Llama& model, const data::TokenArray& tokens, int64_t context) {
  const NoGradGuard no_grad;
  model.eval();
  const data::ConsecutiveWindows windows(tokens, context);
  double sum = 0;
  const int64_t count = std::min<int64_t>(windows.size(), 32);
  for (int64_t i = 0; i < count; ++i) {
    const data::TokenExample window = windows.get(i);
    sum += model(window.inputs.unsqueeze(0), window.targets.unsqueeze(0)).loss.item();
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

void train(const Request& request) {
  manual_seed(request.seed);
  const data::TokenArray all = read_tokens(request.data);
  const auto model = make_model(request, all);
  const int64_t context = request.context > 0 ? request.context : model->config.context;
  const int64_t boundary = all.size() * 9 / 10;
  TS_CHECK_AS(ConfigError, boundary > context && all.size() - boundary >= 2, "train", "'",
              request.data, "' has ", all.size(), " tokens; windows of ", context,
              " need more. Give a longer text or a shorter --context");
  const data::RandomWindows windows(all.slice(0, boundary), context, request.seed,
                                    request.batch_size);
  const data::TokenArray held_out = all.slice(boundary, all.size());

  optim::AdamW optimizer(nn::trainable_parameters(*model),
                         {.lr = request.lr, .betas = {0.9, 0.95}, .weight_decay = 0.01});
  optim::CosineSchedule schedule(optimizer, {.warmup = request.steps / 20, .total = request.steps});
  std::printf("before: validation loss %.4f\n", validation_loss(*model, held_out, context));
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t step = 1; step <= request.steps; ++step) {
    const data::TokenExample batch = windows.batch(step - 1, request.batch_size);
    const Tensor loss = (*model)(batch.inputs, batch.targets).loss;
    loss.backward();
    optim::clip_grad_norm(model->parameters(), 1.0);
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    if (step % 20 != 0 && step != request.steps) continue;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    std::printf("step %lld  loss %.4f  %.0f tokens/s\n", static_cast<long long>(step), loss.item(),
                static_cast<double>(step * request.batch_size * context) / passed.count());
    std::fflush(stdout);
  }
  std::printf("after: validation loss %.4f\n", validation_loss(*model, held_out, context));
  if (request.save.empty()) return;
  if (request.lora > 0 && !request.merge) return nn::save_lora(*model, request.save);
  if (request.lora > 0) nn::merge_lora(*model), nn::remove_lora(*model);
  model->save_pretrained(request.save);
}

int run(int argc, char** argv) {
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
  app.add_option("--threads", request.threads, "0: one a core");
  CLI11_PARSE(app, argc, argv);
  if (request.threads > 0) set_num_threads(request.threads);
  train(request);
  return 0;
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  try {
    return tessera::examples::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
