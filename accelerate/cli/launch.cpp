#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/launcher.h>

namespace tessera::cli {
namespace {

struct LaunchFlags {
  launch::Flags values;
  std::string file;
  std::vector<std::string> exported;
  bool no_prefix = false;
  bool dry_run = false;
};

int run(const LaunchFlags& flags, const std::vector<std::string>& program) {
  const launch::Environment environment = distributed::process_environment();
  launch::LaunchOptions options =
      launch::resolve_options(flags.values, environment, flags.file, program);
  options.exported = flags.exported;
  options.prefix_output = !flags.no_prefix;
  if (!flags.dry_run) return launch::run_launcher(options);

  const launch::Machine machine = launch::this_machine(environment);
  const launch::Manager manager = launch::choose_manager(options, machine, options.ranks);
  const launch::ManagerCommand command = launch::manager_command(
      manager, options, machine, options.ranks, options.host_file, environment, {});
  std::printf("%s\n%s", launch::printable(command.command).c_str(),
              launch::describe_settings(options).c_str());
  return 0;
}

}  // namespace

void add_launch(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  CLI::App* launch = app.add_subcommand(
      "launch",
      "tessera launch [OPTIONS] PROGRAM ARGUMENTS...\nstarts a program as the ranks of a job");
  const auto flags = std::make_shared<LaunchFlags>();
  const auto setting = [&](const char* flag, const char* name, const char* help) {
    launch->add_option_function<std::string>(
        flag, [flags, name](const std::string& text) { flags->values[name] = text; }, help);
  };
  setting("-n,--ranks", "ranks", "number of ranks (default: 1, or all slots of the host file)");
  setting("--hostfile", "hostfile", "machines, one a line: NAME slots=N");
  setting("--nodes", "nodes", "spread the ranks over this many nodes");
  setting("--threads", "threads", "compute threads of a rank (default: cores / local ranks)");
  setting("--collective-timeout", "collective_timeout",
          "seconds a collective may wait for other ranks (default: 600)");
  setting("--init-timeout", "init_timeout",
          "seconds until all ranks must have started their process group (default: 600)");
  setting("--job-timeout", "job_timeout", "seconds after which the job is killed (default: none)");
  setting("--start-timeout", "start_timeout",
          "seconds until every agent must have reported (default: 60)");
  setting("--grace", "grace",
          "seconds between the first failure and the killing of what still runs (default: 30)");
  setting("--restarts", "restarts", "how often a failed job is started again (default: 0)");
  setting("--restart-ranks", "restart_ranks",
          "ranks of each restart, N,N,..., the last for all further ones (default: as before)");
  setting("--transport", "transport", "auto, shared (memory of one node) or tcp");
  setting("--interface", "interface", "network interface for TCP");
  setting("--store-host", "store_host", "address of this machine that the other nodes reach");
  setting("--dump-dir", "dump_dir",
          "folder where ranks write what they communicated when a collective fails");
  setting("--remote-agent", "remote_agent", "program that runs a command on a node, as ssh does");
  launch->add_flag_callback(
      "--oversubscribe", [flags] { flags->values["oversubscribe"] = "true"; },
      "allow more ranks than slots");
  launch->add_option("--export", flags->exported, "variable that remote ranks get (repeatable)")
      ->take_all()
      ->expected(1);
  launch->add_option("--config", flags->file, "JSON file with settings");
  launch->add_flag("--no-prefix", flags->no_prefix, "print lines without their rank");
  launch->add_flag("--dry-run", flags->dry_run, "print the command line and stop");
  launch->footer(
      "Each setting comes from the flag, else TESSERA_NAME, ACCELERATE_NAME, the file, the "
      "default.\nThe exit code is that of the first cause: 128 + signal, the program's own, 124 "
      "for --job-timeout.");
  launch->callback([flags, &program, &exit_code] { exit_code = run(*flags, program); });
}

}  // namespace tessera::cli
