// Generation with a Llama that is larger than the memory it may take: loading, seconds a token, memory and bytes read
// from the disk.
//
//     bench_big_model --make 2GB FOLDER                    writes a folder of that size, random values
//     bench_big_model FOLDER --max-memory cpu=500MB        a map within that limit
//     bench_big_model FOLDER --disk [--cold] [--tokens N]  all weights on the disk; --cold: not in the page cache
//
// "resident" is the peak of the process (VmHWM); "kept" the peak without pages of files, which the kernel takes back
// when it needs them. "floor" is the time to read the weights once at the rate at which this program reads them
// without calculating. Accelerate's figures: bench/compare/big_model.py.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <tessera/accelerate/big_model/dispatch.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/parallel.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/models/generation.h>
#include <tessera/nn/models/llama.h>
#include <CLI/CLI.hpp>

#include "resident.h"

namespace {

using namespace tessera;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t status_bytes(const std::string& row) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == row + ":" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

// Layers of 1024 x 2816, as many as give the bytes.
void make_folder(const std::string& folder, int64_t bytes) {
  nn::models::LlamaConfig config{.vocab_size = 8192,
                                 .context = 2048,
                                 .width = 1024,
                                 .inner = 2816,
                                 .heads = 16,
                                 .kv_heads = 8};
  const int64_t layer = 4 * (2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 2816 + 2 * 1024);
  config.layers = std::max<int64_t>(1, (bytes - 4 * config.vocab_size * config.width) / layer);
  nn::models::Llama(config).save_pretrained(folder, "500MB");
}

std::vector<fs::path> weight_files(const std::string& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  return files;
}

void drop_page_cache(const std::string& folder) {
  for (const fs::path& path : weight_files(folder)) {
    const int file = ::open(path.c_str(), O_RDONLY);
    ::fdatasync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

double seconds_to_read(const std::string& folder) {
  std::vector<char> buffer(1 << 22);
  const auto start = Clock::now();
  for (const fs::path& path : weight_files(folder)) {
    const int file = ::open(path.c_str(), O_RDONLY);
    while (::read(file, buffer.data(), buffer.size()) > 0) {
    }
    ::close(file);
  }
  return seconds_since(start);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("generation with weights on the disk");
  std::string folder, make, max_memory;
  bool disk = false, cold = false;
  int threads = 1;
  int64_t count = 8;
  app.add_option("FOLDER", folder, "a Llama of transformers")->required();
  app.add_option("--make", make, "writes a folder of so many bytes and ends");
  app.add_option("--max-memory", max_memory, "cpu=500MB: limits of a device map");
  app.add_flag("--disk", disk, "all weights on the disk");
  app.add_flag("--cold", cold, "drops the files from the page cache first");
  app.add_option("--threads", threads)->capture_default_str();
  app.add_option("--tokens", count)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  set_num_threads(threads);
  if (!make.empty()) {
    make_folder(folder, parse_byte_size(make));
    return 0;
  }
  if (cold) drop_page_cache(folder);
  const double floor = seconds_to_read(folder);
  if (cold) drop_page_cache(folder);

  const auto start = Clock::now();
  accelerate::LoadAndDispatchOptions options{.no_split = {"DecoderLayer"}};
  if (disk) options.device_map = {{"", accelerate::WeightPlace::disk()}};
  if (!max_memory.empty()) options.max_memory = accelerate::parse_max_memory(max_memory);
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  nn::models::Llama model(nn::models::LlamaConfig::read(folder + "/config.json"));
  accelerate::load_checkpoint_and_dispatch(model, folder, options);
  const double load = seconds_since(start);

  int64_t kept = 0;
  std::vector<double> at;
  const std::vector<int64_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto begin = Clock::now();
  nn::models::generate(model, prompt, {.max_tokens = count, .temperature = 0}, [&](int64_t) {
    at.push_back(seconds_since(begin));
    kept = std::max(kept, status_bytes("RssAnon"));
    return true;
  });
  const double token =
      at.size() < 2 ? at.back() : (at.back() - at.front()) / static_cast<double>(at.size() - 1);
  std::printf(
      "load %.3f s, first token %.3f s, then %.3f s a token; weights read once: %.3f s\n"
      "resident %.0f MB, kept %.0f MB\n",
      load, at.front(), token, floor, static_cast<double>(bench::peak_resident_bytes()) / 1e6,
      static_cast<double>(kept) / 1e6);
}
