#include <tessera/autograd/autograd.h>

#include <nlohmann/json.hpp>

#include "autograd/op_checks.h"

namespace tessera::tests {

using nlohmann::json;

Complaints replay_op_case(const json& golden, const SafeTensorsFile& file) {
  Complaints complaints;
  const std::string name = golden["name"];
  const json& spec = golden["spec"];
  try {
    const OpRow* row = find_op_row(spec["op"].get<std::string>());
    TS_CHECK(row != nullptr, name, "there is no such op");
    std::map<std::string, Tensor> leaves;
    const auto named = [&](const json& key) -> Tensor {
      if (key.is_null()) return {};
      Tensor& x = leaves[key];
      if (!x.defined()) x = file.load(name + "/" + key.get<std::string>());
      return x;
    };
    TensorList inputs, wanted;
    DType computed = kF64;  // the dtype whose rounding bounds the error: the lowest that takes part
    for (const json& key : spec["inputs"]) {
      inputs.push_back(named(key));
      if (inputs.back().defined() && is_floating(inputs.back().dtype()))
        computed = inputs.back().dtype();
    }
    for (const json& key : spec.value("grad_of", json::array()))
      wanted.push_back(named(key).set_requires_grad());

    const Result result =
        call_op(*row, inputs, Attrs::parse(spec.value("attrs", json::object()).dump()));
    const json& expected = golden["outputs"];
    TS_CHECK(result.tensors.size() == expected.size() &&
                 result.several == golden.value("several", false),
             name, "returned ", result.tensors.size(), " tensors, expected ", expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      const Tensor& y = result.tensors[i];
      const std::string output = result.several ? "y" + std::to_string(i) : "y";
      const Tensor reference = file.view(name + "/" + output);
      if (torch_name_of(y.dtype()) != expected[i]["dtype"] || y.shape() != reference.shape()) {
        complaints.push_back(detail::concatenate(name, ": ", output, " is ", y, ", expected ",
                                                 expected[i]["dtype"].get<std::string>(),
                                                 reference.shape()));
        continue;
      }
      const DType rounding = epsilon_of(y.dtype()) > epsilon_of(computed) ? y.dtype() : computed;
      const std::string wrong =
          difference(y, reference.to_vector(),
                     error_bound(rounding, row->tolerance, expected[i].value("n", 1.0),
                                 expected[i].value("s", 0.0)));
      if (!wrong.empty()) complaints.push_back(name + ": " + output + ": " + wrong);
    }
    if (wanted.empty()) return complaints;

    TensorList followed, gradients;
    const json seeds =
        spec["grad_output"].is_array() ? spec["grad_output"] : json::array({spec["grad_output"]});
    for (size_t i = 0; i < seeds.size(); ++i) {
      if (seeds[i].is_null()) continue;
      followed.push_back(result.tensors[i]);
      gradients.push_back(named(seeds[i]));
    }
    const TensorList got = grad(followed, wanted, gradients, {.allow_unused = true});
    for (size_t i = 0; i < got.size(); ++i) {
      const std::string input = spec["grad_of"][i];
      const Tensor reference = file.view(name + "/grad." + input);
      const Tensor gradient =
          got[i].defined() ? got[i] : raw::zeros(wanted[i].shape(), wanted[i].dtype());
      const json& bound = golden["grads"][input];
      const std::string wrong =
          gradient.shape() != reference.shape() || gradient.dtype() != wanted[i].dtype()
              ? "is " + gradient.describe()
              : difference(gradient, reference.to_vector(),
                           error_bound(computed, row->tolerance, bound["n"], bound["s"]));
      if (!wrong.empty()) complaints.push_back(name + ": gradient of " + input + ": " + wrong);
    }
  } catch (const std::exception& error) {
    complaints.push_back(name + ": threw " + error.what());
  }
  return complaints;
}

}  // namespace tessera::tests
