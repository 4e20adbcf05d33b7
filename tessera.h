// Everything that a training program uses. Programs that want to compile faster include the
// headers that they need: <tessera/nn/linear.h>.
#pragma once

#include <tessera/core/allocator.h>
#include <tessera/core/dlpack.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/gemm_options.h>
#include <tessera/core/nvtx.h>
#include <tessera/core/parallel.h>
#include <tessera/core/pinned.h>
#include <tessera/core/print.h>
#include <tessera/core/profiler.h>
#include <tessera/core/random.h>
#include <tessera/core/safetensors.h>
#include <tessera/core/state_dict.h>
#include <tessera/core/stream.h>
#include <tessera/core/tensor.h>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/function.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>

#include <tessera/nn/activation.h>
#include <tessera/nn/attention.h>
#include <tessera/nn/container.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/lora.h>
#include <tessera/nn/loss.h>
#include <tessera/nn/materialise.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/pooling.h>
#include <tessera/nn/recurrent.h>
#include <tessera/nn/summary.h>
#include <tessera/nn/transformer.h>

#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizer.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include <tessera/precision/autocast.h>
#include <tessera/precision/fp8_linear.h>
#include <tessera/precision/fp8_recipe.h>
#include <tessera/precision/grad_scaler.h>
#include <tessera/precision/policy.h>
#include <tessera/precision/report.h>

#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/rendezvous/process_group.h>
#include <tessera/distributed/rendezvous/run_ranks.h>
#include <tessera/distributed/shard/fully_shard.h>
#include <tessera/distributed/shard/replicate.h>
#include <tessera/distributed/shard/zero.h>
#include <tessera/distributed/sync_batch_norm.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/group.h>

#include <tessera/data/bpe.h>
#include <tessera/data/csv.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/dataset.h>
#include <tessera/data/distributed_source.h>
#include <tessera/data/idx.h>
#include <tessera/data/jsonl.h>
#include <tessera/data/shuffle_buffer.h>
#include <tessera/data/text.h>
#include <tessera/data/token_dataset.h>
#include <tessera/data/token_file.h>
#include <tessera/data/tokenizer.h>
#include <tessera/data/wordpiece.h>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/batch_size.h>
#include <tessera/accelerate/deepspeed.h>
#include <tessera/accelerate/full_values.h>
#include <tessera/accelerate/local_sgd.h>
#include <tessera/accelerate/metrics.h>
#include <tessera/accelerate/operations.h>
#include <tessera/accelerate/plan/model_outline.h>
#include <tessera/accelerate/plan/network.h>
#include <tessera/accelerate/plan/training_plan.h>
#include <tessera/accelerate/run.h>
#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/accelerate/tracking/logging.h>
#include <tessera/accelerate/tracking/memory_tracker.h>
#include <tessera/accelerate/tracking/profile.h>
#include <tessera/accelerate/tracking/progress.h>
#include <tessera/accelerate/tracking/tracker.h>
