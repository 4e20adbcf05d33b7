// The settings of the training loop.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> training_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  return {
      {.key = "mixed_precision",
       .field = field<&S::mixed_precision, &O::mixed_precision>,
       .help =
           "dtype in which prepared models compute; fp16 scales losses, fp8 is bf16 with linear "
           "layers in fp8 (fp8_recipe)",
       .names = {"no", "bf16", "fp16", "fp8"},
       .accelerate = {"ACCELERATE_MIXED_PRECISION"}},
      {.key = "precision_policy",
       .field = field<&S::precision_policy, &O::precision_policy>,
       .help = "how mixed_precision comes about: each op by its record, inputs and parameters cast "
               "where the model is entered, or parameters stored in 16 bits with f32 masters",
       .names = {"autocast", "boundary", "pure"}},
      {.key = "output_precision",
       .field = field<&S::output_precision, &O::output_precision>,
       .help = "what calls of prepared models return under mixed precision: f32, or as computed",
       .names = {"f32", "computed"}},
      {.key = "gradient_accumulation_steps",
       .field = field<&S::gradient_accumulation_steps, &O::gradient_accumulation_steps>,
       .help = "micro-batches of one optimizer step",
       .least = 1,
       .most = 1e9,
       .accelerate = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}},
      {.key = "gradient_clipping",
       .field = field<&S::gradient_clipping, &O::gradient_clipping>,
       .help = "norm to which prepared optimizers clip all of their gradients before each step, "
               "and the most that clip_grad_norm() leaves of them; 0: the program clips",
       .least = 0,
       .most = 1e30,
       .accelerate = {"ACCELERATE_GRADIENT_CLIPPING"}},
      {.key = "allow_tf32",
       .field = field<&S::allow_tf32, &O::allow_tf32>,
       .help =
           "products and convolutions of f32 on a GPU take 10 bits of their operands' mantissas, "
           "at the speed of 16 bits; sums stay f32"},
      {.key = "cuda_graphs",
       .field = field<&S::cuda_graphs, &O::cuda_graphs>,
       .help = "on a GPU graphed_step() captures its function as CUDA graphs; false: it runs as it "
               "is"},
      {.key = "loss_weighting",
       .field = field<&S::loss_weighting, &O::loss_weighting>,
       .help =
           "what a micro-batch counts for in its window: its samples or tokens, or as Accelerate "
           "one part in gradient_accumulation_steps, also in a shorter window",
       .names = {"samples", "huggingface"}},
      {.key = "sync_with_dataloader",
       .field = field<&S::sync_with_dataloader, &O::sync_with_dataloader>,
       .help = "the end of a loader ends the accumulation window"},
      {.key = "sync_each_batch",
       .field = field<&S::sync_each_batch, &O::sync_each_batch>,
       .help = "reduce gradients in every micro-batch, not in the window's last alone"},
      {.key = "step_schedule_with_optimizer",
       .field = field<&S::step_schedule_with_optimizer, &O::step_schedule_with_optimizer>,
       .help = "a prepared schedule steps only where its optimizer has",
       .aliases = {"step_scheduler_with_optimizer"}},
      {.key = "schedule_unit",
       .field = field<&S::schedule_unit, &O::schedule_unit>,
       .help = "what a schedule counts: optimizer updates, or as Accelerate one for every rank",
       .names = {"updates", "huggingface"}},
      {.key = "seed",
       .field = field<&S::seed, &O::seed>,
       .help = "of all random numbers; without it the Context's",
       .least = 0,
       .most = 9e18},
      {.key = "cpu",
       .field = field<&S::cpu, &O::cpu>,
       .help = "Accelerator::device() is the CPU although there is a GPU, and a prepared model on "
               "another is an error",
       .aliases = {"use_cpu"},
       .accelerate = {"ACCELERATE_USE_CPU"}},
      {.key = "device",
       .field = field<&S::device, &O::device>,
       .help =
           "where prepared models compute and batches come: cpu, cuda (each rank the GPU with "
           "its number on the node; it must be there) or cuda:N; empty: cuda where there is one"},
      {.key = "debug",
       .field = field<&S::debug, &O::debug>,
       .help = "operations on nested values compare the shapes of all ranks first, and show them "
               "where they differ",
       .accelerate = {"ACCELERATE_DEBUG_MODE"}},
      {.key = "log_level",
       .field = field<&S::log_level, &O::log_level>,
       .help = "least weight of the lines that a Logger writes",
       .names = {"debug", "info", "warning", "error", "off"},
       .accelerate = {"ACCELERATE_LOG_LEVEL"}},
  };
}

}  // namespace tessera::accelerate
