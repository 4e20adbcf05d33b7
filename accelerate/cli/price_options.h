// The command line of `tessera price`; the command checks it and the program tessera-price runs it.
#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace tessera::cli {

struct PriceOptions {
  std::string model = {};  // gpt2 or bert
  std::string size = {};   // empty: 124m or base
  int64_t batch_size = 0;
  int64_t context = 0;     // tokens of a sequence; 0: the longest
  int64_t vocabulary = 0;  // 0: 50304 or 30528
  std::string dtype = "bf16";
  std::string fp8_recipe = "delayed", fp8_filter = "all";
  std::string machine = {};  // a file, or the name of one that is installed
  bool graph = false, accelerator = false;
  std::string json = {}, trace = {};  // files; empty: none
  bool all = false;                   // rows
};

void add_price_options(CLI::App& app, PriceOptions& options);

}  // namespace tessera::cli
