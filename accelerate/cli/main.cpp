// The `tessera` command.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/protocol.h>

namespace {

// Where, in `tessera launch [OPTIONS] PROGRAM ARGUMENTS...`, the program begins: its options are
// its own, also those that have a name of ours. words.size() where there is none.
size_t find_program_word(const CLI::App& subcommand, const std::vector<std::string>& words) {
  for (size_t at = 1; at < words.size(); ++at) {
    const std::string& word = words[at];
    if (word == "--" || word.empty() || word[0] != '-') return at;
    const size_t equals = word.find('=');
    const CLI::Option* option = subcommand.get_option_no_throw(word.substr(0, equals));
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    if (takes_value && equals == std::string::npos) ++at;
  }
  return words.size();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("tessera: starts and watches training jobs", "tessera");
  app.set_version_flag("--version", tessera::launch::tessera_version());
  app.require_subcommand(1);
  std::vector<std::string> program;
  int exit_code = 0;
  tessera::cli::add_launch(app, program, exit_code);
  tessera::cli::add_agent(app, program, exit_code);

  std::vector<std::string> words(argv + 1, argv + argc);
  for (const CLI::App* subcommand : std::as_const(app).get_subcommands({})) {
    if (words.empty() || subcommand->get_name() != words[0]) continue;
    const size_t at = std::min(find_program_word(*subcommand, words), words.size());
    program.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    words.resize(at);
    if (!program.empty() && program[0] == "--") program.erase(program.begin());
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 wants them
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return exit_code;
}
