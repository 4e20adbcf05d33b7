// Runs one op from files, for comparison with another implementation.
//
//     op_runner --list
//     op_runner --spec S.json --inputs IN.safetensors --outputs OUT.safetensors
//
// S = {"op": name in torch or torch.nn.functional,
//      "inputs": [names of tensors in IN in the order of torch's signature, null = absent],
//      "attrs": {torch's keyword: value; dtypes as "bfloat16"},
//      "grad_of": [names], "grad_output": name (a list of names for several outputs),
//      "device": "cpu", "cuda" or "cuda:N"}
// OUT holds y (y0, y1, ... where torch returns several) and grad.NAME. A gradient that does not
// depend on an input is zero. Without grad_output, the only element of y gets 1.
// Where there is no GPU, "cuda" is the emulation on the CPU: op_runner_emulated beside this
// program, which is the same one linked with it. OUT's metadata says under "device" which it was,
// and with the emulation stderr does. Beyond torch's names there is "fp8_linear": inputs x,
// weight, bias; attrs recipe, format ("hybrid", "e4m3") and block (precision/fp8_recipe.h), with
// scales as of a layer's first call. Exit codes: 0 done; 2 a wrong specification or input,
// explained on stderr; 1 OUT not written.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/precision/fp8_linear.h>

#include "autograd/op_samples.h"

namespace {

using namespace tessera;
using namespace tessera::tests;
using nlohmann::json;

constexpr std::string_view kWhere = "op_runner";

struct Spec {
  std::string op;
  std::vector<std::string> inputs;  // "" is absent
  Attrs attrs;
  std::vector<std::string> grad_of;
  std::vector<std::string> grad_output;
  Device device = kCpu;
};

std::vector<std::string> names_of(const json& list, std::string_view field) {
  TS_CHECK(list.is_array(), kWhere, "'", field, "' must be a list of tensor names; got ",
           list.dump());
  std::vector<std::string> names;
  for (const json& name : list) {
    TS_CHECK(name.is_string() || name.is_null(), kWhere, "'", field,
             "' holds tensor names and null; got ", name.dump());
    names.push_back(name.is_null() ? "" : name.get<std::string>());
  }
  return names;
}

Spec parse_spec(const std::string& path) {
  const MappedFile file(path);
  const std::string text = quote_special_numbers(file.text());
  json object;
  try {
    object = json::parse(text);
  } catch (const json::exception& error) {
    TS_THROW(FormatError, kWhere, "'", path, "' is not valid JSON: ", error.what());
  }
  TS_CHECK(object.is_object(), kWhere, "'", path,
           "' must hold an object with \"op\" and \"inputs\"");
  Spec spec;
  for (const auto& [key, value] : object.items()) {
    if (key == "op") {
      TS_CHECK(value.is_string(), kWhere, "'op' must be a name; got ", value.dump());
      spec.op = value.get<std::string>();
    } else if (key == "inputs") {
      spec.inputs = names_of(value, key);
    } else if (key == "attrs") {
      if (!value.is_null()) spec.attrs = Attrs::parse(value.dump());
    } else if (key == "grad_of") {
      if (!value.is_null()) spec.grad_of = names_of(value, key);
    } else if (key == "grad_output") {
      if (value.is_null()) continue;
      spec.grad_output = value.is_string() ? std::vector<std::string>{value.get<std::string>()}
                                           : names_of(value, key);
    } else if (key == "device") {
      const std::string name = value.is_string() ? value.get<std::string>() : "";
      TS_CHECK_DEVICE(name == "cpu" || name.starts_with("cuda"), kWhere,
                      "'device' is \"cpu\", \"cuda\" or \"cuda:N\"; got ", value.dump());
      spec.device = parse_device(name);
    } else {
      TS_THROW(ValueError, kWhere, "unknown field '", key,
               "'; a specification has op, inputs, attrs, grad_of, grad_output, device");
    }
  }
  TS_CHECK(!spec.op.empty(), kWhere, "'op' is missing");
  return spec;
}

// No row of the table: its values are not those of f64 within rounding. test_fp8_linear has them.
const OpRow kFp8Linear{.name = "fp8_linear",
                       .parameters = "x, weight, bias",
                       .call = [](const Args& in, Attrs& a) -> Result {
                         precision::Fp8Recipe recipe =
                             precision::Fp8Recipe::named(a.text("recipe", "tensorwise"));
                         if (a.has("format")) {
                           const std::string format = a.text("format");
                           TS_CHECK(format == "hybrid" || format == "e4m3", kFp8Linear.name,
                                    "'format' is \"hybrid\" or \"e4m3\"; got '", format, "'");
                           recipe.format = format == "hybrid" ? precision::Fp8Format::kHybrid
                                                              : precision::Fp8Format::kE4M3;
                         }
                         recipe.block = a.integer("block", recipe.block);
                         return precision::fp8_linear(in[0], in[1], in.optional(2), recipe);
                       },
                       .samples = {}};

std::map<std::string, Tensor> run(const Spec& spec, const SafeTensorsFile* file) {
  const OpRow* row = spec.op == kFp8Linear.name ? &kFp8Linear : find_op_row(spec.op);
  TS_CHECK(row != nullptr, kWhere, "there is no op '", spec.op,
           "'; op_runner --list prints all names");
  std::map<std::string, Tensor> tensors;
  const auto tensor_named = [&](const std::string& name) -> Tensor {
    if (name.empty()) return {};
    TS_CHECK(file != nullptr, kWhere, "'--inputs' is missing, and the specification names '", name,
             "'");
    Tensor& loaded = tensors[name];
    if (!loaded.defined()) loaded = file->load(name).to(spec.device);
    return loaded;
  };
  TensorList inputs, wanted;
  for (const std::string& name : spec.inputs) inputs.push_back(tensor_named(name));
  for (const std::string& name : spec.grad_of) {
    const bool is_input = !name.empty() && std::find(spec.inputs.begin(), spec.inputs.end(),
                                                     name) != spec.inputs.end();
    TS_CHECK(is_input, kWhere, "'grad_of' names inputs of the op; got '", name, "'");
    const Tensor x = tensor_named(name);
    TS_CHECK_DTYPE(is_floating(x.dtype()), kWhere, "a gradient needs a floating input; '", name,
                   "' is ", x);
    wanted.push_back(x.set_requires_grad());
  }
  Attrs attrs = spec.attrs;
  if (row->parameters.empty() && !attrs.has("device")) {  // made from nothing, on that device
    std::ostringstream name;
    name << spec.device;
    AttrValue device;
    device.kind = AttrValue::Kind::kString;
    device.text = name.str();
    attrs.set("device", device);
  }
  const Result result = call_op(*row, inputs, attrs);

  std::map<std::string, Tensor> outputs;
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    const Tensor& y = result.tensors[i];
    TS_CHECK_DEVICE(y.device() == spec.device, kWhere, "'device' is ", spec.device, ", and '",
                    spec.op, "' gave ", y);
    outputs[result.several ? "y" + std::to_string(i) : "y"] = result.tensors[i].detach();
  }
  if (wanted.empty()) return outputs;

  TensorList followed, gradients;
  TS_CHECK(spec.grad_output.size() <= result.tensors.size(), kWhere, "'grad_output' has ",
           spec.grad_output.size(), " names; '", spec.op, "' returned ", result.tensors.size(),
           " tensors");
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    const Tensor& y = result.tensors[i];
    const bool given = i < spec.grad_output.size() && !spec.grad_output[i].empty();
    if (!given && !(spec.grad_output.empty() && i == 0)) continue;
    TS_CHECK_AS(AutogradError, y.requires_grad(), kWhere, "output ", i, " of '", spec.op,
                "' has no gradient: it is ", y);
    followed.push_back(y);
    if (!given) {
      TS_CHECK(y.numel() == 1, kWhere, "'grad_output' is missing, and y is ", y,
               ", not one element");
      gradients.emplace_back();
      continue;
    }
    const Tensor dy = tensor_named(spec.grad_output[i]);
    TS_CHECK_SHAPE(dy.shape() == y.shape(), kWhere,
                   "'grad_output' must have the shape of the output ", y, "; got ", dy);
    gradients.push_back(dy.to(y.dtype()));
  }
  TS_CHECK(!followed.empty(), kWhere,
           "'grad_output' names no tensor, and 'grad_of' asks for gradients");
  const TensorList results = grad(followed, wanted, gradients, {.allow_unused = true});
  for (size_t i = 0; i < wanted.size(); ++i) {
    outputs["grad." + spec.grad_of[i]] = results[i].defined()
                                             ? results[i].detach()
                                             : raw::zeros(wanted[i].shape(), wanted[i].dtype());
  }
  return outputs;
}

// "cpu", or the GPU that `cuda` stands for in this program.
std::string describe(const Device& device) {
  if (device.is_cpu()) return "cpu";
  const bool emulated = gpu::backend_kind() == gpu::BackendKind::kEmulated;
  return (emulated ? "emulated on the CPU: " : "") + gpu::describe_device(device.index);
}

// Becomes op_runner_emulated, where this program has no GPU and that one was built.
void continue_emulated(char** arguments) {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string other = self.parent_path() / "op_runner_emulated";
  TS_CHECK_DEVICE(std::filesystem::exists(other), kWhere, "'device' is cuda, and ",
                  gpu::unavailable_reason(), "; the emulation was not built either: '", other,
                  "' is missing (it needs Boost.Context, g++ and a build without TSan)");
  execv(other.c_str(), arguments);
  TS_THROW(IoError, kWhere, "cannot start '", other, "': ", std::strerror(errno));
}

constexpr const char* kUsage =
    "usage: op_runner --list\n"
    "       op_runner --spec S.json --inputs IN.safetensors --outputs OUT.safetensors\n";

}  // namespace

int main(int count, char** arguments) {
  std::map<std::string, std::string> options;
  for (int i = 1; i < count; ++i) {
    std::string name = arguments[i];
    if (name == "--list") {
      for (const OpRow& row : op_rows())
        std::printf("%.*s\n", static_cast<int>(row.name.size()), row.name.data());
      std::printf("%s\n", kFp8Linear.name.data());
      return 0;
    }
    if (name == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    const bool known = name == "--spec" || name == "--inputs" || name == "--outputs";
    if (!known || i + 1 == count) {
      std::fprintf(stderr, "op_runner: %s '%s'\n%s",
                   known ? "a value is missing after" : "unknown option", name.c_str(), kUsage);
      return 2;
    }
    options[name] = arguments[++i];
  }
  if (!options.contains("--spec") || !options.contains("--outputs")) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  std::map<std::string, Tensor> outputs;
  std::string device;
  try {
    const Spec spec = parse_spec(options["--spec"]);
    if (spec.device.is_cuda() && gpu::device_count() == 0) continue_emulated(arguments);
    device = describe(spec.device);
    if (gpu::backend_kind() == gpu::BackendKind::kEmulated) {
      std::fprintf(stderr, "op_runner: device %s\n", device.c_str());
    }
    std::optional<SafeTensorsFile> file;
    if (options.contains("--inputs")) file.emplace(options["--inputs"]);
    for (auto& [name, tensor] : run(spec, file ? &*file : nullptr)) {
      outputs[name] = tensor.to(kCpu);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  try {
    save_safetensors(options["--outputs"], outputs, {{"device", device}});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
