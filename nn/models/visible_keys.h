// Which keys tokens see: those of their document up to themselves, with a window the latest alone,
// and no padding.
#pragma once

#include <cstdint>

#include <tessera/autograd/ops.h>
#include <tessera/nn/transformer/documents.h>

namespace tessera::nn::models {

// Of tokens past .. past + count - 1 of a batch.
struct VisibleKeys {
  int64_t past = 0, count = 0;
  int64_t window = 0;        // the latest keys that each token sees, itself included; 0: all
  Tensor padding = {};       // [B] i64: tokens at the left that nobody sees; or undefined
  Documents documents = {};  // of packed rows, which have neither a past nor padding
};
// They as scaled_dot_product_attention takes them, with past + count keys: causal where that says
// it, else a mask [count, keys] or [B, 1, count, keys], made once for all layers of a call.
struct SeenKeys {
  AttentionOptions options = {.causal = true, .enable_gqa = true};
  void visit_tensors(auto&& visit) { visit(options.mask), visit(options.starts); }
};
SeenKeys attention_to(const VisibleKeys& keys, const Device& device);
// The same as a mask in any case.
Tensor mask_of(const VisibleKeys& keys, const Device& device);

// Positions in the text, [count], or with padding [B, count], where those of padding are 0; of packed
// rows those in their documents.
Tensor positions_of(const VisibleKeys& keys, const Device& device);

// ShapeError, DTypeError: padding that is not [B] of i64 or i32.
void check_padding(const Tensor& padding, const Tensor& tokens);
// UnsupportedError in the name of `where`: packed rows with a cache or padding.
void check_packed(const char* where, const VisibleKeys& keys, bool has_cache);

}  // namespace tessera::nn::models
