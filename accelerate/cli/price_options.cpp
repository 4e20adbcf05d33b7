#include <tessera/accelerate/cli/price_options.h>

#include <CLI/CLI.hpp>

namespace tessera::cli {

void add_price_options(CLI::App& app, PriceOptions& options) {
  const CLI::Range many(int64_t{1}, int64_t{1} << 30);
  app.add_option("MODEL", options.model, "gpt2 or bert")
      ->required()
      ->check(CLI::IsMember({"gpt2", "bert"}));
  app.add_option("--size", options.size, "124m or 355m of gpt2, base of bert")
      ->check(CLI::IsMember({"124m", "355m", "base"}));
  app.add_option("--batch-size", options.batch_size, "sequences of a step")
      ->required()
      ->check(many);
  app.add_option("--context", options.context, "tokens of a sequence; else 1024 or 512")
      ->check(many);
  app.add_option(
         "--vocab", options.vocabulary,
         "tokens there are; else 50304 or 30528, multiples of 32 that products are fast with")
      ->check(many);
  app.add_option("--dtype", options.dtype,
                 "bf16: parameters too, with f32 masters; autocast-bf16: f32 parameters, products "
                 "in bf16; fp8: as that, linear layers in fp8; f32")
      ->check(CLI::IsMember({"bf16", "autocast-bf16", "fp8", "f32"}))
      ->capture_default_str();
  app.add_option("--fp8-recipe", options.fp8_recipe, "of --dtype fp8")
      ->check(
          CLI::IsMember({"tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}))
      ->capture_default_str();
  app.add_option("--fp8-filter", options.fp8_filter, "which linear layers run in fp8")
      ->check(CLI::IsMember({"all", "default", "pays"}))
      ->capture_default_str();
  app.add_option("--machine", options.machine,
                 "JSON file of a GPU's rates, or h100 or h200, which are installed")
      ->required();
  app.add_flag("--graph", options.graph, "the step is one CUDA graph");
  app.add_flag("--accelerator", options.accelerator, "the step as the Accelerator runs it");
  app.add_option("--json", options.json, "file to write, - for the standard output");
  app.add_option("--trace", options.trace, "file to write, for Perfetto and chrome://tracing");
  app.add_flag("--all", options.all, "also rows below 0.1% of the step");
}

}  // namespace tessera::cli
