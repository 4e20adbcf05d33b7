#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/launcher.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_config.h>
#include <tessera/accelerate/settings/fsdp_words.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/core/plain_text.h>

namespace tessera::cli {
namespace {

void check_value(const accelerate::Setting& setting, const std::string& text) {
  // Accelerate's words, which settings are made of later.
  const bool automatic =
      setting.key == "gradient_clipping" || setting.key == "gradient_accumulation_steps";
  const bool strategy = setting.key == "fsdp_reshard_after_forward";
  if (automatic && text == "auto") return;
  if (strategy && accelerate::find_fsdp_strategy(text) != nullptr) return;
  accelerate::Settings scratch;
  try {
    accelerate::assign(setting, scratch, text, {accelerate::Source::kLaunchFlag, setting.flag()});
  } catch (const ConfigError& error) {
    throw UsageError(error.what());
  }
}

}  // namespace

void add_settings(CLI::App& app, std::map<std::string, std::string>& values) {
  for (const accelerate::Setting& setting : accelerate::schema()) {
    std::string names;
    for (const std::string& flag : setting.flags()) names += (names.empty() ? "" : ",") + flag;
    std::string help(setting.help);
    const std::string value = accelerate::text(setting, accelerate::Settings());
    if (!value.empty()) help += " (default: " + value + ")";
    if (setting.planned) help += " (planned)";
    const auto keep = [&values, &setting](const CLI::results_t& words) {
      const std::string text = words.empty() ? "true" : words.front();
      check_value(setting, text);
      values[std::string(setting.key)] = text;
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
  bool use_fsdp = false;
  bool use_deepspeed = false;
  std::string fp8_backend;
  accelerate::FsdpWords fsdp;  // of Accelerate's flags that are no settings by themselves
  std::vector<std::string> exported;
  bool no_prefix = false;
  bool dry_run = false;
};

// Flags of `accelerate launch` and torchrun that hands know, and that are no settings here; a comma
// between those of one kind.
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
    {"--dynamo-mode", true, "*", ""},
    {"--dynamo-use-fullgraph,--dynamo-use-dynamic,--dynamo-use-regional-compilation", false, "*",
     ""},
    {"-m,--module", false, "", "a Python module cannot be started; give the path of a program"},
    {"--no-python", false, "*", ""},
    {"-q,--quiet", false, "*", ""},
    {"--log-dir,--tee,-t", true, "",
     "ranks write to the launcher's output, each line with its rank: redirect that; --logging-dir "
     "is where trackers write"},
    {"--rdzv-backend,--rdzv-conf,--rdzv-endpoint,--rdzv-id,--monitor-interval,--role", true, "*",
     ""},
    {"--same-network,--enable-cpu-affinity", false, "*", ""},
    {"--main-training-function", true, "main", "a program has its main()"},
    {"--tpu,--use-xpu,--mps,--use-mps-device", false, "",
     "ranks compute on CPUs (--cpu) and NVIDIA GPUs"},
    {"--use-megatron-lm", false, "", "Megatron's parallelism is not available"},
    {"--offload-optimizer-nvme-path", true, "*", ""},
    {"--offload-param-nvme-path", true, "*", ""},
    {"--zero3-init-flag", true, "*", ""},
    {"--zero3-save-16bit-model", true, "*", ""},
    {"--deepspeed-hostfile", true, "", "say --hostfile FILE, with a line for each machine"},
    {"--deepspeed-inclusion-filter", true, "", "list the machines in --hostfile FILE"},
    {"--deepspeed-exclusion-filter", true, "", "list the machines in --hostfile FILE"},
    {"--deepspeed-multinode-launcher", true, "*", ""},
    {"--deepspeed-moe-layer-cls-names", true, "",
     "mixtures of experts are not sharded by class; leave it out"},
    {"--use-parallelism-config,--downcast-bf16", false, "*", ""},
    {"--parallelism-config-cp-backend", true, "torch", "there is one implementation"},
    {"--parallelism-config-sp-backend", true, "deepspeed", "there is one implementation"},
    {"--parallelism-config-cp-comm-strategy,--parallelism-config-sp-seq-length,"
     "--parallelism-config-sp-seq-length-is-variable,--parallelism-config-sp-attn-implementation",
     true, "*", ""},
    {"--fp8-interval", true, "1", "scales follow each step; say 1, or leave it out"},
    {"--fp8-opt-level,--fp8-enable-fsdp-float8-all-gather,--fp8-pad-inner-dim", true, "*", ""},
    {"--fp8-use-mxfp8-block-scaling", true, "false",
     "blocks of 32 are of a later GPU than Hopper; --fp8-recipe blockwise has larger ones"},
    {"--fsdp-backward-prefetch", true, "*", ""},
    {"--fsdp-forward-prefetch", true, "*", ""},
    {"--fsdp-use-orig-params", true, "*", ""},
    {"--fsdp-sync-module-states", true, "*", ""},
};

// "--fsdp-sharding-strategy"
std::string fsdp_flag(std::string_view word) {
  std::string name = "--fsdp-" + std::string(word);
  std::replace(name.begin(), name.end(), '_', '-');
  if (word == "transformer_cls_to_wrap") name = "--fsdp-transformer-layer-cls-to-wrap";
  return name;
}

// What Accelerate's flags mean together becomes settings. Those of its family that are settings by
// themselves stand among these, as the user has said them.
void resolve_fsdp_flags(LaunchFlags& flags) {
  if (!flags.use_fsdp) {
    if (flags.fsdp.empty()) return;
    throw CLI::ValidationError(fsdp_flag(flags.fsdp.begin()->first),
                               "is read beside --use-fsdp; add that, or leave this out");
  }
  const auto mode = flags.values.find("sharding");
  if (mode != flags.values.end() && mode->second != "fsdp" && mode->second != "zero3") {
    throw CLI::ValidationError("--sharding",
                               mode->second + " contradicts --use-fsdp; leave one of them out");
  }
  const std::pair<const char*, const char*> shared[] = {
      {"reshard_after_forward", "fsdp_reshard_after_forward"},
      {"transformer_cls_to_wrap", "fsdp_wrap_modules"},
      {"min_num_params", "fsdp_min_num_params"}};
  for (const auto& [word, key] : shared) {
    const auto given = flags.values.extract(key);
    if (given) flags.fsdp[word] = given.mapped();
  }
  if (const auto given = flags.values.find("fsdp_activation_checkpointing");
      given != flags.values.end()) {
    flags.fsdp["activation_checkpointing"] = given->second;
  }
  try {
    accelerate::read_fsdp_words(flags.fsdp, fsdp_flag,
                                [&](std::string_view setting, std::string_view text,
                                    std::string_view) { flags.values.emplace(setting, text); });
  } catch (const ConfigError& error) {
    throw UsageError(error.what());
  }
  flags.values.emplace("sharding", "fsdp");
}

// Whose recipe the flags mean; those of TransformerEngine are nothing to torchao.
void resolve_fp8_flags(LaunchFlags& flags) {
  const std::string backend = accelerate::lower(flags.fp8_backend);
  if (backend == "te") {
    flags.values.emplace("fp8_recipe", "delayed");
    flags.values.emplace("fp8_in_evaluation", "false");
  } else if (backend == "ao") {
    flags.values.emplace("fp8_recipe", "tensorwise");
    for (const char* key : {"fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo",
                            "fp8_format", "fp8_in_evaluation", "fp8_weight_gradient"}) {
      flags.values.erase(key);
    }
  } else if (!backend.empty()) {
    throw CLI::ValidationError("--fp8-backend",
                               backend == "msamp"
                                   ? "MS-AMP keeps gradients and optimizer states in fp8, and is "
                                     "developed no more; say te or ao"
                                   : "has to be te or ao; got " + flags.fp8_backend);
  }
}

// The switch goes to the ranks as Accelerate's launcher hands it on. "auto" is its word for what
// somebody else says.
void resolve_deepspeed_flags(LaunchFlags& flags) {
  for (const char* key : {"gradient_clipping", "gradient_accumulation_steps"}) {
    const auto given = flags.values.find(key);
    if (given != flags.values.end() && given->second == "auto") flags.values.erase(given);
  }
  if (!flags.use_deepspeed) return;
  if (flags.use_fsdp) {
    throw CLI::ValidationError("--use-deepspeed", "contradicts --use-fsdp; leave one of them out");
  }
  ::setenv(std::string(accelerate::kDeepSpeedSwitch).c_str(), "true", 1);
}

constexpr const char* kFromAccelerate = "from accelerate launch";

// Most are hidden in --help: who does not know them needs none of them.
void add_habits(CLI::App& app, LaunchFlags& flags) {
  for (const Habit& habit : kHabits) {
    PlainText<std::istringstream> names(habit.names);
    for (std::string name; std::getline(names, name, ',');) {
      const auto take = [&habit, name](const CLI::results_t& words) {
        const std::string value = habit.has_value && !words.empty() ? words.back() : "";
        if (habit.harmless == "*" || (habit.has_value && value == habit.harmless)) return true;
        throw CLI::ValidationError(name, std::string(habit.instead));
      };
      app.add_option(name, take)->expected(habit.has_value ? 1 : 0)->group("");
    }
  }
  app.add_option("--fp8-backend", flags.fp8_backend, "whose recipe of fp8: te or ao")
      ->group(kFromAccelerate);
  app.add_flag_callback("--fp8-use-autocast-during-eval",
                        [&flags] { flags.values["fp8_in_evaluation"] = "true"; })
      ->group("");
  const auto override_precision = [&flags](const CLI::results_t& words) {
    const std::string which = accelerate::lower(words.front());
    if (which == "false,false,true") flags.values["fp8_weight_gradient"] = "false";
    if (which != "false,false,true" && which != "false,false,false") {
      throw CLI::ValidationError(
          "--fp8-override-linear-precision",
          "of the three products only that of the weight's gradient can be left out: say "
          "false,false,true");
    }
    return true;
  };
  app.add_option("--fp8-override-linear-precision", override_precision)->expected(1)->group("");
  app.add_flag("--multi-gpu", flags.several_gpus)->group("");
  app.add_option("--gpu-ids", flags.gpus)->group("");
  app.add_flag("--use-fsdp", flags.use_fsdp,
               "sharding is fsdp, by Accelerate's flags: --fsdp-version, --fsdp-sharding-strategy, "
               "--fsdp-auto-wrap-policy")
      ->group(kFromAccelerate);
  for (const std::string word :
       {"version", "sharding_strategy", "auto_wrap_policy", "activation_checkpointing_offload"}) {
    app.add_option(fsdp_flag(word),
                   [&flags, word](const CLI::results_t& words) {
                     flags.fsdp[word] = words.front();
                     return true;
                   })
        ->expected(1)
        ->group("");
  }
  for (const auto& [name, setting] : {std::pair{"--offload-optimizer-device", "offload_optimizer"},
                                      std::pair{"--offload-param-device", "offload_parameters"}}) {
    const auto take = [&flags, name, setting](const CLI::results_t& words) {
      if (words.front() == "cpu") {
        flags.values[setting] = "true";
      } else if (words.front() != "none") {
        throw CLI::ValidationError(name, "nothing is kept on drives; say cpu or none");
      }
      return true;
    };
    app.add_option(name, take)->expected(1)->group("");
  }
  app.add_flag("--use-deepspeed", flags.use_deepspeed,
               "as a DeepSpeed file says, and without one what DeepSpeed does: stage 2, clipping "
               "to 1, parameters in 16 bits")
      ->group(kFromAccelerate);
}

int launch_program(LaunchFlags flags, const std::vector<std::string>& program) {
  resolve_fsdp_flags(flags);
  resolve_fp8_flags(flags);
  if (!flags.gpus.empty() && flags.gpus != "all") {
    ::setenv("CUDA_VISIBLE_DEVICES", flags.gpus.c_str(), 1);
    flags.exported.push_back("CUDA_VISIBLE_DEVICES");
  }
  resolve_deepspeed_flags(flags);
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
  std::printf("%s\n%s", launch::printable(command.command).c_str(), options.given.c_str());
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
  launch->add_flag("--dry-run", flags->dry_run,
                   "print the command line and the settings, and stop");
  add_habits(*launch, *flags);
  launch->footer(
      "Names may have hyphens or underscores. Each setting comes from the program's code, else the "
      "flag, TESSERA_NAME, ACCELERATE_NAME, the file, the default.\nThe exit code is that of the "
      "first cause: 128 + signal, the program's own, 124 "
      "for --job-timeout.");
  launch->callback([flags, &program, &exit_code] { exit_code = launch_program(*flags, program); });
}

}  // namespace tessera::cli
