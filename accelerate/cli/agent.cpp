#include <memory>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/agent.h>

namespace tessera::cli {

void add_agent(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  CLI::App* agent = app.add_subcommand("agent", "watch one rank (started by tessera launch)");
  agent->group("");  // not for users
  const auto no_prefix = std::make_shared<bool>(false);
  agent->add_flag("--no-prefix", *no_prefix);
  agent->callback([no_prefix, &program, &exit_code] {
    exit_code = launch::run_agent({.command = program, .prefix_output = !*no_prefix});
  });
}

}  // namespace tessera::cli
