#include <tessera/nn/summary.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::nn {
namespace {

std::string with_commas(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string with_unit(double number, double base, const char* const units[]) {
  int unit = 0;
  while (number >= base && unit < 4) {
    number /= base;
    ++unit;
  }
  char text[32];
  plain_snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", number, units[unit]);
  return text;
}
std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  return with_unit(static_cast<double>(bytes), 1024, kUnits);
}
std::string flops_text(double flops) {
  constexpr const char* kUnits[] = {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"};
  return with_unit(flops, 1000, kUnits);
}

std::string shapes_text(TensorRefs tensors) {
  std::string text;
  for (const Tensor* tensor : tensors) {
    text += text.empty() ? "" : " ";
    text += '[';
    for (int d = 0; d < tensor->dim(); ++d) {
      text += (d > 0 ? ", " : "") + std::to_string(tensor->size(d));
    }
    text += ']';
  }
  return text;
}

int depth_of(const std::string& name) {
  return name.empty() ? 0 : 1 + static_cast<int>(std::ranges::count(name, '.'));
}

}  // namespace

namespace detail {

SummaryScope::SummaryScope(ModuleBase& module) {
  for (const auto& [name, tensor] : module.named_parameters()) {
    summary_.parameters += tensor.numel();
    if (tensor.requires_grad()) summary_.trainable_parameters += tensor.numel();
    summary_.parameter_bytes += tensor.nbytes();
    held_.push_back({tensor, raw::alias(tensor)});
  }
  for (const auto& [name, tensor] : module.named_buffers()) {
    summary_.buffer_bytes += tensor.nbytes();
    held_.push_back({tensor, raw::alias(tensor)});
  }
  const auto modules = module.named_modules();
  summary_.rows.resize(modules.size());
  for (size_t i = 0; i < modules.size(); ++i) {
    ModuleBase& one = *modules[i].module;
    SummaryRow& row = summary_.rows[i];
    row.name = modules[i].name;
    row.type = one.type_name();
    row.parameters = one.num_parameters();
    std::unordered_set<const TensorImpl*> of_children;
    for (const auto& child : one.named_children()) {
      for (const Tensor& tensor : child.module->parameters()) of_children.insert(tensor.impl());
    }
    for (const Tensor& tensor : one.parameters()) {
      if (!of_children.contains(tensor.impl())) row.own_parameters += tensor.numel();
    }
    hooks_.push_back(one.register_forward_pre_hook([this](ModuleBase&, TensorRefs) {
      open_.push_back(Context::current().slot<FlopCounter>().total);
    }));
    hooks_.push_back(
        one.register_forward_hook([this, i](ModuleBase& self, TensorRefs, TensorRefs outputs) {
          SummaryRow& row = summary_.rows[i];
          row.flops += Context::current().slot<FlopCounter>().total - open_.back();
          open_.pop_back();
          if (row.calls++ == 0) row.output = shapes_text(outputs);
          for (const Tensor* tensor : outputs) row.output_bytes += tensor->nbytes();
          if (self.num_children() == 0) {
            for (const Tensor* tensor : outputs) summary_.activation_bytes += tensor->nbytes();
          }
        }));
  }
  previous_ = std::exchange(Context::current().slot<FlopCounter>(), {.enabled = true});
  for (const Held& one : held_) {
    one.tensor.set_data(raw::empty(one.tensor.shape(), one.tensor.dtype(), kMeta));
  }
}

SummaryScope::~SummaryScope() {
  for (const Held& one : held_) one.tensor.set_data(one.contents);
  for (HookHandle& hook : hooks_) hook.remove();
  Context::current().slot<FlopCounter>() = previous_;
}

Summary SummaryScope::finish() const {
  Summary result = summary_;
  result.flops = Context::current().slot<FlopCounter>().total;
  return result;
}

}  // namespace detail

std::string Summary::table(int max_depth) const {
  std::vector<std::vector<std::string>> cells = {
      {"module", "output", "parameters", "FLOPs", "calls"}};
  for (const SummaryRow& row : rows) {
    const int depth = depth_of(row.name);
    if (max_depth >= 0 && depth > max_depth) continue;
    const std::string own_name =
        row.name.empty() ? "" : row.name.substr(row.name.rfind('.') + 1) + ": ";
    cells.push_back({std::string(static_cast<size_t>(2 * depth), ' ') + own_name + row.type,
                     row.output, row.parameters > 0 ? with_commas(row.parameters) : "-",
                     row.flops > 0 ? flops_text(row.flops) : "-",
                     row.calls > 0 ? std::to_string(row.calls) : "-"});
  }
  std::vector<size_t> widths(cells[0].size());
  for (const auto& row : cells) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : cells) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      const bool number = i >= 2;  // to the right
      text += (i > 0 ? "  " : "") + (number ? gap + row[i] : row[i] + gap);
    }
    while (text.ends_with(' ')) text.pop_back();
    text += '\n';
  }
  text += "parameters: " + with_commas(parameters) + " (" + with_commas(trainable_parameters) +
          " trainable), " + bytes_text(parameter_bytes) + "\n";
  text += "buffers: " + bytes_text(buffer_bytes) +
          ", outputs of layers in one forward pass: " + bytes_text(activation_bytes) +
          ", arithmetic: " + flops_text(flops) + "\n";
  return text;
}

}  // namespace tessera::nn
