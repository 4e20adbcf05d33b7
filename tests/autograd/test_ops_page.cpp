// docs/from-pytorch.md: made of the table of ops, of the headers and of torch's names. The page
// that is committed is the one that is made; after a change
//     TESSERA_WRITE_GOLDEN=1 tests --file=test_ops_page
// writes it anew. What it tells a user to write is compiled here and held against torch's values.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numbers>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <tessera.h>

#include "autograd/op_samples.h"
#include "golden_files.h"
#include "source_dir.h"

namespace tessera::test_ops_page {
namespace {

using Names = std::set<std::string>;
using Counterparts = std::map<std::string, std::string>;

// ---- What to write instead ----------------------------------------------------------------------

struct Objects {
  Tensor x = {}, y = {}, z = {}, w = {}, a = {}, b = {}, n = {}, mask = {};
  TensorList parameters = {};
  std::map<std::string, Tensor> tensors = {};
  void* memory = nullptr;
  bool is_training = true;
  std::function<Tensor(const Tensor&)> hook = {};
  std::function<void(const Tensor&)> after = {};
  Accelerator* accelerator = nullptr;
  nn::Sequential* model = nullptr;
  optim::SGD* optimizer = nullptr;
  distributed::Group* ranks = nullptr;
};

// What a form gives: tensors, or one value.
struct Given {
  TensorList tensors;
  nlohmann::json value;
};
template <class T>
Given given(const T& result) {
  if constexpr (std::is_same_v<T, DType>) {
    return {{}, torch_name_of(result)};
  } else if constexpr (std::is_arithmetic_v<T>) {
    return {{}, result};
  } else if constexpr (std::is_convertible_v<T, Tensor>) {
    return {{result}, {}};
  } else if constexpr (std::is_convertible_v<T, TensorList>) {
    return {result, {}};
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return {{tensor(result, kF64)}, {}};
  } else if constexpr (std::is_same_v<T, std::pair<Tensor, Tensor>>) {
    return {{result.first, result.second}, {}};
  } else if constexpr (std::is_pointer_v<T>) {
    return {{}, *result};
  } else if constexpr (std::is_same_v<T, linalg::SignLogDet>) {
    return {{result.sign, result.logabsdet}, {}};
  } else if constexpr (std::is_same_v<T, linalg::Svd>) {
    return {{result.s, matmul(result.u * result.s.unsqueeze(-2), result.vh)}, {}};
  } else {
    return {};  // a test of its own looks at it
  }
}

using Forms = std::map<std::string, std::function<Given(const Objects&)>>;
#define HERE(name, ...)                                                                    \
  {#name, [](const Objects& objects) {                                                     \
     [[maybe_unused]] const auto& [x, y, z, w, a, b, n, mask, parameters, tensors, memory, \
                                   is_training, hook, after, to_accelerator, to_model,     \
                                   to_optimizer, to_ranks] = objects;                      \
     [[maybe_unused]] Accelerator& accelerator = *to_accelerator;                          \
     [[maybe_unused]] nn::Sequential& model = *to_model;                                   \
     [[maybe_unused]] optim::SGD& optimizer = *to_optimizer;                               \
     [[maybe_unused]] distributed::Group& ranks = *to_ranks;                               \
     return given_by([&] { return (__VA_ARGS__); });                                       \
   }},
template <class Call>
Given given_by(const Call& call) {
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    return {};
  } else {
    return given(call());
  }
}
const Forms& forms() {
  static const Forms all = {
#define FUNCTIONS
#define MODULES
#include "golden/torch_counterparts.inc"
#undef FUNCTIONS
#undef MODULES
  };
  return all;
}
#undef HERE
#define SCHEDULES
#define HERE(name, ...) static_assert(sizeof(__VA_ARGS__) > 0);
#include "golden/torch_counterparts.inc"
#undef SCHEDULES
#undef HERE

#define HERE(name, ...) {#name, #__VA_ARGS__},
const Counterparts& functions_here() {
  static const Counterparts table = {
#define FUNCTIONS
#include "golden/torch_counterparts.inc"
#undef FUNCTIONS
  };
  return table;
}
const Counterparts& modules_here() {
  static const Counterparts table = {
#define MODULES
#include "golden/torch_counterparts.inc"
#undef MODULES
  };
  return table;
}
const Counterparts& schedules_here() {
  static const Counterparts table = {
#define SCHEDULES
#include "golden/torch_counterparts.inc"
#undef SCHEDULES
  };
  return table;
}
#undef HERE

// ---- What there is ------------------------------------------------------------------------------

std::string text_of(const std::string& path) {
  std::ifstream file(std::string(tests::source_dir()) + "/" + path);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}
Names matches(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern, std::regex::ECMAScript | std::regex::multiline);
  Names names;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    names.insert((*match)[1]);
  }
  return names;
}
Names classes_of(const std::string& folder) {
  Names names;
  const std::filesystem::path root = tests::source_dir();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
    const std::string room = entry.path().parent_path().filename();  // which has names of its own
    if (entry.path().extension() != ".h" || room == "models" || room == "lora") continue;
    const std::string text = text_of(std::filesystem::relative(entry.path(), root).string());
    names.merge(matches(text, "^(?:class|struct) (\\w+) (?:final )?[:{]"));
  }
  return names;
}

// Functions of torch's names: those of the table of ops and of its headers.
Names functions() {
  Names names = matches(text_of("autograd/ops.h"),
                        "^(?:\\[\\[nodiscard\\]\\] )?(?:const )?[A-Z]\\w+&? (\\w+)\\(");
  for (const tests::OpRow& row : tests::op_rows()) names.insert(std::string(row.name));
  return names;
}
Names methods() {
  const std::string text = text_of("core/tensor/tensor.h");
  const size_t begin = text.find("\nclass Tensor {"), end = text.find("// ---- Indexing");
  EXPECT_TRUE(begin < end && end != std::string::npos);
  return matches(text.substr(begin, end - begin),
                 "^ .*?[&\\w>] (?!bool\\()(\\w+)\\(.*\\) const\\b");
}

// ---- The page -----------------------------------------------------------------------------------

class Page {
 public:
  void line(const std::string& text = "") { out_ << text << '\n'; }
  // "`a`, `b`" in lines of a page's width; nothing where there is none.
  void list(const std::string& lead, const Names& names) {
    if (names.empty()) return;
    std::string current = lead;
    for (const std::string& name : names) {
      const std::string next = " `" + name + "`" + (name == *names.rbegin() ? "." : ",");
      if (current.size() + next.size() > 118) {
        line(current);
        current = next.substr(1);
      } else {
        current += next;
      }
    }
    line(current);
    line();
  }
  void table(const std::string& title, const Counterparts& rows) {
    if (rows.empty()) return;
    line("| " + title + " | here |");
    line("|---|---|");
    for (const auto& [name, here] : rows) line("| `" + name + "` | `" + escaped(here) + "` |");
    line();
  }
  std::string text() const {
    std::string text = out_.str();
    while (text.ends_with("\n\n")) text.pop_back();
    return text;
  }

 private:
  static std::string escaped(const std::string& text) {  // a bar ends a cell
    return std::regex_replace(text, std::regex("\\|"), "\\|");
  }
  std::ostringstream out_;
};

struct Sorted {
  Names same, in_place, copied, none;
  Counterparts other;
};
Sorted sorted(const Names& torch, const Names& here, const Names& methods,
              const Counterparts& counterparts) {
  Sorted result;
  for (const std::string& name : torch) {
    const bool writes = name.ends_with('_');
    const std::string base = name.substr(0, name.size() - 1);
    if (here.contains(name)) {
      result.same.insert(name);
    } else if (counterparts.contains(name)) {
      result.other[name] = counterparts.at(name);
    } else if (methods.contains(name)) {
      (writes ? result.in_place : result.same).insert(name);
    } else if (writes && (here.contains(base) || counterparts.contains(base))) {
      result.copied.insert(name);
    } else {
      result.none.insert(name);
    }
  }
  return result;
}

std::string make_page() {
  const nlohmann::json torch = tests::golden_json("torch_names.json");
  const auto names = [&](const char* key) {
    const auto list = torch.at(key).get<std::vector<std::string>>();
    return Names(list.begin(), list.end());
  };
  const Names all_methods = methods(), all_functions = functions();
  Page page;
  page.line("# From PyTorch");
  page.line();
  page.line("Every documented name of torch " + torch.at("version").get<std::string>() +
            " in these namespaces, and what to write here: made by "
            "`tests/autograd/test_ops_page.cpp` from the");
  page.line(
      "table of ops, the headers and torch's own lists. The forms in the tables give torch's "
      "values: the same test runs each.");
  page.line();
  page.line(text_of("tests/golden/from_pytorch.md"));

  const auto section = [&](const std::string& title, const std::string& same, const Sorted& found,
                           const std::string& prefix) {
    page.line("## " + title);
    page.line();
    page.list(same, found.same);
    page.list("Methods here, as `x.abs_()`:", found.in_place);
    page.list("Not in place, so `x.copy_(...)` of the form without the underscore:", found.copied);
    page.table(prefix, found.other);
    page.list("Not there:", found.none);
  };
  section("torch", "Functions of the same name in namespace `tessera`:",
          sorted(names("torch"), all_functions, all_methods, functions_here()), "torch.");
  section("torch.nn.functional", "Functions of the same name in namespace `tessera`:",
          sorted(names("torch.nn.functional"), all_functions, all_methods, functions_here()),
          "torch.nn.functional.");
  section("torch.Tensor", "Methods of the same name:",
          sorted(names("torch.Tensor"), all_methods, all_methods, functions_here()), "x.");
  Names linalg;
  for (const tests::OpRow& row : tests::op_rows()) {
    if (row.name.starts_with("linalg_")) linalg.insert(std::string(row.name.substr(7)));
  }
  page.line("## torch.linalg");
  page.line();
  page.list("Functions of the same name in namespace `tessera::linalg`:", linalg);
  section("torch.nn", "Modules of the same name in namespace `tessera::nn`:",
          sorted(names("torch.nn"), classes_of("nn"), {}, modules_here()), "torch.nn.");
  section("torch.optim", "Optimizers of the same name in namespace `tessera::optim`:",
          sorted(names("torch.optim"), classes_of("optim"), {}, {}), "torch.optim.");
  section("torch.optim.lr_scheduler", "",
          sorted(names("torch.optim.lr_scheduler"), {}, {}, schedules_here()),
          "torch.optim.lr_scheduler.");
  return page.text();
}

TEST(PageFromPyTorch, IsWhatTheRegistriesGive) {
  const std::string path = std::string(tests::source_dir()) + "/docs/from-pytorch.md";
  const std::string made = make_page();
  if (std::getenv("TESSERA_WRITE_GOLDEN") != nullptr) {
    std::ofstream(path) << made;
    return;
  }
  EXPECT_EQ(text_of("docs/from-pytorch.md"), made) << "TESSERA_WRITE_GOLDEN=1 writes the page anew";
}

TEST(PageFromPyTorch, ReadsTheHeaders) {
  EXPECT_TRUE(methods().contains("sin") && methods().contains("view") &&
              methods().contains("item"));
  EXPECT_TRUE(methods().contains("index_put_") && !methods().contains("TS_CHECK"));
  EXPECT_TRUE(functions().contains("zeros") && functions().contains("max_pool2d_with_indices"));
  EXPECT_TRUE(classes_of("nn").contains("Conv2d") && classes_of("nn").contains("LSTM") &&
              classes_of("optim").contains("AdamW"));
}

// What is there under torch's name needs no other form.
TEST(PageFromPyTorch, NoFormStandsForWhatIsThere) {
  for (const auto& [name, form] : functions_here()) {
    EXPECT_FALSE(functions().contains(name)) << name;
  }
  for (const auto& [name, form] : modules_here()) {
    EXPECT_FALSE(classes_of("nn").contains(name)) << name;
  }
}

// ---- What the forms give ------------------------------------------------------------------------

// What is drawn, what is written to files, hooks and what takes a model: the tests after this one.
const Names kLookedAtAlone = {
    "DataParallel",  "Dropout1d", "Dropout2d",       "Dropout3d",
    "SyncBatchNorm", "bernoulli", "clip_grad_norm_", "from_numpy",
    "frombuffer",    "load",      "normal",          "numpy",
    "randint_like",  "random_",   "register_hook",   "register_post_accumulate_grad_hook",
    "save"};

std::string complaint(const Tensor& got, const Tensor& reference, double scale, bool signs) {
  if (got.shape() != reference.shape()) return "has the shape of " + got.describe();
  const std::vector<double> values = got.to_vector(), expected = reference.to_vector();
  for (size_t i = 0; i < values.size(); ++i) {
    const double a = values[i], b = expected[i];
    const double bound = 8 * epsilon_of(kF32) * (std::abs(b) + scale) + 0x1p-126;
    const bool same = std::isfinite(a) && std::isfinite(b) ? std::abs(a - b) <= bound
                                                           : a == b || (a != a && b != b);
    if (!same || (signs && std::signbit(a) != std::signbit(b))) {
      return detail::concatenate("gives ", a, " at ", i, ", torch ", b);
    }
  }
  return "";
}

TEST(FormsFromPyTorch, GiveWhatTorchGives) {
  const SafeTensorsFile file(tests::golden_path("counterparts.safetensors"));
  Names tried = kLookedAtAlone;
  std::map<std::string, int> counts;
  for (const nlohmann::json& golden : tests::golden_json("counterparts.json")) {
    const std::string name = golden["name"];
    const std::string stored = name + "." + std::to_string(counts[name]++) + "/";
    SCOPED_TRACE(stored + golden["inputs"].dump());
    tried.insert(name);
    Objects objects;
    const std::map<std::string, Tensor*> inputs = {
        {"x", &objects.x}, {"y", &objects.y}, {"z", &objects.z}, {"w", &objects.w},
        {"a", &objects.a}, {"b", &objects.b}, {"n", &objects.n}, {"mask", &objects.mask}};
    for (const auto& [input, key] : golden["inputs"].items()) {
      *inputs.at(input) = file.load(key.get<std::string>());
    }
    if (!forms().contains(name)) {
      ADD_FAILURE() << "there is no such form";
      continue;
    }
    Given got;
    try {
      got = forms().at(name)(objects);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      continue;
    }
    if (golden.value("writes", false)) got.tensors = {objects.x};
    const nlohmann::json dtypes = golden.value("outputs", nlohmann::json::array());
    EXPECT_EQ(got.value, golden.value("value", nlohmann::json()));
    EXPECT_EQ(got.tensors.size(), dtypes.size());
    for (size_t i = 0; i < std::min(got.tensors.size(), dtypes.size()); ++i) {
      EXPECT_EQ(torch_name_of(got.tensors[i].dtype()), dtypes[i]) << i;
      EXPECT_EQ(complaint(got.tensors[i], file.load(stored + std::to_string(i)),
                          golden.value("scale", 0.0), golden.value("signs", false)),
                "");
    }
  }
  for (const auto& [name, form] : forms()) {
    EXPECT_TRUE(tried.contains(name)) << name << " has no case in counterpart_cases.py";
  }
}

Tensor given_tensor(const std::string& name, const Objects& objects) {
  return forms().at(name)(objects).tensors.at(0);
}

TEST(FormsFromPyTorch, DrawWhatTorchDraws) {
  manual_seed(81);
  const auto expect_digits = [](const Tensor& drawn, DType dtype) {
    EXPECT_EQ(drawn.dtype(), dtype);
    EXPECT_EQ(drawn.shape(), Shape({2000}));
    EXPECT_EQ(drawn.min().item<double>(), 0);
    EXPECT_EQ(drawn.max().item<double>(), 9);
    EXPECT_TRUE(bool((drawn == drawn.to(kI64)).all()));
  };
  expect_digits(given_tensor("randint_like", {.x = zeros({2000})}), kF32);
  const Objects written = {.x = zeros({2000})};
  forms().at("random_")(written);
  expect_digits(written.x, kF32);

  const Tensor hits = given_tensor("bernoulli", {.x = full({4000}, 0.25)});
  EXPECT_TRUE(bool(((hits == 0) | (hits == 1)).all()));
  EXPECT_NEAR(hits.mean().item<double>(), 0.25, 4 * std::sqrt(0.25 * 0.75 / 4000));
  EXPECT_EQ(given_tensor("bernoulli", {.x = zeros({100})}).sum().item<double>(), 0);
  EXPECT_EQ(given_tensor("bernoulli", {.x = ones({100})}).sum().item<double>(), 100);

  TensorList drawn;
  for (int i = 0; i < 500; ++i) drawn.push_back(given_tensor("normal", {}));
  EXPECT_EQ(drawn[0].shape(), Shape({2, 3}));
  EXPECT_NEAR(stack(drawn).mean().item<double>(), 0, 4 / std::sqrt(3000));
  EXPECT_NEAR(stack(drawn).std().item<double>(), 1, 4 / std::sqrt(6000));
}

TEST(FormsFromPyTorch, DropWholeChannels) {
  manual_seed(82);
  const std::map<std::string, Shape> inputs = {
      {"Dropout1d", {40, 50, 3}}, {"Dropout2d", {40, 50, 2, 3}}, {"Dropout3d", {40, 50, 2, 2, 2}}};
  for (const auto& [name, shape] : inputs) {
    SCOPED_TRACE(name);
    const Tensor channels = given_tensor(name, {.x = ones(shape)}).reshape({2000, -1});
    EXPECT_TRUE(bool((channels.amax({1}) == channels.amin({1})).all()));
    EXPECT_TRUE(bool(((channels == 0) | (channels == 2)).all()));
    EXPECT_NEAR(channels.mean().item<double>(), 1, 4 / std::sqrt(2000));
    EXPECT_TRUE(bool((given_tensor(name, {.x = ones(shape), .is_training = false}) == 1).all()));
  }
}

TEST(FormsFromPyTorch, ReadAndWriteMemoryAndFiles) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  for (const char* name : {"from_numpy", "frombuffer"}) {
    const Tensor shared = given_tensor(name, {.memory = values.data()});
    EXPECT_EQ(shared.to_vector(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(shared.data_as<float>(), values.data());
  }
  EXPECT_EQ(forms().at("numpy")({.x = tensor(values)}).value, 1.0);

  const std::filesystem::path before = std::filesystem::current_path();
  const std::filesystem::path folder = testing::TempDir() + "forms_from_pytorch";
  std::filesystem::create_directories(folder);
  std::filesystem::current_path(folder);
  forms().at("save")({.tensors = {{"a", tensor(values)}}});
  forms().at("load")({});
  EXPECT_EQ(SafeTensorsFile("model.safetensors").load("a").to_vector(), tensor(values).to_vector());
  std::filesystem::current_path(before);
  std::filesystem::remove_all(folder);
}

TEST(FormsFromPyTorch, HookAndClipGradients) {
  const Tensor x = tensor({3, 4}).set_requires_grad();
  int calls = 0;
  const Objects objects = {.x = x,
                           .parameters = {x},
                           .hook = [](const Tensor& gradient) { return 2 * gradient; },
                           .after = [&](const Tensor& leaf) { calls += leaf.grad().defined(); }};
  forms().at("register_hook")(objects);
  forms().at("register_post_accumulate_grad_hook")(objects);
  (x * x).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{12, 16}));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(given_tensor("clip_grad_norm_", objects).item<double>(), 20);
  EXPECT_NEAR(x.grad().norm().item<double>(), 1, 1e-6);
}

TEST(FormsFromPyTorch, MakeModelsParallel) {
  Accelerator accelerator(AcceleratorOptions{.cpu = true});
  nn::Sequential model(nn::layer<nn::Linear>(2, 3), nn::layer<nn::BatchNorm1d>(3));
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  const Objects objects = {.accelerator = &accelerator,
                           .model = &model,
                           .optimizer = &optimizer,
                           .ranks = &distributed::mesh().group("dp")};
  forms().at("SyncBatchNorm")(objects);
  forms().at("DataParallel")(objects);
  const Tensor before = model.parameters()[0].clone();
  accelerator.backward(model(tensor({1, 2, 3, 5, 8, 13}, {3, 2})).square().sum());
  optimizer.step();
  EXPECT_FALSE(allclose(model.parameters()[0], before));
}

}  // namespace
}  // namespace tessera::test_ops_page
