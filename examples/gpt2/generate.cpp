// Lets a GPT-2 go on with a text: a model of train, or a folder of transformers.
//
//     generate --model model --prompt "ROMEO:" --tokens 300 --temperature 0.8 --top-k 40
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include <tessera/core/gpu/backend.h>
#include <tessera/core/parallel.h>
#include <tessera/nn/models/generation.h>

#include "corpus.h"

namespace tessera::examples {
namespace {

using namespace nn::models;

// What --device names: the CPU, or a GPU of this machine.
Device device_named(const std::string& name) {
  TS_CHECK_AS(ConfigError, name == "cpu" || name == "cuda" || name.starts_with("cuda:"), "generate",
              "--device is cpu, cuda or cuda:N; got '", name, "'");
  const Device device = parse_device(name);
  if (device.is_cuda()) gpu::require_device(device.index, "generate");
  return device;
}

int run(int argc, char** argv) {
  std::string folder, prompt = "\n", tokenizer_name, tokenizer_files, dtype, device_name = "cpu";
  GenerateOptions options{.max_tokens = 300};
  int threads = 0;
  bool quiet = false;
  CLI::App app("Lets a GPT-2 go on with a text.");
  app.add_option("--model", folder, "folder with config.json and model.safetensors")->required();
  app.add_option("--prompt", prompt, "the text to go on from");
  app.add_option("--tokens", options.max_tokens, "new tokens")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--temperature", options.temperature, "0: always the most likely token")
      ->capture_default_str();
  app.add_option("--top-k", options.top_k, "only the k most likely tokens; 0: all");
  app.add_option("--top-p", options.top_p, "only the tokens that together have this probability");
  app.add_option("--seed", options.seed, "of the random choices");
  app.add_option("--tokenizer", tokenizer_name, "default: what the model was trained with")
      ->check(CLI::IsMember({"bytes", "gpt2"}));
  app.add_option("--tokenizer-files", tokenizer_files,
                 "folder with the vocabulary of gpt2; default: the model's");
  app.add_option("--dtype", dtype, "default: as saved")->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--device", device_name, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--threads", threads, "0: one a core")->check(CLI::NonNegativeNumber);
  app.add_flag("--quiet", quiet, "only the text, no speed");
  CLI11_PARSE(app, argc, argv);

  if (threads > 0) set_num_threads(threads);
  const Device device = device_named(device_name);
  const auto model = Gpt::from_pretrained(folder);
  if (!dtype.empty()) model->to(*parse_dtype(dtype));
  model->to(device);
  if (tokenizer_name.empty()) tokenizer_name = model->config.tokenizer;
  if (tokenizer_name.empty()) tokenizer_name = model->config.vocab_size == 256 ? "bytes" : "gpt2";
  if (tokenizer_files.empty()) tokenizer_files = folder;
  const auto tokenizer = make_tokenizer(tokenizer_name, tokenizer_files);
  TS_CHECK_AS(ConfigError, tokenizer->vocab_size() <= model->config.vocab_size, "generate",
              "the tokenizer '", tokenizer_name, "' makes ", tokenizer->vocab_size(),
              " tokens, the model knows ", model->config.vocab_size, "; give --tokenizer");

  const auto ids = tokenizer->encode(prompt);
  const std::vector<int64_t> tokens(ids.begin(), ids.end());
  data::Utf8Stream stream;
  const auto print = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  print(prompt);
  const auto begin = std::chrono::steady_clock::now();
  const auto made = generate(*model, tokens, options, [&](int64_t token) {
    // Padded vocabularies have ids that stand for nothing.
    if (token < tokenizer->vocab_size()) {
      print(stream.push(tokenizer->token_bytes(static_cast<data::TokenId>(token))));
    }
    return true;
  });
  print(stream.finish() + "\n");
  TS_CHECK_AS(IoError, std::ferror(stdout) == 0, "generate",
              "cannot write the text to the standard output; is its disk full?");
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!quiet) {
    std::fprintf(stderr, "%zu tokens, %.1f tokens/s\n", made.size(),
                 static_cast<double>(made.size()) / seconds);
  }
  return 0;
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  try {
    return tessera::examples::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
}
