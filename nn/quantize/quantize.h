// Frozen models in 8 or 4 bits, in the formats of bitsandbytes (core/kernels/quantize): the base of
// QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).
//
//     auto model = nn::models::Llama::from_pretrained("TinyLlama-1.1B");
//     nn::quantize(*model, {.format = nn::QuantizeFormat::kNf4, .double_quantize = true});
//     nn::add_lora(*model, {.names = {"all-linear"}, .rank = 16});
//     optim::AdamW optimizer(nn::trainable_parameters(*model), {.lr = 2e-4});
//
// Linears change in place. Types and names of the model stay; NAME.weight becomes the packed bytes
// (u8), and its scales stand beside it as buffers: NAME.quant_state.absmax, and with double
// quantization nested_absmax and nested_offset; a third, with the name of the format, has the sizes.
// All are part of the state dict, move with the model and are copied by clone(). A state of a model
// that is quantized alike loads; one in another format, or in floating numbers, is refused.
//
// A quantized weight is frozen: bytes have no gradient, and requires_grad is a DTypeError. Up to 16
// rows read kInt8 as it lies; else calls unpack it in tiles (autograd/packed/linear.h), so that it is never whole in memory; backward does
// so again and gives the gradients of x and of the bias. Under autocast products run in its dtype.
// Fused ops that read a weight call the layer instead, and fp8 leaves it out, with the reason.
//
// First load the model, then convert its dtype, then quantize, then add adapters. What is not
// possible is an error, nothing is done instead: to(dtype) of a quantized model makes its scales
// lose bits, so the next call is a DTypeError; merge_lora of a quantized layer, and calls on a GPU,
// are an UnsupportedError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/kernels/quantize/packed_weight.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

using QuantizeFormat = kernels::PackedFormat;  // kInt8, kNf4, kFp4

struct QuantizeOptions {
  QuantizeFormat format = QuantizeFormat::kNf4;
  int64_t block_size = 64;       // of nf4 and fp4: 32, 64, 128 and so on to 4096
  bool double_quantize = false;  // of nf4 and fp4: the scales too, to bytes
  // Which Linears: dotted names or their ends, as in add_lora. Empty: all but `exclude` and those
  // whose weight is tied to another module's.
  std::vector<std::string> names = {};
  std::vector<std::string> exclude = {"lm_head"};  // names or ends of names
};

struct QuantizeSummary {
  std::vector<std::string> quantized;  // dotted names, in the order of the model
  int64_t bytes_before = 0;            // of their weights
  int64_t bytes_after = 0;             // with the scales
};

// Packs the weights of Linears, one after the other. On an error nothing is changed. ConfigError: a
// name that matches no Linear, no Linear at all, a layer that is quantized already, has an adapter
// or a parametrization, is sharded or divided, or whose weight is tied; ValueError,
// UnsupportedError, DTypeError: what kernels::pack() refuses.
QuantizeSummary quantize(ModuleBase& model, const QuantizeOptions& options = {});

bool is_quantized(const ModuleBase& layer);
// UnsupportedError of `what` where a layer is: for writers of files that know floating weights alone.
void refuse_quantized_layers(const ModuleBase& model, const char* what);
// The packed weight of a quantized Linear; shares memory with the layer. ValueError: it is not.
kernels::PackedWeight packed_weight(const ModuleBase& layer);

// For adapters, which take the place of a layer's extension: what clone() needs of a quantized
// layer, and what that does to a copy.
std::unique_ptr<ModuleExtension> quantized_extension(const ModuleBase& layer);
void extend_quantized(const ModuleBase& layer, ModuleBase& copy);

}  // namespace tessera::nn
