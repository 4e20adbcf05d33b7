// The settings of fp8: Fp8Options.
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {
namespace {

// TransformerEngine's name.
std::string recipe_name(std::string_view, std::string_view text) {
  return lower(text) == "current" ? "tensorwise" : std::string(text);
}

}  // namespace

std::vector<Setting> fp8_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  using Fp8 = Fp8Options;
  return {
      {.key = "fp8_recipe",
       .field = field<&S::fp8_recipe, &O::fp8, &Fp8::recipe>,
       .help = "whose maxima scale the operands: of the tensor at hand (tensorwise; current is "
               "another name), of earlier steps, of rows, or of blocks",
       .names = {"tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"},
       .other_word = recipe_name},
      {.key = "fp8_filter",
       .field = field<&S::fp8_filter, &O::fp8, &Fp8::filter>,
       .help = "which Linears: those with dimensions that are multiples of 16 but the last one, "
               "every one, or of the default those that are large enough to gain",
       .names = {"default", "all", "pays"}},
      {.key = "fp8_exclude",
       .field = field<&S::fp8_exclude, &O::fp8, &Fp8::exclude>,
       .help = "Linears that stay in bf16: dotted names, or ends of them"},
      {.key = "fp8_strict",
       .field = field<&S::fp8_strict, &O::fp8, &Fp8::strict>,
       .help = "a call of such a Linear that cannot run in fp8 is an error; else it runs in "
               "bf16 and is counted with the reason"},
      {.key = "fp8_in_evaluation",
       .field = field<&S::fp8_in_evaluation, &O::fp8, &Fp8::in_evaluation>,
       .help = "modules in evaluation run in fp8, too; Accelerate's use_autocast_during_eval",
       .accelerate = {"ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"}},
      {.key = "fp8_weight_gradient",
       .field = field<&S::fp8_weight_gradient, &O::fp8, &Fp8::weight_gradient>,
       .help = "the product of a weight's gradient runs in fp8, too; false is Accelerate's "
               "override_linear_precision (false, false, true)"},
      {.key = "fp8_format",
       .field = field<&S::fp8_format, &O::fp8, &Fp8::format>,
       .help = "e4m3 forward and e5m2 backward (hybrid), or e4m3 for both",
       .names = {"hybrid", "e4m3"},
       .accelerate = {"ACCELERATE_FP8_FORMAT"}},
      {.key = "fp8_margin",
       .field = field<&S::fp8_margin, &O::fp8, &Fp8::margin>,
       .help = "bits left free above the largest value seen",
       .least = 0,
       .most = 64,
       .accelerate = {"ACCELERATE_FP8_MARGIN"}},
      {.key = "fp8_amax_history_len",
       .field = field<&S::fp8_amax_history_len, &O::fp8, &Fp8::amax_history_len>,
       .help = "steps whose largest values are kept",
       .least = 1,
       .most = 1e6,
       .aliases = {"fp8_amax_history_length"},
       .accelerate = {"ACCELERATE_FP8_AMAX_HISTORY_LEN"}},
      {.key = "fp8_amax_compute_algo",
       .field = field<&S::fp8_amax_compute_algo, &O::fp8, &Fp8::amax_compute_algo>,
       .help = "which of the kept values decides the scale",
       .names = {"max", "most_recent"},
       .aliases = {"fp8_amax_compute_algorithm"},
       .accelerate = {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO"}},
  };
}

}  // namespace tessera::accelerate
