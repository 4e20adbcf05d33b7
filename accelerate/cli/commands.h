// The subcommands of `tessera`: each adds itself to the command line and runs when it is chosen.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

// `program`: the words after the subcommand's own options. Sets `exit_code` when it has run.
void add_launch(CLI::App& app, const std::vector<std::string>& program, int& exit_code);
void add_agent(CLI::App& app, const std::vector<std::string>& program, int& exit_code);

}  // namespace tessera::cli
