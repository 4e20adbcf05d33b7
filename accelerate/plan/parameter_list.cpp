#include <tessera/accelerate/plan/parameter_list.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <set>

#include <nlohmann/json.hpp>

#include <tessera/autograd/differentiable.h>
#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/nn/module.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kList = "model";
using Json = nlohmann::json;

bool is_number(std::string_view word) {
  return !word.empty() &&
         std::ranges::all_of(word, [](unsigned char c) { return std::isdigit(c); });
}

// ---- Reports ------------------------------------------------------------------------------------

// In the order of ListedModule::product.
constexpr std::string_view kReads[] = {"as stored", "product"};

ListedModule module_of_report(const Json& json, const std::string& path, size_t at) {
  const std::string where = "\"modules\"[" + std::to_string(at) + "]";
  const auto check = [&](bool fits, const std::string& key, const char* what) {
    TS_CHECK_AS(FormatError, fits, kList, path, ": ", where, key, " has to be ", what);
  };
  check(json.is_object(), "", "an object");
  ListedModule module;
  for (const auto& [key, value] : json.items()) {
    const std::string name = ".\"" + key + "\"";
    if (key == "name" || key == "tied") {
      check(value.is_string(), name, "a text");
      (key == "name" ? module.name : module.tied) = value.get<std::string>();
    } else if (key == "read") {
      check(value == kReads[0] || value == kReads[1], name, "as stored or product");
      module.product = value == kReads[1];
    } else if (key == "parameters") {
      check(value.is_array(), name, "a list of [name, shape]");
      for (const Json& parameter : value) {
        const bool pair = parameter.is_array() && parameter.size() == 2 &&
                          parameter[0].is_string() && parameter[1].is_array() &&
                          std::ranges::all_of(parameter[1], [](const Json& size) {
                            return size.is_number_integer() && size.get<int64_t>() >= 0;
                          });
        check(pair, name, "a list of [name, shape]");
        check(parameter[1].size() <= static_cast<size_t>(kMaxDims), name,
              "a list of shapes with at most 16 sizes");
        module.parameters.push_back(
            {parameter[0].get<std::string>(), Shape(parameter[1].get<std::vector<int64_t>>())});
      }
    } else {
      TS_THROW(FormatError, kList, path, ": ", where, name,
               " is unknown; known are name, parameters, read, tied");
    }
  }
  return module;
}

// ---- Safetensors --------------------------------------------------------------------------------

// A guess from names, which say no more.
bool looks_like_product(const ListedModule& module) {
  for (const char* word : {"emb", "wte", "wpe", "norm", "ln_"}) {
    if (module.name.find(word) != std::string::npos) return false;
  }
  return std::ranges::any_of(module.parameters,
                             [](const auto& parameter) { return parameter.second.size() >= 2; });
}

// ---- The module ---------------------------------------------------------------------------------

// Input 1 is the weight, which the gradient of a product's input reads again.
const Op kListedProduct{
    .name = "listed_product", .autocast = Autocast::kLow, .reads = {inputs(1), inputs()}};
const Op kListedRead{.name = "listed_read"};
const Op kListedLoss{.name = "listed_loss"};

class Listed final : public nn::Module<Listed> {
 public:
  explicit Listed(std::string type) : type_(std::move(type)) {}
  std::string type_name() const override { return type_; }

  Tensor forward(const Tensor& x) {
    Tensor y = what_ != nullptr ? read(x) : x;
    for (size_t i = 0; i < num_children(); ++i) y = static_cast<Listed&>(child(i))(y);
    return y;
  }

  Listed& descend(const std::string& word, const std::string& type) {
    for (size_t i = 0; i < num_children(); ++i) {
      if (child(i).name() == word) return static_cast<Listed&>(child(i));
    }
    return add<Listed>(word, type);
  }
  void become(const ListedModule& what) {
    what_ = &what;
    for (const auto& [name, shape] : what.parameters) parameter(name, shape);
    places_ = parameter_places();
  }
  void tie(const Tensor& tensor) {
    share_parameter("weight", tensor);
    places_ = parameter_places();
  }

 private:
  Tensor read(const Tensor& x) const {
    TensorList inputs{x};
    for (const nn::ParameterPlace& place : places_) inputs.push_back(*place.tensor);
    return differentiable(
        what_->product ? kListedProduct : kListedRead, inputs,
        [stream = x.dtype()](Inputs in) { return raw::empty(in[0].shape(), stream, kMeta); },
        [product = what_->product, count = inputs.size()](Grads, const Saved& saved) -> TensorList {
          if (product && saved.needs(0)) static_cast<void>(saved.input(1));
          TensorList gradients;
          for (size_t i = 0; i < count; ++i) {
            const auto input = static_cast<int>(i);
            gradients.push_back(saved.needs(input) ? raw::empty(saved.input_shape(input),
                                                                saved.input_dtype(input), kMeta)
                                                   : Tensor());
          }
          return gradients;
        });
  }

  std::string type_;
  const ListedModule* what_ = nullptr;
  std::vector<nn::ParameterPlace> places_;  // of its own parameters
};

struct ListedTraining {
  ParameterList list;  // modules point to it
  std::shared_ptr<Listed> model;
};

Tensor listed_loss(const Tensor& x) {
  return differentiable(
      kListedLoss, {x}, [](Inputs) { return raw::empty({}, kF32, kMeta); },
      [](Grads, const Saved& saved) {
        return raw::empty(saved.input_shape(0), saved.input_dtype(0), kMeta);
      });
}

}  // namespace

std::vector<std::string> ParameterList::not_by_muon() const {
  std::vector<std::string> names;
  for (const ListedModule& module : modules) {
    if (module.product && module.name != "lm_head") continue;
    for (const auto& [own, shape] : module.parameters) {
      names.push_back(module.name.empty() ? own : module.name + "." + own);
    }
  }
  return names;
}

int64_t ParameterList::num_parameters() const {
  int64_t sum = 0;
  for (const ListedModule& module : modules) {
    for (const auto& [name, shape] : module.parameters) sum += numel_of(shape);
  }
  return sum;
}

// "model.layers.3.mlp.up" belongs to "model.layers.3"; others to themselves.
std::string ParameterList::block_of(const std::string& module) {
  for (size_t at = 0; at < module.size();) {
    const size_t end = std::min(module.find('.', at), module.size());
    if (at > 0 && is_number(std::string_view(module).substr(at, end - at))) {
      return module.substr(0, end);
    }
    at = end + 1;
  }
  return module;
}

ParameterList ParameterList::parse(const std::string& text, const std::string& path) {
  const Json json = parse_bounded_json(text, path);
  TS_CHECK_AS(FormatError, json.is_object(), kList, path, " is no JSON object");
  TS_CHECK_AS(FormatError, json.contains("modules"), kList, path, " has no \"modules\"");
  ParameterList list{.kind = "report"};
  TS_CHECK_AS(FormatError, json["modules"].is_array() && !json["modules"].empty(), kList, path,
              ": \"modules\" has to be a list of modules");
  double elements = 0;
  for (const Json& module : json["modules"]) {
    list.modules.push_back(module_of_report(module, path, list.modules.size()));
    for (const auto& [name, shape] : list.modules.back().parameters) {
      double all = 1;
      for (const int64_t size : shape) all *= static_cast<double>(size);
      elements += all;
    }
  }
  // Bytes of a training are numbers, too.
  TS_CHECK_AS(FormatError, elements <= 0x1p50, kList, path, ": \"modules\" have ", elements,
              " elements, and at most 2^50 are planned for");
  for (const auto& [key, value] : json.items()) {
    if (key == "modules") continue;
    TS_CHECK_AS(FormatError, key == "kind" || key == "block_class", kList, path, ": \"", key,
                "\" is unknown; a report has modules, kind, block_class");
    TS_CHECK_AS(FormatError, value.is_string(), kList, path, ": \"", key,
                "\" has to be a text; got ", value.dump());
    (key == "kind" ? list.kind : list.block_class) = value.get<std::string>();
  }
  return list;
}

std::string ParameterList::to_json() const {
  nlohmann::ordered_json json = {{"kind", kind}, {"block_class", block_class}};
  for (const ListedModule& module : modules) {
    nlohmann::ordered_json entry = {{"name", module.name},
                                    {"parameters", nlohmann::ordered_json::array()}};
    for (const auto& [name, shape] : module.parameters) {
      entry["parameters"].push_back({name, std::vector<int64_t>(shape.begin(), shape.end())});
    }
    entry["read"] = kReads[module.product ? 1 : 0];
    if (!module.tied.empty()) entry["tied"] = module.tied;
    json["modules"].push_back(std::move(entry));
  }
  return json.dump(1);
}

ParameterList ParameterList::of_model(nn::ModuleBase& model) {
  ParameterList list{.kind = model.type_name()};
  std::map<const TensorImpl*, std::string> known;
  for (const auto& [name, module] : model.named_modules()) {
    ListedModule one{.name = name, .parameters = {}};
    const std::string type = module->type_name();
    one.product = type == "Linear";
    if (!name.empty() && is_number(module->name())) list.block_class = type;
    for (const auto& [own, place] : module->parameter_places()) {
      if (own.find('.') != std::string::npos || !place->defined()) continue;
      const auto [at, added] =
          known.try_emplace(place->impl(), name.empty() ? own : name + "." + own);
      if (added) {
        one.parameters.push_back({own, place->shape()});
      } else {
        one.tied = at->second;
      }
    }
    if (!one.parameters.empty() || !one.tied.empty()) list.modules.push_back(std::move(one));
  }
  return list;
}

ParameterList ParameterList::of_safetensors(const std::vector<std::string>& files) {
  ParameterList model;
  model.kind = std::to_string(files.size()) + " safetensors file" + (files.size() == 1 ? "" : "s");
  std::set<std::string> names;
  std::map<std::string, size_t> known;
  for (const std::string& path : files) {
    const SafeTensorsFile file(path);
    for (const SafeTensorsEntry& entry : file.entries()) {
      TS_CHECK_AS(FormatError, names.insert(entry.name).second, kList, "\"", entry.name,
                  "\" is in two files, the second is ", path);
      const size_t dot = entry.name.rfind('.');
      const std::string owner = dot == std::string::npos ? "" : entry.name.substr(0, dot);
      const auto [at, added] = known.try_emplace(owner, model.modules.size());
      if (added) model.modules.push_back({.name = owner, .parameters = {}});
      ListedModule& module = model.modules[at->second];
      // Indices and masks stay what they are.
      const bool floating =
          (entry.dtype_name[0] == 'F' || entry.dtype_name[0] == 'B') && entry.dtype_name != "BOOL";
      if (floating) {
        module.parameters.push_back({entry.name.substr(dot + 1), Shape(entry.shape)});
      } else {
        module.buffer_bytes += static_cast<int64_t>(entry.end - entry.begin);
      }
    }
  }
  TS_CHECK_AS(FormatError, !model.modules.empty(), kList, files[0], " holds no tensors");
  for (ListedModule& module : model.modules) module.product = looks_like_product(module);
  return model;
}

PlannedTraining training_of(const ParameterList& list) {
  const auto training = std::make_shared<ListedTraining>();
  training->list = list;
  training->model = std::make_shared<Listed>("Model");
  std::vector<std::pair<Listed*, std::string>> ties;
  for (const ListedModule& module : training->list.modules) {
    Listed* at = training->model.get();
    for (size_t begin = 0; begin < module.name.size();) {
      const size_t end = std::min(module.name.find('.', begin), module.name.size());
      const std::string word = module.name.substr(begin, end - begin);
      at = &at->descend(word, is_number(word) ? list.block_class : word);
      begin = end + 1;
    }
    at->become(module);
    if (!module.tied.empty()) ties.emplace_back(at, module.tied);
  }
  for (const auto& [module, name] : ties) module->tie(training->model->get_parameter(name));
  return {std::shared_ptr<nn::ModuleBase>(training, training->model.get()),
          [model = training->model.get()] {
            return listed_loss((*model)(raw::empty({0, 1}, kF32, kMeta)));
          }};
}

}  // namespace tessera::accelerate
