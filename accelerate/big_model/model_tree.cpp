#include <tessera/accelerate/big_model/model_tree.h>

#include <algorithm>
#include <functional>
#include <unordered_map>

namespace tessera::accelerate {
namespace {

using Sizes = std::map<std::string, int64_t>;

void add_sizes(const ModelTree& tree, const std::string& prefix, std::optional<DType> dtype,
               Sizes& sizes) {
  const auto add = [&](const std::string& name, int64_t bytes) {
    sizes[""] += bytes;
    for (size_t dot = 0; dot != std::string::npos;) {
      dot = name.find('.', dot + 1);
      sizes[name.substr(0, dot)] += bytes;
    }
  };
  for (const ModelTree::Weight& weight : tree.weights) {
    if (weight.tied_to.empty()) add(prefix + weight.name, weight.bytes(dtype));
  }
  for (const ModelTree& child : tree.children) {
    add_sizes(child, prefix + child.name + ".", dtype, sizes);
  }
}

}  // namespace

int64_t ModelTree::Weight::bytes(std::optional<DType> load_dtype) const {
  const int64_t own = size_of(dtype);
  if (!load_dtype || !is_floating(dtype)) return numel * own;
  return numel * std::min<int64_t>(own, size_of(*load_dtype));
}

ModelTree ModelTree::of(nn::ModuleBase& model) {
  std::unordered_map<std::string, std::vector<Weight>> weights;  // by the name of their module
  std::map<const void*, std::string> first;
  const auto add = [&](const nn::ParameterPlace& place, bool is_buffer) {
    if (!place.tensor->defined()) return;
    const size_t dot = place.name.rfind('.');
    const std::string owner = dot == std::string::npos ? std::string() : place.name.substr(0, dot);
    const auto [at, is_new] = first.try_emplace(place.tensor->impl(), place.name);
    weights[owner].push_back({.name = place.name.substr(dot == std::string::npos ? 0 : dot + 1),
                              .numel = place.tensor->numel(),
                              .dtype = place.tensor->dtype(),
                              .is_buffer = is_buffer,
                              .tied_to = is_new ? std::string() : at->second});
  };
  for (const nn::ParameterPlace& place : model.parameter_places()) add(place, false);
  for (const nn::ParameterPlace& place : model.buffer_places()) add(place, true);
  const std::function<ModelTree(nn::ModuleBase&, const std::string&)> tree_of =
      [&](nn::ModuleBase& module, const std::string& dotted) {
        ModelTree tree{.name = dotted.substr(dotted.rfind('.') + 1),
                       .class_name = module.type_name(),
                       .weights = std::move(weights[dotted])};
        for (const nn::NamedModule& child : module.named_children()) {
          tree.children.push_back(
              tree_of(*child.module, dotted.empty() ? child.name : dotted + "." + child.name));
        }
        return tree;
      };
  return tree_of(model, "");
}

Sizes compute_module_sizes(const ModelTree& model, std::optional<DType> dtype) {
  Sizes sizes = {{"", 0}};
  add_sizes(model, "", dtype, sizes);
  return sizes;
}

Sizes compute_module_sizes(nn::ModuleBase& model, std::optional<DType> dtype) {
  return compute_module_sizes(ModelTree::of(model), dtype);
}

}  // namespace tessera::accelerate
