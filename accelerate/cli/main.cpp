// The `tessera` command.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/protocol.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/fsdp_words.h>
#include <tessera/core/error.h>

namespace tessera {
namespace {

// --gradient_accumulation_steps is --gradient-accumulation-steps.
std::string with_hyphens(std::string word) {
  if (word.rfind("--", 0) == 0) {
    const auto end =
        word.begin() + static_cast<std::ptrdiff_t>(std::min(word.find('='), word.size()));
    std::replace(word.begin(), end, '_', '-');
  }
  return word;
}

bool is_truth_value(const std::string& word) {
  try {
    accelerate::parse_bool("", word);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

// `--cpu false` to `--cpu=false` at a place of the words.
void join_truth_value(std::vector<std::string>& words, size_t at) {
  const size_t name = words[at].find_first_not_of('-');
  if (name != 2 || at + 1 >= words.size()) return;
  const accelerate::Setting* setting = accelerate::find_setting(words[at].substr(name));
  if (setting == nullptr || setting->type() != "bool") return;
  // Accelerate takes a strategy there, too.
  const bool is_strategy = setting->key == "fsdp_reshard_after_forward" &&
                           accelerate::find_fsdp_strategy(words[at + 1]) != nullptr;
  if (!is_strategy && !is_truth_value(words[at + 1])) return;
  words[at] += "=" + words[at + 1];
  words.erase(words.begin() + static_cast<std::ptrdiff_t>(at) + 1);
}

void join_truth_values(std::vector<std::string>& words) {
  for (size_t at = 0; at < words.size(); ++at) join_truth_value(words, at);
}

// Where, in `tessera launch [OPTIONS] PROGRAM ARGUMENTS...`, the program begins: its options are
// its own, also those that have a name of ours. words.size() where there is none. Joins
// `--cpu false` to `--cpu=false`: the program is not the one named false.
size_t find_program_word(const CLI::App& subcommand, std::vector<std::string>& words) {
  for (size_t at = 1; at < words.size(); ++at) {
    if (words[at] == "--" || words[at].empty() || words[at][0] != '-') return at;
    words[at] = with_hyphens(words[at]);
    if (words[at].find('=') != std::string::npos) continue;
    const CLI::Option* option = subcommand.get_option_no_throw(words[at]);
    if (option == nullptr) continue;
    if (option->get_items_expected_max() > 0) {
      ++at;
      continue;
    }
    join_truth_value(words, at);
  }
  return words.size();
}

// The flag of the command that is the fewest letters away; empty where all are far.
std::string nearest_flag(const CLI::App& command, const std::string& word) {
  std::string nearest;
  size_t least = word.size() / 3 + 1;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = accelerate::edit_distance(word, "--" + name);
      if (distance >= least) continue;
      least = distance;
      nearest = "--" + name;
    }
  }
  return nearest;
}

// Says which word nobody knows.
int complain_of_unknown(const CLI::App& app) {
  const CLI::App* command = &app;
  std::string name = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands()[0];
    name += " " + command->get_name();
  }
  std::string word = app.remaining(true).at(0);
  word.resize(std::min(word.find('='), word.size()));
  const std::string near = word.starts_with("-") ? nearest_flag(*command, word) : "";
  std::fprintf(stderr, "%s: %s is unknown%s; `%s --help` shows what there is\n", name.c_str(),
               word.c_str(), near.empty() ? "" : ("; did you mean " + near + "?").c_str(),
               name.c_str());
  return 2;
}

// What could not be printed was not done: a full device, a closed descriptor.
int printed(int exit_code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return exit_code;
  std::fprintf(stderr, "tessera: cannot write to the standard output (%s)\n", std::strerror(errno));
  return exit_code == 0 ? 1 : exit_code;
}

int run(int argc, char** argv) {
  CLI::App app("tessera: starts and watches training jobs", "tessera");
  app.set_version_flag("--version", launch::tessera_version());
  app.require_subcommand(1);
  std::vector<std::string> program;
  int exit_code = 0;
  cli::add_launch(app, program, exit_code);
  cli::add_config(app, exit_code);
  cli::add_convert(app, exit_code);
  cli::add_env(app, exit_code);
  cli::add_estimate_memory(app, exit_code);
  cli::add_evaluate(app, exit_code);
  cli::add_merge_weights(app, exit_code);
  cli::add_plan(app, exit_code);
  cli::add_price(app, program);
  cli::add_test(app, exit_code);
  cli::add_tokenize(app, exit_code);
  cli::add_agent(app, program, exit_code);

  std::vector<std::string> words(argv + 1, argv + argc);
  for (const CLI::App* subcommand : std::as_const(app).get_subcommands({})) {
    if (words.empty() || subcommand->get_name() != words[0]) continue;
    if (words[0] != "launch" && words[0] != "agent") {
      for (std::string& word : words) word = with_hyphens(word);
      if (words[0] == "config") join_truth_values(words);
      if (words[0] == "price") program.assign(words.begin() + 1, words.end());
      continue;
    }
    const size_t at = std::min(find_program_word(*subcommand, words), words.size());
    program.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    words.resize(at);
    if (!program.empty() && program[0] == "--") program.erase(program.begin());
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 wants them
  } catch (const CLI::ExtrasError&) {
    return complain_of_unknown(app);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return exit_code;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) { return tessera::printed(tessera::run(argc, argv)); }
