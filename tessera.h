// Everything that a training program uses. Programs that want to compile faster include the
// headers that they need: <tessera/nn/linear.h>.
#pragma once

// clang-format off
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/core/safetensors.h>
#include <tessera/core/tensor.h>

#include <tessera/autograd/anomaly.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/function.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>

#include <tessera/nn/module.h>

#include <tessera/data/bpe.h>
#include <tessera/data/csv.h>
#include <tessera/data/idx.h>
#include <tessera/data/jsonl.h>
#include <tessera/data/text.h>
#include <tessera/data/token_file.h>
#include <tessera/data/tokenizer.h>
#include <tessera/data/wordpiece.h>
// clang-format on
