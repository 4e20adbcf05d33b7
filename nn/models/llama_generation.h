// Text from a model, token by token, with a cache of keys and values.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include <tessera/nn/models/generation.h>
#include <tessera/nn/models/llama.h>

namespace tessera::llama {

// The new tokens; of the options `together` has no meaning here. `each` sees every one as it is
// made and may end generation by returning false. The model is put into evaluation mode for the
// call; threads that share a model do that before, and find it so. ValueError: an empty prompt.
std::vector<int64_t> generate(Llama& model, std::span<const int64_t> prompt,
                              const gpt2::GenerateOptions& options,
                              const std::function<bool(int64_t token)>& each = {});

}  // namespace tessera::llama
