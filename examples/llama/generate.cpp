// Lets a Llama go on: a model of train, or a folder of transformers, with an adapter of PEFT's or
// without.
//
//     llama_generate --model model --prompt "ROMEO:" --tokens 300 --temperature 0.8
//     llama_generate --model TinyLlama --ids "1 15043 29892" --temperature 0      # prints ids
#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>

#include <tessera/core/parallel.h>
#include <tessera/data/text/tokenizer.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/generation.h>

namespace tessera::examples {
namespace {

using namespace nn::models;

int run(int argc, char** argv) {
  std::string folder, adapter, prompt, ids, dtype;
  nn::models::GenerateOptions options{.max_tokens = 100};
  int threads = 0;
  CLI::App app("Lets a Llama go on with a text.");
  app.add_option("--model", folder, "folder with config.json and safetensors")->required();
  app.add_option("--adapter", adapter, "folder with adapter_config.json");
  app.add_option("--prompt", prompt, "a text whose bytes are tokens; the result is printed so");
  app.add_option("--ids", ids, "token ids instead; the result is printed as ids");
  app.add_option("--tokens", options.max_tokens, "new tokens")->check(CLI::NonNegativeNumber);
  app.add_option("--temperature", options.temperature, "0: always the most likely token");
  app.add_option("--top-k", options.top_k, "only the k most likely tokens; 0: all");
  app.add_option("--top-p", options.top_p, "only the tokens that together have this probability");
  app.add_option("--seed", options.seed, "of the random choices");
  app.add_option("--dtype", dtype, "default: as saved")->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", threads, "0: one a core")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  if (threads > 0) set_num_threads(threads);

  const auto model = Llama::from_pretrained(folder);
  if (!adapter.empty()) {
    nn::load_lora(*model, adapter);
    nn::merge_lora(*model);
  }
  if (!dtype.empty()) model->to(*parse_dtype(dtype));
  std::vector<int64_t> tokens;
  std::istringstream words(ids);
  for (int64_t id; words >> id;) tokens.push_back(id);
  TS_CHECK_AS(ConfigError, words.eof() && ids.empty() != prompt.empty(), "generate",
              "give either --prompt or --ids, numbers with spaces between");
  TS_CHECK_AS(ConfigError, prompt.empty() || model->config.vocab_size == 256, "generate",
              "bytes are tokens of models with 256 of them, and this one has ",
              model->config.vocab_size, "; give --ids, made by its tokenizer");
  for (const char byte : prompt) tokens.push_back(static_cast<unsigned char>(byte));

  data::Utf8Stream text;
  std::printf("%s", ids.empty() ? prompt.c_str() : ids.c_str());
  generate(*model, tokens, options, [&](int64_t token) {
    const char byte = static_cast<char>(token);
    const std::string more = ids.empty() ? text.push({&byte, 1}) : " " + std::to_string(token);
    std::fwrite(more.data(), 1, more.size(), stdout);
    std::fflush(stdout);
    return true;
  });
  std::printf("%s\n", text.finish().c_str());
  TS_CHECK_AS(IoError, std::fflush(stdout) == 0 && std::ferror(stdout) == 0, "generate",
              "cannot write the text to the standard output; is its disk full?");
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
