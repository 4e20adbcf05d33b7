// tessera price: what a training step costs on a GPU of stated rates. The step runs in a program of
// its own, tessera-price beside this one, which is linked to the dry device (core/cuda/dry).
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/cli/price_options.h>
#include <tessera/accelerate/launch/command.h>
#include <tessera/core/error.h>

namespace tessera::cli {
namespace {

constexpr std::string_view kPrice = "tessera price";

// The words after `price`, as they were checked.
void become_price_program(std::vector<std::string> words) {
  std::string program = launch::this_machine({}).executable;
  program = program.substr(0, program.rfind('/') + 1) + "tessera-price";
  TS_CHECK_AS(UnsupportedError, ::access(program.c_str(), X_OK) == 0, kPrice, "there is no ",
              program,
              "; builds with sanitizers or by clang, and those without TESSERA_BUILD_CLI, leave it "
              "out");
  words.insert(words.begin(), program);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(program.c_str(), arguments.data());
  TS_THROW(IoError, kPrice, "cannot start ", program, ": ", std::strerror(errno));
}

}  // namespace

void add_price(CLI::App& app, const std::vector<std::string>& words) {
  CLI::App* command =
      app.add_subcommand("price", "what a training step costs on a GPU of stated rates");
  const auto options = std::make_shared<PriceOptions>();
  add_price_options(*command, *options);
  command->callback([&words, options] { become_price_program(words); });
}

}  // namespace tessera::cli
