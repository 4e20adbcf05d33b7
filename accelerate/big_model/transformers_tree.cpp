#include <tessera/accelerate/big_model/transformers_tree.h>

#include <algorithm>
#include <string_view>

#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

ModelTree& child(ModelTree& tree, std::string_view name) {
  const auto found = std::ranges::find(tree.children, name, &ModelTree::name);
  if (found != tree.children.end()) return *found;
  return tree.children.emplace_back(ModelTree{.name = std::string(name)});
}

ModelTree& at(ModelTree& tree, std::string_view dotted) {
  ModelTree* module = &tree;
  while (!dotted.empty()) {
    const size_t dot = std::min(dotted.find('.'), dotted.size());
    module = &child(*module, dotted.substr(0, dot));
    dotted.remove_prefix(std::min(dot + 1, dotted.size()));
  }
  return *module;
}

// An empty module behind `before`.
void insert_behind(ModelTree& tree, std::string_view before, std::string_view name) {
  const auto place = std::ranges::find(tree.children, before, &ModelTree::name);
  tree.children.insert(place == tree.children.end() ? place : place + 1,
                       ModelTree{.name = std::string(name)});
}

void keep_together(ModelTree& list) {
  for (ModelTree& block : list.children) block.class_name = kUndivided;
}

}  // namespace

ModelTree transformers_tree(const PlannedModel& model) {
  const ModelDimensions& sizes = model.dimensions;
  TS_CHECK_AS(UnsupportedError, sizes.layers > 0, "device_map",
              "blocks are known of models by their config.json; this is ", model.kind);
  ModelTree tree;
  for (const ListedModule& listed : model.parameters.modules) {
    ModelTree& module = at(tree, listed.name);
    for (const auto& [name, shape] : listed.parameters) {
      module.weights.push_back({.name = name, .numel = numel_of(shape)});
    }
    if (!listed.tied.empty()) {
      module.weights.push_back({.name = "weight", .tied_to = listed.tied});
    }
  }
  if (model.kind == "gpt2") {
    ModelTree& base = at(tree, "transformer");
    insert_behind(base, "wpe", "drop");
    keep_together(at(base, "h"));
  } else if (model.kind == "bert") {
    ModelTree& embeddings = at(tree, "bert.embeddings");
    embeddings.class_name = kUndivided;
    for (const char* name : {"position_ids", "token_type_ids"}) {
      embeddings.weights.push_back(
          {.name = name, .numel = sizes.context, .dtype = kI64, .is_buffer = true});
    }
    insert_behind(tree, "bert", "dropout");
    keep_together(at(tree, "bert.encoder.layer"));
  } else {
    ModelTree& base = at(tree, "model");
    keep_together(at(base, "layers"));
    ModelTree& rotary = child(base, "rotary_emb");
    const int64_t head = sizes.head;
    for (const char* name : {"inv_freq", "original_inv_freq"}) {
      rotary.weights.push_back({.name = name, .numel = head / 2, .is_buffer = true});
    }
  }
  return tree;
}

}  // namespace tessera::accelerate
