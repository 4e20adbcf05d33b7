#include <cstdio>
#include <cstdlib>
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
  std::string gpus;
  bool several_gpus = false;
  std::vector<std::string> exported;
  bool no_prefix = false;
  bool dry_run = false;
};

// Flags of `accelerate launch` and torchrun that hands know, and that are no settings here.
struct Habit {
  const char* names;
  bool has_value;
  std::string_view harmless;  // the value with which there is nothing to do; "*": any
  std::string_view instead;   // what takes its place
};
constexpr Habit kHabits[] = {
    {"--machine-rank,--node-rank", true, "0",
     "one tessera launch starts the ranks of all machines: name them in --hostfile FILE, and run "
     "it on one of them"},
    {"--nnodes", true, "1", "say --nodes N with --hostfile FILE"},
    {"--nproc-per-node", true, "", "say -n N, the ranks of all nodes together"},
    {"--dynamo-backend", true, "no", "there is no graph compiler; leave it out"},
    {"-m,--module", false, "", "a Python module cannot be started; give the path of a program"},
    {"--no-python", false, "*", ""},
    {"-q,--quiet", false, "*", ""},
    {"--log-dir,--tee", true, "",
     "ranks write to the launcher's output, each line with its rank: redirect that; --logging-dir "
     "is where trackers write"},
    {"--rdzv-backend,--rdzv-conf,--rdzv-endpoint,--rdzv-id,--monitor-interval,--role", true, "*",
     ""},
    {"--same-network,--enable-cpu-affinity", false, "*", ""},
    {"--main-training-function", true, "main", "a program has its main()"},
    {"--tpu,--use-xpu,--mps,--use-mps-device", false, "",
     "ranks compute on CPUs (--cpu) and NVIDIA GPUs"},
    {"--use-megatron-lm", false, "", "Megatron's parallelism is not available"},
    {"--deepspeed-config-file", true, "",
     "DeepSpeed's files are not read; say --zero-stage and the others"},
};

// Hidden in --help: who does not know them needs none of them.
void add_habits(CLI::App& app, LaunchFlags& flags) {
  for (const Habit& habit : kHabits) {
    const auto take = [&habit](const CLI::results_t& words) {
      const std::string value = habit.has_value && !words.empty() ? words.front() : "";
      if (habit.harmless == "*" || (habit.has_value && value == habit.harmless)) return true;
      const std::string_view names(habit.names);
      throw CLI::ValidationError(std::string(names.substr(0, names.find(','))),
                                 std::string(habit.instead));
    };
    app.add_option(habit.names, take)->expected(habit.has_value ? 1 : 0)->group("");
  }
  app.add_flag("--multi-gpu", flags.several_gpus)->group("");
  app.add_option("--gpu-ids", flags.gpus)->group("");
  app.add_flag_callback("--use-fsdp", [&flags] { flags.values.emplace("zero_stage", "3"); })
      ->group("");
  app.add_flag_callback("--use-deepspeed", [&flags] { flags.values.emplace("zero_stage", "2"); })
      ->group("");
}

int launch_program(LaunchFlags flags, const std::vector<std::string>& program) {
  if (!flags.gpus.empty() && flags.gpus != "all") {
    ::setenv("CUDA_VISIBLE_DEVICES", flags.gpus.c_str(), 1);
    flags.exported.push_back("CUDA_VISIBLE_DEVICES");
  }
  const launch::Environment environment = distributed::process_environment();
  launch::LaunchOptions options =
      launch::resolve_options(flags.values, environment, flags.file, program);
  if (flags.several_gpus && options.hosts.empty() && options.provenance["ranks"] == "default") {
    throw CLI::ValidationError("--multi-gpu",
                               "say how many ranks there are: -n N; each takes a GPU of its node");
  }
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
  launch->add_option("--config,--config-file", flags->file, "JSON file with settings");
  launch->add_flag("--no-prefix", flags->no_prefix, "print lines without their rank");
  launch->add_flag("--dry-run", flags->dry_run, "print the command line and stop");
  add_habits(*launch, *flags);
  launch->footer(
      "Names may have hyphens or underscores. Each setting comes from the program's code, else the "
      "flag, TESSERA_NAME, ACCELERATE_NAME, the file, the default.\nThe exit code is that of the "
      "first cause: 128 + signal, the program's own, 124 "
      "for --job-timeout.");
  launch->callback([flags, &program, &exit_code] { exit_code = launch_program(*flags, program); });
}

}  // namespace tessera::cli
