#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/launcher.h>
#include <tessera/accelerate/settings/config.h>

namespace tessera::cli {

void add_settings(CLI::App& app, std::map<std::string, std::string>& values) {
  for (const accelerate::Setting& setting : accelerate::schema()) {
    std::string names;
    for (const std::string& flag : setting.flags()) names += (names.empty() ? "" : ",") + flag;
    std::string help(setting.help);
    const std::string value = accelerate::text(setting, accelerate::Settings());
    if (!value.empty()) help += " (default: " + value + ")";
    if (setting.planned) help += " (planned)";
    const auto keep = [&values, key = std::string(setting.key)](const CLI::results_t& words) {
      values[key] = words.empty() ? "true" : words.front();
      return true;
    };
    // A truth value may stand alone (--cpu) or say it (--cpu=false, --cpu false).
    CLI::Option* option = setting.type() == "bool" ? app.add_option(names, keep, help)->expected(0)
                                                   : app.add_option(names, keep, help)->expected(1);
    std::string type(setting.type());
    if (type == "choice") {
      type.clear();
      for (const std::string_view name : setting.names)
        type += (type.empty() ? "" : "|") + std::string(name);
    }
    option->type_name(type)->group(std::string(setting.section));
  }
}

namespace {

struct LaunchFlags {
  launch::Flags values;
  std::string file;
  std::vector<std::string> exported;
  bool no_prefix = false;
  bool dry_run = false;
};

int launch_program(const LaunchFlags& flags, const std::vector<std::string>& program) {
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
  add_settings(*launch, flags->values);
  launch->add_option("--export", flags->exported, "variable that remote ranks get (repeatable)")
      ->take_all()
      ->expected(1);
  launch->add_option("--config", flags->file, "JSON file with settings");
  launch->add_flag("--no-prefix", flags->no_prefix, "print lines without their rank");
  launch->add_flag("--dry-run", flags->dry_run, "print the command line and stop");
  launch->footer(
      "Names may have hyphens or underscores. Each setting comes from the program's code, else the "
      "flag, TESSERA_NAME, ACCELERATE_NAME, the file, the default.\nThe exit code is that of the "
      "first cause: 128 + signal, the program's own, 124 "
      "for --job-timeout.");
  launch->callback([flags, &program, &exit_code] { exit_code = launch_program(*flags, program); });
}

}  // namespace tessera::cli
