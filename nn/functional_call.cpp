#include <tessera/nn/functional_call.h>

#include <unordered_map>

namespace tessera::nn {
namespace {

constexpr const char* kFunctionalCall = "functional_call";

}  // namespace

ReplacedParameters::ReplacedParameters(ModuleBase& module, const NamedTensors& tensors) {
  std::unordered_map<std::string, Tensor*> places;
  std::unordered_multimap<TensorImpl*, Tensor*> holders;  // several of a tied parameter
  const auto note = [&](const std::vector<ParameterPlace>& list) {
    for (const auto& [name, tensor] : list) {
      places.emplace(name, tensor);
      if (tensor->defined()) holders.emplace(tensor->impl(), tensor);
    }
  };
  note(module.parameter_places());
  note(module.buffer_places());
  // All is looked at before the first is replaced.
  for (const auto& [name, tensor] : tensors) {
    const auto found = places.find(name);
    TS_CHECK(found != places.end(), kFunctionalCall, module.type_name(),
             " has no parameter and no buffer '", name, "'; named_parameters() lists them");
    const Tensor& own = *found->second;
    TS_CHECK(own.defined() && tensor.defined(), kFunctionalCall, "'", name, "' is ", own,
             " and cannot be replaced by ", tensor);
    TS_CHECK_SHAPE(tensor.shape() == own.shape(), kFunctionalCall, "'", name, "' is ", own,
                   " and cannot be replaced by ", tensor);
    TS_CHECK_DEVICE(tensor.device() == own.device(), kFunctionalCall, "'", name, "' is ", own,
                    " and cannot be replaced by ", tensor);
  }
  for (const auto& [name, tensor] : tensors) {
    const Tensor own = *places.at(name);
    const auto [first, last] = holders.equal_range(own.impl());
    for (auto holder = first; holder != last; ++holder) {
      replaced_.push_back({holder->second, *holder->second});
      *holder->second = tensor;
    }
  }
}

ReplacedParameters::~ReplacedParameters() {
  for (auto last = replaced_.rbegin(); last != replaced_.rend(); ++last) *last->place = last->own;
}

NamedTensors with_values(const NamedTensors& names, const TensorList& values) {
  TS_CHECK(names.size() == values.size(), kFunctionalCall, "needs a value for each of the ",
           names.size(), " names; got ", values.size());
  NamedTensors result;
  for (size_t i = 0; i < names.size(); ++i) result.push_back({names[i].name, values[i]});
  return result;
}

}  // namespace tessera::nn
