#include <tessera/nn/quantize/quantize.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include <tessera/autograd/packed/linear.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/call_scopes.h>
#include <tessera/nn/describe.h>

namespace tessera::nn {
namespace {

constexpr const char* kQuantize = "quantize";
constexpr const char* kState = "quant_state";

kernels::PackedWeight without_tensors(kernels::PackedWeight packed) {
  for (Tensor* part :
       {&packed.values, &packed.absmax, &packed.nested_absmax, &packed.nested_offset}) {
    *part = Tensor();
  }
  return packed;
}

Tensor layout_of(const kernels::PackedWeight& form) {
  return tensor(std::vector<int64_t>{form.out_features, form.in_features, form.block_size}, kI64);
}

// The scales of a quantized layer's weight, a child of the layer.
struct QuantState : Module<QuantState> {
  explicit QuantState(const kernels::PackedWeight& packed)
      : form(without_tensors(packed)),
        layout(buffer(kernels::name_of(form.format), layout_of(form))),
        absmax(buffer("absmax", packed.absmax)),
        nested_absmax(buffer("nested_absmax", packed.nested_absmax)),
        nested_offset(buffer("nested_offset", packed.nested_offset)) {}
  std::string extra_repr() const override {
    const std::string format = kernels::name_of(form.format);
    if (form.format == QuantizeFormat::kInt8) return format;
    return format + ", " +
           detail::describe("block_size", form.block_size, "double_quantize",
                            nested_absmax.defined());
  }
  kernels::PackedWeight weight(const Tensor& values) const {
    if (layout.device().is_cpu()) {
      const auto* const loaded = layout.data_as<int64_t>();
      TS_CHECK(loaded[0] == form.out_features && loaded[1] == form.in_features &&
                   loaded[2] == form.block_size,
               kQuantize, "a state of a weight [", loaded[0], ", ", loaded[1], "] in blocks of ",
               loaded[2], " was loaded into one [", form.out_features, ", ", form.in_features,
               "] in blocks of ", form.block_size, "; load a state of this model");
    }
    kernels::PackedWeight packed = form;
    packed.values = values;
    packed.absmax = absmax;
    packed.nested_absmax = nested_absmax;
    packed.nested_offset = nested_offset;
    return packed;
  }

  const kernels::PackedWeight form;
  // i64 [out, in, block size], under the name of the format: bytes alone do not say what they are.
  const Tensor& layout;
  const Tensor& absmax;
  const Tensor& nested_absmax;  // undefined without double quantization
  const Tensor& nested_offset;
};

const QuantState* state_of(const ModuleBase& layer) {
  for (size_t i = 0; i < layer.num_children(); ++i) {
    if (const auto* state = dynamic_cast<const QuantState*>(&layer.child(i))) return state;
  }
  return nullptr;
}

// Stateless: what a copy needs is in the layer's children.
class QuantizedExtension : public ModuleExtension {
 public:
  explicit QuantizedExtension(const ModuleBase& layer) : layer_(layer) {}
  void extend(ModuleBase& copy) const override {
    extend_quantized(layer_, copy);
    copy.set_extension(quantized_extension(copy));
  }

 private:
  const ModuleBase& layer_;
};

// Puts the packed weight in the place of the layer's.
void install(ModuleBase& layer, const kernels::PackedWeight& packed) {
  Tensor* place = nullptr;
  for (const ParameterPlace& each : layer.parameter_places()) {
    if (each.name == "weight") place = each.tensor;
  }
  TS_CHECK(place != nullptr, kQuantize, layer.type_name(), " has no weight");
  layer.adopt(kState, std::make_unique<QuantState>(packed));
  layer.submodule(kState).train(layer.is_training());
  *place = packed.values;
  // A fused op reads the weight of a layer without hooks instead of calling it.
  layer.register_forward_pre_hook([](ModuleBase&, TensorRefs) {});
}

bool names_end_of(std::string_view name, std::string_view dotted) {
  if (!dotted.ends_with(name)) return false;
  return dotted.size() == name.size() || dotted[dotted.size() - name.size() - 1] == '.';
}

struct Target {
  std::string name;
  Linear* layer;
};

bool is_tied(const Linear& layer, const std::vector<ParameterPlace>& places) {
  return std::ranges::count_if(places, [&](const ParameterPlace& place) {
           return place.tensor->defined() && place.tensor->impl() == layer.weight.impl();
         }) > 1;
}

std::vector<Target> targets_of(ModuleBase& model, const QuantizeOptions& options) {
  std::vector<Target> all, chosen;
  std::vector<const ModuleBase*> insides;  // of layers: adapters
  for (const auto& [name, module] : model.named_modules()) {
    auto* const layer = dynamic_cast<Linear*>(module);
    if (layer == nullptr || std::ranges::find(insides, layer) != insides.end()) continue;
    for (const auto& inner : layer->named_modules()) insides.push_back(inner.module);
    all.push_back({name, layer});
  }
  const std::vector<ParameterPlace> places = model.parameter_places();
  const auto any_of = [](const std::vector<std::string>& names, const std::string& dotted) {
    return std::ranges::any_of(names, [&](const auto& name) { return names_end_of(name, dotted); });
  };
  for (const std::string& name : options.names) {
    TS_CHECK_AS(
        ConfigError,
        std::ranges::any_of(all, [&](const auto& one) { return names_end_of(name, one.name); }),
        kQuantize, "no Linear of the model is named '", name, "'; see repr()");
  }
  for (const Target& target : all) {
    const bool named = any_of(options.names, target.name);
    if (!options.names.empty() && !named) continue;
    // A layer that is asked for by name is not left out because a default says so.
    if (!named && any_of(options.exclude, target.name)) continue;
    if (target.layer->weight.defined() && is_tied(*target.layer, places)) {
      TS_CHECK_AS(
          ConfigError, !named, kQuantize, "the weight of '", target.name,
          "' is tied to another module's, which reads it as numbers; leave it out of names");
      continue;
    }
    chosen.push_back(target);
  }
  TS_CHECK_AS(ConfigError, !chosen.empty(), kQuantize,
              "the model has no Linear to quantize: excluded and tied ones stay as they are");
  return chosen;
}

void check_target(const Target& target) {
  const Linear& layer = *target.layer;
  TS_CHECK_AS(ConfigError, !is_quantized(layer), kQuantize, "'", target.name,
              "' is quantized already");
  TS_CHECK_AS(ConfigError, layer.extension() == nullptr && layer.weight.defined(), kQuantize, "'",
              target.name, "' has an adapter or a parametrization; quantize first, then add_lora");
  TS_CHECK_AS(ConfigError, element_guard(layer.weight) == nullptr && layer.boundary() == nullptr,
              kQuantize, "the weight of '", target.name, "' is ", layer.weight,
              ", divided among ranks; quantize the whole model before it is divided");
}

}  // namespace

void refuse_quantized_layers(const ModuleBase& model, const char* what) {
  const std::function<void(const ModuleBase&)> look = [&](const ModuleBase& module) {
    TS_CHECK_AS(UnsupportedError, !is_quantized(module), what, "'", module.dotted_name(),
                "' is quantized, and files of this kind have no bytes of such weights; use "
                "save_safetensors(path, model.state_dict().to_map())");
    for (size_t i = 0; i < module.num_children(); ++i) look(module.child(i));
  };
  look(model);
}

bool is_quantized(const ModuleBase& layer) { return state_of(layer) != nullptr; }

kernels::PackedWeight packed_weight(const ModuleBase& layer) {
  const QuantState* const state = state_of(layer);
  TS_CHECK(state != nullptr, "packed_weight", layer.type_name(), " '", layer.dotted_name(),
           "' is not quantized; see quantize()");
  return state->weight(layer.get_parameter("weight"));
}

QuantizeSummary quantize(ModuleBase& model, const QuantizeOptions& options) {
  const kernels::PackOptions pack{.format = options.format,
                                  .block_size = options.block_size,
                                  .double_quantize = options.double_quantize};
  const std::vector<Target> targets = targets_of(model, options);
  for (const Target& target : targets) {
    check_target(target);
    // What packing refuses, before anything is packed.
    kernels::pack(raw::empty(target.layer->weight.shape(), target.layer->weight.dtype(), kMeta),
                  pack);
    TS_CHECK_AS(UnsupportedError, !target.layer->weight.device().is_cuda(), kQuantize,
                "weights are packed on the CPU, and '", target.name, "' has ", target.layer->weight,
                "; there is no kernel for a GPU");
  }
  const NoGradGuard no_grad;
  const MemoryCategoryGuard category(MemoryCategory::kParameter);
  QuantizeSummary summary;
  for (const auto& [name, layer] : targets) {
    const auto bytes_of = [](const Tensor& x) {
      return x.defined() ? x.numel() * size_of(x.dtype()) : 0;
    };
    summary.quantized.push_back(name);
    summary.bytes_before += bytes_of(layer->weight);
    const kernels::PackedWeight packed = kernels::pack(layer->weight.detach(), pack);
    for (const Tensor* part :
         {&packed.values, &packed.absmax, &packed.nested_absmax, &packed.nested_offset}) {
      summary.bytes_after += bytes_of(*part);
    }
    install(*layer, packed);
    layer->set_extension(quantized_extension(*layer));
  }
  return summary;
}

Tensor quantized_linear(const Linear& layer, const Tensor& x) {
  count_call(layer, x);
  return packed_linear(x, packed_weight(layer), bias_of(layer));
}

std::unique_ptr<ModuleExtension> quantized_extension(const ModuleBase& layer) {
  return std::make_unique<QuantizedExtension>(layer);
}

void extend_quantized(const ModuleBase& layer, ModuleBase& copy) {
  kernels::PackedWeight places = packed_weight(layer);
  for (Tensor* part :
       {&places.values, &places.absmax, &places.nested_absmax, &places.nested_offset}) {
    if (part->defined()) *part = raw::empty(part->shape(), part->dtype(), part->device());
  }
  install(copy, places);
}

}  // namespace tessera::nn
