// The data path: tokenizers (MB/s of text, tokens/s), readers (MB/s), loaders (samples/s,
// tokens/s).
//     TESSERA_DATA_DIR=../shared/data bench_data
// Without TESSERA_DATA_DIR only the loaders are measured.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include <tessera/core/factory/factory.h>
#include <tessera/data/csv.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/idx.h>
#include <tessera/data/jsonl.h>
#include <tessera/data/text/bpe.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/wordpiece.h>
#include <tessera/data/token_dataset.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::data {
namespace {

std::string data_path(const std::string& name) {
  return std::string(std::getenv("TESSERA_DATA_DIR")) + "/" + name;
}

void count_tokens(benchmark::State& state, size_t bytes, size_t tokens) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(tokens) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

// A whole file as one text, with a warm cache of words.
void encode(benchmark::State& state, const Tokenizer& tokenizer, const std::string& file) {
  const std::string text = read_text(data_path(file));
  std::vector<TokenId> ids;
  for (auto _ : state) {
    ids.clear();
    tokenizer.encode(text, ids);
    benchmark::DoNotOptimize(ids.data());
  }
  count_tokens(state, text.size(), ids.size());
}

void decode(benchmark::State& state, const Tokenizer& tokenizer, const std::string& file) {
  const std::vector<TokenId> ids = tokenizer.encode(read_text(data_path(file)));
  size_t bytes = 0;
  for (auto _ : state) {
    const std::string text = tokenizer.decode(ids);
    benchmark::DoNotOptimize(text.data());
    bytes = text.size();
  }
  count_tokens(state, bytes, ids.size());
}

// Reads a file again and again; `read` returns something that stands for its contents.
template <class Read>
void read_file(benchmark::State& state, const std::string& path, Read read) {
  for (auto _ : state) benchmark::DoNotOptimize(read(path));
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(std::filesystem::file_size(path)));
}

TokenArray some_tokens() {
  std::vector<TokenId> ids(1 << 20);
  std::iota(ids.begin(), ids.end(), 0);
  return TokenArray::from_ids(ids);
}

// Batches of GPT size: batch 8, context 256.
void random_windows(benchmark::State& state) {
  const RandomWindows windows(some_tokens(), 256, 1, 8);
  int64_t step = 0;
  for (auto _ : state) benchmark::DoNotOptimize(windows.batch(step++, 8));
  state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(state.iterations()) * 8 * 256,
                                                  benchmark::Counter::kIsRate);
}

void load_windows(benchmark::State& state) {
  const RandomWindows windows(some_tokens(), 256, 1, 8);
  DataLoader loader(windows, {.batch_size = 8, .workers = static_cast<int>(state.range(0))});
  for (auto _ : state) benchmark::DoNotOptimize(loader.next());
  state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(state.iterations()) * 8 * 256,
                                                  benchmark::Counter::kIsRate);
}

// Shuffled rows of 28 x 28 bytes and their labels.
void load_images(benchmark::State& state) {
  const TensorDataset dataset(raw::zeros({60000, 28, 28}, kU8), raw::zeros({60000}, kU8));
  DataLoader loader(dataset, {.batch_size = 64,
                              .shuffle = true,
                              .drop_last = true,
                              .workers = static_cast<int>(state.range(0))});
  for (auto _ : state) {
    if (!loader.next()) loader.next();
  }
  state.counters["samples/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * 64, benchmark::Counter::kIsRate);
}

void permutation(benchmark::State& state) {
  const Permutation order(state.range(0), 1, 0);
  int64_t i = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(order[i]);
    if (++i == order.size()) i = 0;
  }
  state.SetItemsProcessed(state.iterations());
}

BENCHMARK(random_windows);
BENCHMARK(load_windows)->Arg(0)->Arg(1)->Arg(2)->ArgName("workers")->UseRealTime();
BENCHMARK(load_images)->Arg(0)->Arg(1)->Arg(2)->ArgName("workers")->UseRealTime();
BENCHMARK(permutation)->Arg(1000)->Arg(60000)->Arg(int64_t{1} << 40)->ArgName("size");

// GPT-2's vocabulary as a tokenizer.json, with a step before ByteLevel that cuts the text.
PretrainedTokenizer pretrained(const nlohmann::json& split) {
  using nlohmann::json;
  json steps = json::array();
  if (!split.is_null()) steps.push_back(split);
  steps.push_back({{"type", "ByteLevel"},
                   {"add_prefix_space", false},
                   {"trim_offsets", true},
                   {"use_regex", split.is_null()}});
  json merges = json::array();
  const std::string rules = read_text(data_path("gpt2/vocab.bpe"));
  for (const std::string_view line : split_lines(rules)) merges.push_back(line);
  const json file = {{"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", steps}}},
                     {"decoder", {{"type", "ByteLevel"}}},
                     {"model",
                      {{"type", "BPE"},
                       {"vocab", json::parse(read_text(data_path("gpt2/encoder.json")))},
                       {"merges", merges}}}};
  return PretrainedTokenizer::parse(file.dump(), "bench");
}

void register_with_data() {
  static const BpeTokenizer gpt2 = BpeTokenizer::from_folder(data_path("gpt2"));
  static const WordPieceTokenizer bert = WordPieceTokenizer::from_file(data_path("bert/vocab.txt"));
  static const ByteTokenizer bytes;
  static const PretrainedTokenizer json_gpt2 = pretrained(nullptr);
  static const PretrainedTokenizer json_llama3 = pretrained(
      {{"type", "Split"},
       {"pattern",
        {{"Regex",
          R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}},
       {"behavior", "Isolated"},
       {"invert", false}});
  const std::pair<const char*, const Tokenizer*> tokenizers[] = {{"gpt2", &gpt2},
                                                                 {"bert", &bert},
                                                                 {"bytes", &bytes},
                                                                 {"json_gpt2", &json_gpt2},
                                                                 {"json_llama3", &json_llama3}};
  for (const auto& [name, tokenizer] : tokenizers) {
    for (const char* file : {"tinyshakespeare", "war-and-peace", "wikitext2-raw-valid"}) {
      const std::string path = std::string("text/") + file + ".txt";
      benchmark::RegisterBenchmark((std::string("encode/") + name + "/" + file).c_str(),
                                   [tokenizer = tokenizer, path](benchmark::State& state) {
                                     encode(state, *tokenizer, path);
                                   });
    }
    benchmark::RegisterBenchmark((std::string("decode/") + name).c_str(),
                                 [tokenizer = tokenizer](benchmark::State& state) {
                                   decode(state, *tokenizer, "text/tinyshakespeare.txt");
                                 });
  }
  benchmark::RegisterBenchmark("load/gpt2_vocabulary", [](benchmark::State& state) {
    for (auto _ : state) benchmark::DoNotOptimize(BpeTokenizer::from_folder(data_path("gpt2")));
  })->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("read/text", [](benchmark::State& state) {
    read_file(state, data_path("text/war-and-peace.txt"),
              [](const std::string& path) { return read_text(path).size(); });
  });
  benchmark::RegisterBenchmark("read/csv", [](benchmark::State& state) {
    read_file(state, data_path("intent/banking77-train.csv"),
              [](const std::string& path) { return read_csv(path).num_rows(); });
  });
  benchmark::RegisterBenchmark("read/tsv", [](benchmark::State& state) {
    read_file(state, data_path("pairs/qnli-dev.tsv"),
              [](const std::string& path) { return read_csv(path, kTsv).num_rows(); });
  });
  benchmark::RegisterBenchmark("read/jsonl", [](benchmark::State& state) {
    read_file(state, data_path("pairs/snli-dev-part.jsonl"),
              [](const std::string& path) { return read_jsonl(path).size(); });
  });
  benchmark::RegisterBenchmark("read/idx_gz", [](benchmark::State& state) {
    read_file(state, data_path("mnist/t10k-images-idx3-ubyte.gz"),
              [](const std::string& path) { return read_idx(path).numel(); });
  });
}

}  // namespace
}  // namespace tessera::data

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (std::getenv("TESSERA_DATA_DIR") != nullptr) {
    tessera::data::register_with_data();
  } else {
    benchmark::AddCustomContext("left_out", "tokenizers and readers: TESSERA_DATA_DIR is not set");
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
