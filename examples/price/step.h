// A training step of GPT-2 or BERT on the dry device, and its price.
#pragma once

#include <vector>

#include <tessera/accelerate/cli/price_options.h>
#include <tessera/core/cuda/dry/price.h>

namespace tessera::cli {

struct StepPrice {
  gpu::dry::Bill bill;
  gpu::dry::StepFacts facts;
  std::vector<gpu::dry::Launch> launches;
};

// Forward, loss, backward, clipping to a norm of 1 and AdamW, after the steps in which states are
// made (with a graph: and captured). Throws ConfigError for sizes that the model does not have,
// OutOfMemory where the machine's memory is too small, UnsupportedError for what cannot be
// captured.
StepPrice price_step(const PriceOptions& options, const gpu::dry::Machine& machine);

}  // namespace tessera::cli
