// docs/from-pytorch.md: made of the table of ops, of the headers and of torch's names. The page
// that is committed is the one that is made; after a change
//     TESSERA_WRITE_GOLDEN=1 tests --file=test_ops_page
// writes it anew. What it tells a user to write is compiled here.
#include <algorithm>
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

// ---- What to write instead, compiled and never run ----------------------------------------------

struct Objects {
  Tensor x, y, z, w, a, b, n, mask;
  TensorList parameters;
  std::map<std::string, Tensor> tensors;
  void* memory = nullptr;
  bool is_training = true;
  std::function<Tensor(const Tensor&)> hook;
  std::function<void(const Tensor&)> after;
};

[[maybe_unused]] void compile_functions(const Objects& objects) {
  const auto& [x, y, z, w, a, b, n, mask, parameters, tensors, memory, is_training, hook, after] =
      objects;
  using std::pair;
#define FUNCTIONS
#define HERE(name, ...) (void)(__VA_ARGS__);
#include "golden/torch_counterparts.inc"
#undef FUNCTIONS
#undef HERE
}
[[maybe_unused]] void compile_modules(const Objects& objects, Accelerator& accelerator,
                                      nn::Sequential& model, optim::SGD& optimizer,
                                      distributed::Group& ranks) {
  const auto& [x, y, z, w, a, b, n, mask, parameters, tensors, memory, is_training, hook, after] =
      objects;
#define MODULES
#define HERE(name, ...) (void)(__VA_ARGS__);
#include "golden/torch_counterparts.inc"
#undef MODULES
#undef HERE
}
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
  page.line("table of ops, the headers and torch's own lists. The forms in the tables compile.");
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

}  // namespace
}  // namespace tessera::test_ops_page
