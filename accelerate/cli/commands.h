// The subcommands of `tessera`: each adds itself to the command line and runs when it is chosen.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <tessera/core/error.h>

namespace CLI {
class App;
}

namespace tessera {

// A mistake on the command line: an invalid value of a flag, flags that do not go together. The
// command's exit code is 2 then, and 1 for errors of files and machines.
class UsageError : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

}  // namespace tessera

namespace tessera::cli {

// `program`: the words after the subcommand's own options. Sets `exit_code` after it has run.
void add_launch(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_config(CLI::App& app, int& exit_code);
void add_convert(CLI::App& app, int& exit_code);
void add_env(CLI::App& app, int& exit_code);
void add_estimate_memory(CLI::App& app, int& exit_code);
void add_evaluate(CLI::App& app, int& exit_code);
void add_merge_weights(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
// Replaces this process by another program, with `words` as arguments: those after the subcommand's
// name.
void add_price(CLI::App& app, const std::vector<std::string>& words);
void add_test(CLI::App& app, int& exit_code);
void add_tokenize(CLI::App& app, int& exit_code);
void add_agent(CLI::App& app, const std::vector<std::string>& program, int& exit_code);

// One option for each setting of the table (accelerate/settings/config.h); `values` gets key and
// text.
void add_settings(CLI::App& app, std::map<std::string, std::string>& values);

// The error of a number of bytes ("5GB", "300MiB"); empty if it is valid. A check of CLI11.
std::string byte_size_problem(const std::string& text);

}  // namespace tessera::cli
