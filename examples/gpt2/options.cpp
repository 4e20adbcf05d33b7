#include "options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/core/error.h>

namespace tessera::examples {
namespace {

using Json = nlohmann::json;

constexpr bool kResumed = true, kOnce = false;

// All options: name, value, whether a resumed run takes it over, help, and what values may be.
template <class Visit>
void visit_options(TrainOptions& o, Visit&& visit) {
  using CLI::IsMember, CLI::NonNegativeNumber, CLI::PositiveNumber;
  visit("data", o.data, kResumed, "text file; its last tenth validates");
  visit("tokenizer", o.tokenizer, kResumed, "how text becomes tokens", IsMember({"bytes", "gpt2"}));
  visit("tokenizer-files", o.tokenizer_files, kResumed,
        "folder with the vocabulary of gpt2; default: that of --resume or --init-from");
  visit("layers", o.layers, kOnce, "transformer blocks", PositiveNumber);
  visit("width", o.width, kOnce, "size of the residual stream", PositiveNumber);
  visit("heads", o.heads, kOnce, "attention heads", PositiveNumber);
  visit("context", o.context, kResumed, "longest sequence", PositiveNumber);
  visit("batch-size", o.batch_size, kResumed, "sequences in a micro-batch", PositiveNumber);
  visit("accumulate", o.accumulate, kResumed, "micro-batches a step (of each rank)",
        PositiveNumber);
  visit("steps", o.steps, kResumed, "optimizer steps in all", NonNegativeNumber);
  visit("schedule-steps", o.schedule_steps, kResumed, "where the cosine ends; 0: at --steps");
  visit("stop-at", o.stop_at, kOnce, "stop early at this step and save, to --resume later; 0: no");
  visit("optimizer", o.optimizer, kResumed,
        "adamw, or muon for the matrices of the blocks and adamw for what else there is",
        IsMember({"adamw", "muon"}));
  visit("states", o.states, kResumed, "of the optimizers: f32, or bf16, rounded stochastically",
        IsMember({"f32", "bf16"}));
  visit("lr", o.lr, kResumed, "highest learning rate, of AdamW");
  visit("muon-lr", o.muon_lr, kResumed,
        "highest learning rate of Muon, which follows --lr's curve");
  visit("min-lr", o.min_lr, kResumed, "learning rate at the end");
  visit("warmup", o.warmup, kResumed,
        "steps of linear warm-up; by default at most --schedule-steps", NonNegativeNumber);
  visit("beta1", o.beta1, kResumed, "AdamW");
  visit("beta2", o.beta2, kResumed, "AdamW");
  visit("weight-decay", o.weight_decay, kResumed, "of matrices");
  visit("clip", o.clip, kResumed, "largest gradient norm; 0: none");
  visit("dropout", o.dropout, kOnce, "in the residual stream and attention");
  visit("dtype", o.dtype, kResumed,
        "of model and activations; fp8: f32 parameters, computing in bf16 and linear layers in fp8",
        IsMember({"f32", "bf16", "fp8"}));
  visit(
      "fp8-recipe", o.fp8_recipe, kResumed, "with --dtype fp8: whose maxima scale the operands",
      IsMember({"tensorwise", "current", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}));
  visit(
      "fp8-filter", o.fp8_filter, kResumed,
      "with --dtype fp8: which linear layers; all but the head (default), all, or those that gain",
      IsMember({"default", "all", "pays"}));
  visit("device", o.device, kOnce,
        "cpu, cuda (each rank the GPU with its number) or cuda:N; a resumed run may take another "
        "one");
  visit("graph", o.graph, kOnce,
        "with --device cuda: repeats micro-batches as CUDA graphs, to the same bits");
  visit("deterministic", o.deterministic, kOnce,
        "with --device cuda: gradients of attention have the same bits in each run, which is "
        "slower; all else has them anyway");
  visit("sharding", o.sharding, kOnce,
        "what several ranks hold parts of: nothing (ddp), optimizer states (zero1), and gradients "
        "(zero2), and parameters (zero3, fsdp); none: there is one rank. A resumed run may take "
        "another one. Default: as the launch says, which is ddp unless told otherwise",
        IsMember({"none", "ddp", "zero1", "zero2", "zero3", "fsdp"}));
  visit("pp-size", o.pp_size, kOnce,
        "ranks among which the blocks are dealt as stages of a pipeline, through which the "
        "micro-batches of --accumulate run; a resumed run may take another number",
        PositiveNumber);
  visit("pp-stages-per-rank", o.pp_stages_per_rank, kOnce,
        "with --pp-size: stages of each rank, which take turns", PositiveNumber);
  visit("pp-schedule", o.pp_schedule, kOnce, "with --pp-size: the order of micro-batches",
        IsMember({"gpipe", "1f1b"}));
  visit(
      "tp-size", o.tp_size, kOnce,
      "ranks that share each layer; with several groups of them --sharding fsdp. 0: as the launch "
      "says, which is 1 unless told otherwise",
      NonNegativeNumber);
  visit("seed", o.seed, kResumed, "initial weights and order of data");
  visit("threads", o.threads, kResumed, "0: one a core", NonNegativeNumber);
  visit("eval-every", o.eval_every, kResumed, "steps between validations; 0: only at the end");
  visit("save-every", o.save_every, kOnce, "steps between saves; 0: only at the end");
  visit("save", o.save, kOnce, "folder for the model and the state of training");
  visit("resume", o.resume, kOnce, "folder to go on from; without --save nothing is written back");
  visit("init-from", o.init_from, kOnce, "folder of a GPT-2 whose weights to begin with");
  visit("log", o.log, kOnce, "file for one JSON object a step");
  visit("log-every", o.log_every, kOnce,
        "steps between rows of the log and changes on the screen, for which a GPU is waited for",
        PositiveNumber);
}

Json read_resumed(const std::string& folder) {
  const std::string path = TrainOptions::checkpoint_in(folder) + "/options.json";
  std::ifstream file(path);
  TS_CHECK_AS(ConfigError, file, "train",
              "--resume needs a folder that train saved, and there is no '", path,
              "' (earlier versions, which saved training-STEP.json, cannot be gone on from); "
              "give --init-from to begin with the weights of a model");
  try {
    return Json::parse(file);
  } catch (const Json::exception& error) {
    TS_THROW(FormatError, path, "is not JSON (", error.what(), "); resume from another folder");
  }
}

}  // namespace

std::string TrainOptions::resumed_text() const {
  Json json;
  TrainOptions copy = *this;
  visit_options(copy, [&](const char* name, const auto& value, bool resumed, auto&&...) {
    if (resumed) json[name] = value;
  });
  return json.dump(2) + "\n";
}

TrainOptions parse_options(int argc, char** argv) {
  TrainOptions options;
  CLI::App app("Trains a GPT on a text and saves it as transformers does.");
  visit_options(options, [&](const std::string& name, auto& value, bool /*resumed*/,
                             const std::string& help, const auto&... check) {
    if constexpr (std::is_same_v<decltype(value), bool&>) {
      app.add_flag("--" + name, value, help);
    } else {
      CLI::Option* option = app.add_option("--" + name, value, help)->capture_default_str();
      (option->check(check), ...);
    }
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  const auto is_given = [&](const char* name) {
    return app.get_option(std::string("--") + name)->count() > 0;
  };
  if (!options.resume.empty()) {
    TS_CHECK_AS(ConfigError, options.init_from.empty(), "train",
                "--resume and --init-from exclude each other");
    const Json saved = read_resumed(options.resume);
    visit_options(options, [&](const char* name, auto& value, bool resumed, auto&&...) {
      if (!resumed || is_given(name)) return;
      try {
        saved.at(name).get_to(value);
      } catch (const Json::exception& error) {
        TS_THROW(FormatError, TrainOptions::checkpoint_in(options.resume) + "/options.json",
                 "the field '", name, "' does not fit (", error.what(), ")");
      }
    });
  }
  // A folder with a model brings its vocabulary along.
  if (!is_given("tokenizer-files")) {
    const std::string& folder = options.resume.empty() ? options.init_from : options.resume;
    if (std::filesystem::exists(folder + "/vocab.json")) options.tokenizer_files = folder;
  }
  if (options.schedule_steps == 0) options.schedule_steps = options.steps;
  if (!is_given("warmup")) {  // a short run warms up for all of it
    options.warmup = std::min(options.warmup, options.schedule_steps);
  }
  TS_CHECK_AS(ConfigError, !options.data.empty(), "train", "--data FILE is needed");
  return options;
}

}  // namespace tessera::examples
