// Tokens a second of generation with a cache: a folder of transformers (GPT-2 or Llama-like), prompts of random
// tokens, always the most likely next one. bench/compare/generate.py runs this and transformers in turn.
//
//     bench_generate FOLDER --batch-size 8 --dtype bf16 --tokens 64
//
// "weights" is what a token reads of the parameters: all but tables of tokens and positions that are no head. "read"
// is the least time in which this program, beside generation, only reads these bytes: the floor of a token.
// Prints one JSON line. --serve: first a line that it is ready; then for each number of the standard input, which it
// generates so many times, the milliseconds of each time; at the end that JSON line. With one thread times are the processor's (a machine that
// is shared leaves them comparable).
#include <time.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include <tessera/core/isa.h>
#include <tessera/core/parallel.h>
#include <tessera/nn/models/generation.h>

namespace {

using namespace tessera;
class Stopwatch {
 public:
  explicit Stopwatch(int threads)
      : clock_(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC), start_(now()) {}
  double ms() const { return now() - start_; }

 private:
  double now() const {
    timespec time{};
    clock_gettime(clock_, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  }
  const clockid_t clock_;
  const double start_;
};

// The same prompts as generate.py has.
std::vector<std::vector<int64_t>> prompts_of(int64_t count, int64_t length, int64_t vocab_size) {
  std::vector<std::vector<int64_t>> prompts(static_cast<size_t>(count));
  uint64_t state = 1;
  for (auto& prompt : prompts) {
    for (int64_t i = 0; i < length; ++i) {
      state = (state * 1103515245 + 12345) % (uint64_t{1} << 31);
      prompt.push_back(static_cast<int64_t>(state >> 8) % vocab_size);
    }
  }
  return prompts;
}

// What each token reads.
std::vector<Tensor> weights_of(const nn::ModuleBase& model) {
  const void* head = nullptr;
  const auto parameters = model.named_parameters();
  std::set<const void*> seen;
  for (const auto& [name, tensor] : parameters) {
    if (name == "lm_head.weight") head = tensor.data();
  }
  std::vector<Tensor> weights;
  for (const auto& [name, tensor] : parameters) {
    const bool table = name.ends_with("wte.weight") || name.ends_with("embed_tokens.weight");
    const bool tied = head == nullptr || tensor.data() == head;
    if (name.ends_with("wpe.weight") || (table && !tied)) continue;
    if (seen.insert(tensor.data()).second) weights.push_back(tensor);
  }
  return weights;
}

int64_t bytes_of(const std::vector<Tensor>& tensors) {
  int64_t bytes = 0;
  for (const Tensor& each : tensors) bytes += each.numel() * size_of(each.dtype());
  return bytes;
}

// Reads every byte once.
uint64_t read_all(const std::vector<Tensor>& tensors) {
  constexpr int kWords = 32;  // at once, and asked of memory 8 KiB before
  uint64_t sums[kWords] = {};
  for (const Tensor& each : tensors) {
    const auto* const bytes = static_cast<const char*>(each.data());
    const int64_t size = each.numel() * size_of(each.dtype());
    for (int64_t i = 0; i + int64_t{sizeof(sums)} <= size; i += int64_t{sizeof(sums)}) {
      for (int64_t line = 0; line < int64_t{sizeof(sums)}; line += 64) {
        __builtin_prefetch(bytes + i + line + 8192);
      }
      uint64_t words[kWords];
      std::memcpy(words, bytes + i, sizeof(words));
      for (int w = 0; w < kWords; ++w) sums[w] += words[w];
    }
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums) sum += each;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("tokens a second of generation");
  std::string folder, dtype = "f32", cache_dtype;
  int threads = 1, warmup = 1, times = 3;
  int64_t batch_size = 1, prompt_tokens = 16;
  nn::models::GenerateOptions options{.max_tokens = 64, .temperature = 0, .stop_at_end = false};
  bool serve = false;
  app.add_option("FOLDER", folder, "config.json and model.safetensors")->required();
  app.add_option("--batch-size", batch_size, "prompts at once")->capture_default_str();
  app.add_option("--prompt-tokens", prompt_tokens, "of each prompt")->capture_default_str();
  app.add_option("--tokens", options.max_tokens, "new ones of each prompt")->capture_default_str();
  app.add_option("--dtype", dtype, "of the weights")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_option("--cache-dtype", cache_dtype, "of keys and values; default: that of the weights")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "u8"}));
  app.add_option("--threads", threads)->capture_default_str();
  app.add_option("--warmup", warmup, "generations that are not counted")->capture_default_str();
  app.add_option("--times", times, "generations, without --serve")->capture_default_str();
  app.add_flag("--serve", serve, "waits for numbers on the standard input");
  CLI11_PARSE(app, argc, argv);

  set_num_threads(threads);
  const auto model = nn::models::LanguageModel::from_pretrained(folder);
  model.module->to(*parse_dtype(dtype));
  if (!cache_dtype.empty()) options.cache_dtype = parse_dtype(cache_dtype);
  const auto prompts = prompts_of(batch_size, prompt_tokens, model.vocab_size);
  const std::vector<Tensor> weights = weights_of(*model.module);

  std::vector<std::vector<int64_t>> tokens;
  std::vector<double> ms;
  double read_ms = 1e300;
  uint64_t sum = 0;
  const auto turn = [&] {
    const Stopwatch generating(threads);
    tokens = nn::models::generate(model, prompts, options);
    ms.push_back(generating.ms());
    for (int i = 0; i < 3; ++i) {
      const Stopwatch reading(threads);
      sum += read_all(weights);
      read_ms = std::min(read_ms, reading.ms());
    }
  };
  for (int i = 0; i < warmup; ++i) turn();
  ms.clear();
  if (serve) {
    std::cout << nlohmann::json{{"ready", true},
                                {"instruction_set", kernels::name_of(kernels::cpu_isa())}}
              << std::endl;
    for (int count; std::cin >> count;) {
      const size_t before = ms.size();
      for (int i = 0; i < count; ++i) turn();
      const std::vector<double> fresh(ms.begin() + static_cast<int64_t>(before), ms.end());
      std::cout << nlohmann::json{{"ms", fresh}} << std::endl;
    }
  } else {
    for (int i = 0; i < times; ++i) turn();
  }
  const double least = ms.empty() ? 0 : *std::min_element(ms.begin(), ms.end());
  const auto new_tokens = static_cast<double>(batch_size * options.max_tokens);
  std::cout << nlohmann::json{{"ms", least},
                              {"tokens_per_s", least > 0 ? new_tokens / least * 1e3 : 0},
                              {"weight_bytes", bytes_of(weights)},
                              {"read_ms", read_ms},
                              {"checksum", sum},
                              {"tokens", tokens}}
            << std::endl;
}
