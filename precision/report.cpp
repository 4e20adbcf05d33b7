#include <tessera/precision/report.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/core/plain_text.h>
#include <tessera/precision/autocast.h>

namespace tessera::precision {
namespace {

std::string text_of(const DTypes& dtypes) {
  std::string text;
  for (const DType dtype : dtypes) {
    text += (text.empty() ? "" : "+") + std::string(name_of(dtype));
  }
  return text.empty() ? "-" : text;
}

// Where the parameter's gradient lies, or will after the next backward.
DType gradient_dtype(const Tensor& parameter) {
  if (const Tensor grad = parameter.grad(); grad.defined()) return grad.dtype();
  const AutogradSlot* slot = autograd_slot(parameter);
  if (slot != nullptr && slot->main_grad.defined()) return slot->main_grad.dtype();
  return parameter.dtype();
}

// The dtype that the policy names for what an op reads; nothing where it names none.
std::optional<DType> expected_of(const Op& op, const Policy& policy) {
  if (op.autocast == Autocast::kLow) return policy.compute;
  const bool low = policy.compute == kBF16 || policy.compute == kF16;
  if (op.autocast == Autocast::kFloat32 && low && policy.casting == Casting::kAutocast) return kF32;
  return std::nullopt;
}

}  // namespace

PrecisionWatch::PrecisionWatch(nn::ModuleBase& model, const Policy& policy)
    : model_(model), policy_(policy) {
  handle_ = model.register_call_scope([this](nn::ModuleBase&) -> std::shared_ptr<void> {
    ++calls_;
    return std::make_shared<ScopedValue<OpObserver*>>(
        Context::current().slot<OpObserverSlot>().observer, static_cast<OpObserver*>(this));
  });
}
PrecisionWatch::~PrecisionWatch() { handle_.remove(); }

void PrecisionWatch::saw(const Op& op, std::span<const Tensor> inputs,
                         std::span<const Tensor> results) {
  const std::string& layer = call_site();
  Seen& seen = layers_[layer];
  const std::optional<DType> expected = expected_of(op, policy_);
  DTypes read;
  for (const Tensor& input : inputs) {
    if (input.defined() && is_floating(input.dtype())) read.insert(input.dtype());
  }
  const bool fp8 = std::ranges::any_of(read, is_fp8);
  if (fp8) {  // beside what its operands were made from
    for (const DType dtype : read) {
      if (is_fp8(dtype)) seen.products.insert(dtype);
    }
  } else if (op.autocast == Autocast::kLow) {
    seen.products.insert(read.begin(), read.end());
  } else if (!op.view) {
    for (const Tensor& result : results) {
      if (result.defined() && is_floating(result.dtype())) seen.others.insert(result.dtype());
    }
  }
  if (!expected) return;
  for (const DType dtype : read) {
    if (dtype == *expected) continue;
    Found& found = deviations_[{layer, std::string(op.name), dtype}];
    found.expected = *expected;
    ++found.calls;
  }
}

PrecisionReport PrecisionWatch::report(const StateDict& optimizer) const {
  PrecisionReport report{.policy = policy_, .calls = calls_, .layers = {}, .deviations = {}};
  const std::string root = model_.dotted_name();
  NamedTensors parameters = model_.named_parameters();
  for (const auto& [name, module] : model_.named_modules()) {
    LayerPrecision layer{.name = name, .type = module->type_name()};
    bool shown = false;
    const std::string prefix = name.empty() ? "" : name + ".";
    for (const auto& [full, tensor] : parameters) {
      // Its own: what is behind the prefix has no further dot.
      if (!full.starts_with(prefix) || full.find('.', prefix.size()) != std::string::npos) continue;
      shown = true;
      layer.parameters.insert(tensor.dtype());
      if (tensor.requires_grad()) layer.gradients.insert(gradient_dtype(tensor));
      const std::string state = "state." + full + ".";
      for (const auto& [key, value] : optimizer) {
        if (!key.starts_with(state) || !is_floating(value.dtype())) continue;
        (key.ends_with(".master") ? layer.masters : layer.states).insert(value.dtype());
      }
    }
    if (const auto seen = layers_.find(module->dotted_name()); seen != layers_.end()) {
      shown = true;
      layer.products = seen->second.products;
      layer.others = seen->second.others;
    }
    if (shown) report.layers.push_back(std::move(layer));
  }
  if (const auto layers = fp8_of(model_)) report.fp8 = layers->report();
  for (const auto& [key, found] : deviations_) {
    const auto& [layer, op, dtype] = key;
    report.deviations.push_back({layer, op, found.expected, dtype, found.calls});
  }
  return report;
}

std::string Deviation::describe() const {
  PlainText<std::ostringstream> text;
  text << (layer.empty() ? "(model)" : layer) << ": " << op << " ran in " << found
       << ", the policy says " << expected << " (" << calls << (calls == 1 ? " call)" : " calls)");
  return text.str();
}

std::string PrecisionReport::table() const {
  std::vector<std::vector<std::string>> rows = {
      {"layer", "type", "parameter", "products", "other ops", "gradient", "master", "state"}};
  for (const LayerPrecision& layer : layers) {
    rows.push_back({layer.name.empty() ? "(model)" : layer.name, layer.type,
                    text_of(layer.parameters), text_of(layer.products), text_of(layer.others),
                    text_of(layer.gradients), text_of(layer.masters), text_of(layer.states)});
  }
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text = precision::describe(policy) + "\n";
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  if (calls == 0) {
    text += "the model was not called: nothing is known of its ops\n";
  } else if (deviations.empty()) {
    text += "every op ran in the precision that the policy says\n";
  }
  for (const Deviation& deviation : deviations) text += deviation.describe() + "\n";
  if (fp8) text += fp8->table();
  return text;
}

}  // namespace tessera::precision
