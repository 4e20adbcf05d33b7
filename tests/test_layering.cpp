// The floors of the library: reads every include of the tree and fails on an edge that runs up, and
// on units or folders that include each other in a circle; and sizes of folders and files. And tests that start ranks: they end by comparing
// what these called.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "source_dir.h"

namespace tessera::test_layering {
namespace {

namespace fs = std::filesystem;

using Floors = std::map<std::string, std::set<std::string>>;

// Which floors a floor sees beside itself.
const Floors kSees = {
    {"core", {}},
    {"autograd", {"core"}},
    {"nn", {"core", "autograd"}},
    {"optim", {"core", "autograd"}},
    {"precision", {"core", "autograd", "nn"}},
    {"distributed", {"core", "autograd", "nn", "optim", "precision"}},
    {"data", {"core"}},
    {"accelerate", {"core", "autograd", "nn", "optim", "precision", "distributed", "data"}},
};

bool is_source(const fs::path& file) {
  static const std::set<std::string> kExtensions = {".h", ".cpp", ".cu", ".cuh", ".inc"};
  return kExtensions.count(file.extension()) != 0;
}

// What an include directive names, with its opening mark: `<tessera/core/tensor/tensor.h`, `"x.h`;
// empty for other lines.
std::string included(const std::string& line) {
  size_t at = line.find_first_not_of(" \t");
  if (at == std::string::npos || line[at] != '#') return "";
  at = line.find_first_not_of(" \t", at + 1);
  if (at == std::string::npos || line.compare(at, 7, "include") != 0) return "";
  const size_t begin = line.find_first_of("<\"", at + 7);
  if (begin == std::string::npos) return "";
  const size_t end = line.find_first_of(">\"", begin + 1);
  return line.substr(begin, end == std::string::npos ? end : end - begin);
}

// One line for each include that breaks the rules: "nn/linear.h:12: ...".
std::vector<std::string> layering_errors(const fs::path& root) {
  std::vector<std::string> errors;
  for (const auto& [floor, sees] : kSees) {
    if (!fs::is_directory(root / floor)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      std::ifstream in(entry.path());
      std::string line;
      for (int number = 1; std::getline(in, line); ++number) {
        const std::string target = included(line);
        if (target.empty()) continue;
        const auto report = [&](const std::string& problem) {
          errors.push_back(fs::relative(entry.path(), root).string() + ":" +
                           std::to_string(number) + ": " + problem);
        };
        if (target[0] == '"') {
          report("includes \"" + target.substr(1) + "\"; write <tessera/FLOOR/file.h>");
        } else if (target == "<tessera.h") {
          report("includes the umbrella header, which sees every floor");
        } else if (target.rfind("<tessera/", 0) == 0) {
          const size_t slash = target.find('/', 9);
          const std::string seen =
              slash == std::string::npos ? target.substr(9) : target.substr(9, slash - 9);
          if (kSees.count(seen) == 0) {
            report("includes " + target.substr(1) + "; there is no floor " + seen);
          } else if (seen != floor && sees.count(seen) == 0) {
            report("includes " + target.substr(1) + "; " + floor + " does not see " + seen);
          } else if (!fs::exists(root / target.substr(9))) {
            report("includes " + target.substr(1) + ", which does not exist");
          }
        }
      }
    }
  }
  return errors;
}

// [Note: units] A unit is a header with the sources and the private headers that bear its name:
// accelerator.h, accelerator_step.cpp and accelerator_state.h are one, and so are attention.h,
// attention_cpu.cpp and attention_tiles.cuh. A file without a header of its name stands alone.
// Among the files of one folder: the shortest beginning, up to a `_`, that is a header's name.
std::string unit_of(const fs::path& root, const fs::path& file) {
  const std::string stem = file.stem().string();
  const auto unit = [&](const std::string& name) {
    return fs::relative(file.parent_path() / name, root).string();
  };
  for (size_t at = stem.find('_'); at != std::string::npos; at = stem.find('_', at + 1)) {
    const std::string name = stem.substr(0, at);
    if (fs::exists(file.parent_path() / (name + ".h"))) return unit(name);
  }
  return unit(stem);
}

// Of each unit the units that it includes, with the file that does.
using Units = std::map<std::string, std::map<std::string, std::string>>;
Units includes_of_units(const fs::path& root) {
  Units units;
  for (const auto& [floor, sees] : kSees) {
    if (!fs::is_directory(root / floor)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      const std::string unit = unit_of(root, entry.path());
      std::ifstream in(entry.path());
      std::string line;
      while (std::getline(in, line)) {
        const std::string target = included(line);
        if (target.rfind("<tessera/", 0) != 0) continue;
        const std::string other = unit_of(root, root / target.substr(9));
        if (other != unit) units[unit][other] = fs::relative(entry.path(), root).string();
      }
    }
  }
  return units;
}

// A line for each way round: "a/x.cpp includes a/y, a/y.cpp includes a/x".
std::vector<std::string> cycle_errors(const fs::path& root) {
  const Units units = includes_of_units(root);
  std::vector<std::string> errors;
  std::set<std::string> finished;
  std::vector<std::string> way;
  const std::function<void(const std::string&)> visit = [&](const std::string& unit) {
    if (finished.count(unit) != 0) return;
    const auto begin = std::find(way.begin(), way.end(), unit);
    if (begin != way.end()) {
      std::string text;
      for (auto at = begin; at != way.end(); ++at) {
        const std::string& next = at + 1 == way.end() ? unit : *(at + 1);
        text += (text.empty() ? "" : ", ") + units.at(*at).at(next) + " includes " + next;
      }
      errors.push_back(text);
      return;
    }
    way.push_back(unit);
    if (const auto found = units.find(unit); found != units.end()) {
      for (const auto& [other, file] : found->second) visit(other);
    }
    way.pop_back();
    finished.insert(unit);
  };
  for (const auto& [unit, others] : units) visit(unit);
  return errors;
}

// Of each folder of the library those that it includes from, with an include that does.
std::map<std::string, std::map<std::string, std::string>> includes_of_folders(
    const fs::path& root) {
  std::map<std::string, std::map<std::string, std::string>> folders;
  for (const auto& [floor, sees] : kSees) {
    if (!fs::is_directory(root / floor)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      const fs::path file = fs::relative(entry.path(), root);
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) {
        const std::string target = included(line);
        if (target.rfind("<tessera/", 0) != 0) continue;
        const fs::path other = target.substr(9);
        if (other.parent_path() == file.parent_path()) continue;
        folders[file.parent_path().string()].try_emplace(
            other.parent_path().string(), file.string() + " includes " + other.string());
      }
    }
  }
  return folders;
}

// A line for each pair of neighbours on a way from a folder back to itself.
std::vector<std::string> folder_circle_errors(const fs::path& root) {
  const auto folders = includes_of_folders(root);
  std::map<std::string, std::set<std::string>> below;  // on any way
  for (const auto& [folder, others] : folders) {
    std::set<std::string>& seen = below[folder];
    const std::function<void(const std::string&)> visit = [&](const std::string& from) {
      const auto found = folders.find(from);
      if (found == folders.end()) return;
      for (const auto& [other, include] : found->second) {
        if (seen.insert(other).second) visit(other);
      }
    };
    visit(folder);
  }
  std::vector<std::string> errors;
  for (const auto& [folder, others] : folders) {
    for (const auto& [other, include] : others) {
      if (below[other].count(folder) != 0)
        errors.push_back(include + ", and " + other + " needs " + folder);
    }
  }
  return errors;
}

constexpr size_t kMostFiles = 40, kMostLines = 900;

// Folders of the library and files of the tree that outgrew what a reader can overlook. Kernels and
// tests stand by family and by floor.
std::vector<std::string> size_errors(const fs::path& root) {
  static const std::set<std::string> kTops = {"tests", "bench", "examples"};
  std::vector<std::string> errors;
  std::map<std::string, size_t> files;
  const auto read = [&](const std::string& top, bool counts) {
    if (!fs::is_directory(root / top)) return;
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      const fs::path file = fs::relative(entry.path(), root);
      if (counts && ++files[file.parent_path().string()] == kMostFiles + 1) {
        errors.push_back(file.parent_path().string() + ": more than " + std::to_string(kMostFiles) +
                         " files");
      }
      std::ifstream in(entry.path());
      size_t lines = 0;
      for (std::string line; std::getline(in, line);) ++lines;
      if (lines > kMostLines) {
        errors.push_back(file.string() + ": " + std::to_string(lines) + " lines");
      }
    }
  };
  for (const auto& [floor, sees] : kSees) read(floor, true);
  for (const std::string& top : kTops) read(top, false);
  return errors;
}

// Headers that <tessera.h> leaves out: what a training program has no use for, by path or folder.
const std::map<std::string, const char*> kNotUmbrella = {
    {"accelerate/accelerator_state.h", "inside of the Accelerator"},
    {"accelerate/big_model/transformers_tree.h", "the tessera command"},
    {"accelerate/cli/", "the tessera command"},
    {"accelerate/parallelize.h", "inside of the Accelerator"},
    {"accelerate/launch/", "the launcher and its agents"},
    {"accelerate/loaders/", "how batches travel; loader_plan.h is in it"},
    {"accelerate/settings/yaml_import.h", "the tessera command"},
    {"accelerate/model_materialisation.h", "inside of the Accelerator"},
    {"accelerate/settings/deepspeed_config.h", "the tessera command; deepspeed.h is in it"},
    {"accelerate/settings/deepspeed_keys.h", "inside of settings"},
    {"accelerate/settings/edit_distance.h", "inside of settings"},
    {"accelerate/settings/fsdp_words.h", "inside of settings"},
    {"accelerate/settings/megatron_keys.h", "inside of settings"},
    {"accelerate/settings/import_report.h", "the tessera command"},
    {"accelerate/settings/letter_case.h", "inside of settings"},
    {"accelerate/settings/schema/", "inside of settings"},
    {"accelerate/state/saved_state.h", "inside of state_io.h and model_io.h"},
    {"accelerate/step/", "inside of the Accelerator"},
    {"accelerate/tracking/append_file.h", "inside of trackers"},
    {"accelerate/tracking/fp8_values.h", "inside of the Accelerator's log()"},
    {"autograd/anomaly.h", "inside of the engine; AnomalyMode is in autograd.h"},
    {"autograd/fp8/head.h", "inside of linear_cross_entropy(), which is in autograd/ops.h"},
    {"autograd/fp8/norm_call.h", "inside of ops"},
    {"autograd/fp8/operands.h", "inside of ops"},
    {"autograd/graph.h", "inside of the tape"},
    {"autograd/linear_rules.h", "inside of ops"},
    {"autograd/leaf_hooks.h", "inside of sharding"},
    {"autograd/meta_inputs.h", "inside of pipelines"},
    {"autograd/differentiable_node.h", "inside of differentiable()"},
    {"autograd/ops/", "inside of ops"},
    {"autograd/saved_tensor.h", "inside of nodes"},
    {"core/approximate.h", "formulas of kernels"},
    {"core/asan.h", "inside of allocators"},
    {"core/cpu_quota.h", "inside of parallel.h and of the launcher"},
    {"core/memory/block_arena.h", "inside of allocators"},
    {"core/gpu/transfers.h", "inside of pinned.h and of ranges on a GPU"},
    {"core/io/crc32c.h", "of file formats"},
    {"core/isa.h", "inside of kernels"},
    {"core/cuda/", "the GPU backend; devices are in device.h"},
    {"core/environment.h", "inside of the library"},
    {"core/functors.h", "formulas of kernels"},
    {"core/block_signals.h", "inside of products and of loops' workers"},
    {"core/kernels/", "kernels; ops are in autograd/ops.h"},
    {"core/memory/meta_memory.h", "inside of plans; accelerate/plan/training_plan.h is in it"},
    {"core/tensor/element_guard.h", "inside of tensors"},
    {"core/tensor/meta_storage.h", "inside of meta tensors; initial_values.h fills it"},
    {"core/memory/return_pages.h", "inside of allocators"},
    {"core/state/pickle_reader.h", "inside of torch_file.h"},
    {"core/regex.h", "inside of the library"},
    {"core/thread.h", "inside of the library"},
    {"core/tensor/placement.h", "inside of tensors; dtensor.h implements it"},
    {"core/tensor/unreadable_storage.h", "inside of tensors"},
    {"core/tensor/whole_exchange.h", "inside of optimizers"},
    {"core/io/bounded_json.h", "inside of readers"},
    {"core/io/zip_reader.h", "inside of torch_file.h"},
    {"data/chat_template/", "inside of pretrained_tokenizer.h, which includes chat_template.h"},
    {"data/text/bpe_merges.h", "inside of tokenizers"},
    {"data/text/sentencepiece.h", "files that an optional library reads"},
    {"data/text/sentencepiece_module.h", "inside of sentencepiece.cpp"},
    {"data/text/byte_chars.h", "inside of tokenizers"},
    {"data/text/gpt2_pattern.h", "inside of tokenizers"},
    {"data/text/json_error.h", "inside of readers"},
    {"data/text/special_tokens.h", "inside of tokenizers"},
    {"data/text/token_matcher.h", "inside of tokenizers"},
    {"data/text/unicode.h", "inside of tokenizers"},
    {"data/text/word_cache.h", "inside of tokenizers"},
    {"data/text/word_pieces.h", "inside of tokenizers"},
    {"data/tokenizer_json/", "inside of pretrained_tokenizer.h"},
    {"distributed/backward/", "inside of replicate() and fully_shard()"},
    {"distributed/checkpoint/checksum.h", "of the format"},
    {"distributed/checkpoint/parts.h", "inside of save_state() and load_state()"},
    {"distributed/data_parallel/", "inside of replicate()"},
    {"distributed/fully_shard/", "inside of fully_shard()"},
    {"distributed/mesh/divided_parameter.h", "inside of parallelize_module() and fully_shard()"},
    {"distributed/mesh/dtensor_inputs.h", "inside of DTensor, prepare() and load_model()"},
    {"distributed/mesh/matrix_exchange.h", "inside of DTensor, for optimizers of matrices"},
    {"distributed/mesh/redistribute.h", "inside of DTensor"},
    {"distributed/pipeline/staged_model_impl.h", "inside of staged_model.h"},
    {"distributed/tensor_parallel/", "inside of parallelize_module()"},
    {"distributed/rendezvous/", "how ranks meet; process_group.h and run_ranks.h are in it"},
    {"distributed/transport/", "backends; group.h and collectives.h are in it"},
    {"nn/call_scopes.h", "inside of fused ops"},
    {"nn/lora/lora_adapter.h", "inside of adapters"},
    {"nn/models/config_limits.h", "inside of models"},
    {"nn/models/config_reader.h", "inside of models"},
    {"nn/models/llama_rope.h", "inside of models"},
    {"nn/models/made_to_load.h", "inside of models"},
    {"nn/models/tied_head.h", "inside of models"},
    {"nn/structure.h", "inside of sharding"},
    {"nn/tied_values.h", "inside of modules and models"},
    {"optim/step_graph.h", "inside of graphed steps"},
};

// The headers below `header` that are not in `seen` yet.
void add_includes(const fs::path& root, const std::string& header, std::set<std::string>& seen) {
  if (!seen.insert(header).second) return;
  std::ifstream in(root / header);
  for (std::string line; std::getline(in, line);) {
    const std::string target = included(line);
    if (target.rfind("<tessera/", 0) == 0) add_includes(root, target.substr(9), seen);
  }
}

// Headers that <tessera.h> neither has nor leaves out with a reason, and reasons without a header.
std::vector<std::string> umbrella_errors(const fs::path& root) {
  std::set<std::string> seen, used;
  add_includes(root, "tessera.h", seen);
  std::vector<std::string> errors;
  for (const auto& [floor, ignored] : kSees) {
    for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
      const std::string name = fs::relative(entry.path(), root).string();
      if (entry.path().extension() != ".h" || seen.count(name) != 0) continue;
      const auto reason =
          std::find_if(kNotUmbrella.begin(), kNotUmbrella.end(), [&](const auto& r) {
            return r.first.back() == '/' ? name.rfind(r.first, 0) == 0 : name == r.first;
          });
      if (reason == kNotUmbrella.end()) {
        errors.push_back(name + ": include it in tessera.h, or say in kNotUmbrella why not");
      } else {
        used.insert(reason->first);
      }
    }
  }
  for (const auto& [path, ignored] : kNotUmbrella) {
    if (used.count(path) == 0) errors.push_back(path + ": in kNotUmbrella without a use");
  }
  return errors;
}

// They compare for the tests that include them, in on_ranks() or TearDown().
constexpr const char* kComparingFixtures[] = {"replicate_fixture.h", "sharded_fixture.h",
                                              "mpi_world.h"};
// Programs of several processes that have nothing to compare at their end.
const std::map<std::string, const char*> kUncompared = {
    {"test_mpi_backend.cpp", "works below groups, which keep the traces"},
    {"test_mpi_timeout.cpp", "breaks its group"},
};

// One line for each test that could forget the comparison: "tests/test_x.cpp:12: ...".
std::vector<std::string> comparison_errors(const fs::path& root) {
  std::vector<std::string> errors;
  for (const auto& entry : fs::recursive_directory_iterator(root / "tests")) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file() || !is_source(entry.path()) || name == "compared_ranks.h" ||
        name == "test_layering.cpp") {
      continue;
    }
    std::ifstream in(entry.path());
    std::string line;
    int processes = 0;  // the line that asks for them
    bool compares = kUncompared.count(name) != 0;
    const auto report = [&](int number, const std::string& problem) {
      errors.push_back(fs::relative(entry.path(), root).string() + ":" + std::to_string(number) +
                       ": " + problem);
    };
    for (int number = 1; std::getline(in, line); ++number) {
      if (line.rfind("// ctest ranks: ", 0) == 0) processes = number;
      compares |= line.find("check_equal_traces(") != std::string::npos;
      for (const char* fixture : kComparingFixtures) {
        compares |= line.find('/' + std::string(fixture) + '"') != std::string::npos;
      }
      const size_t at = line.find("run_ranks(");
      if (at == std::string::npos) continue;
      const char before = at == 0 ? ' ' : line[at - 1];
      if (std::isalnum(static_cast<unsigned char>(before)) != 0 || before == '_') continue;
      report(number,
             "calls run_ranks; compared_ranks and failing_ranks of compared_ranks.h look at "
             "the traces too");
    }
    if (processes > 0 && !compares) {
      report(processes, "runs as processes and never calls check_equal_traces");
    }
  }
  return errors;
}

// One line for each call of CUDA's runtime in the library that does not stand in core/cuda, where
// calls are checked, captured and forbidden in graphs.
std::vector<std::string> cuda_call_errors(const fs::path& root) {
  const std::regex call("\\b(cuda|cublas|cudnn|nvrtc)[A-Z]\\w*\\(");
  std::vector<std::string> errors;
  for (const auto& [floor, sees] : kSees) {
    if (!fs::is_directory(root / floor)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
      const std::string name = fs::relative(entry.path(), root).string();
      if (!entry.is_regular_file() || !is_source(entry.path()) ||
          name.rfind("core/cuda/", 0) == 0) {
        continue;
      }
      std::ifstream in(entry.path());
      std::string line;
      for (int number = 1; std::getline(in, line); ++number) {
        std::smatch found;
        if (line.find("//") < line.find("cuda") || !std::regex_search(line, found, call)) continue;
        errors.push_back(name + ":" + std::to_string(number) + ": " + found.str() +
                         "): only core/cuda calls the runtime");
      }
    }
  }
  return errors;
}

// What knows a locale, and threads that the library does not start its own way.
const std::map<std::string, std::string> kOtherWays = {
    {R"(std::[io]?(string|f)stream [a-z_]+[;({])", "PlainText<> of core/plain_text.h"},
    {R"(\bsn?printf\(.*%[-+ 0-9.*]*[aefgAEFG])", "plain_snprintf()"},
    {R"(std::(stod|stof|stold|strtod|strtof|atof)\()", "std::from_chars"},
    {R"(std::thread [a-z_]+[;({]|std::thread\(|std::(thread|jthread)>|std::async\()",
     "Thread of core/thread.h"},
};

std::vector<std::string> other_way_errors(const fs::path& root) {
  std::vector<std::string> errors;
  for (const auto& [pattern, instead] : kOtherWays) {
    const std::regex other(pattern);
    for (const auto& [floor, ignored] : kSees) {
      for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
        const std::string name = fs::relative(entry.path(), root).string();
        // The command is a process of its own, and a device of tests has its own threads.
        if (!is_source(entry.path()) || name.starts_with("accelerate/cli/") ||
            name.starts_with("core/cuda/emulation/") || name.starts_with("core/thread.") ||
            name.starts_with("core/plain_text.")) {
          continue;
        }
        std::ifstream in(entry.path());
        std::string line;
        for (int number = 1; std::getline(in, line); ++number) {
          const std::string code = line.substr(0, line.find("//"));
          if (code.find("PlainText<") != code.npos || code.find("plain_snprintf") != code.npos ||
              !std::regex_search(code, other)) {
            continue;
          }
          errors.push_back(name + ":" + std::to_string(number) + ": use " + instead);
        }
      }
    }
  }
  return errors;
}

TEST(Layering, NumbersAreTextWithoutALocaleAndThreadsAreStartedOneWay) {
  for (const std::string& error : other_way_errors(tests::source_dir())) ADD_FAILURE() << error;
}

TEST(Layering, OnlyTheGpuBackendCallsItsRuntime) {
  for (const std::string& error : cuda_call_errors(tests::source_dir())) ADD_FAILURE() << error;
}

TEST(Layering, EveryTestThatStartsRanksComparesTheirTraces) {
  for (const std::string& error : comparison_errors(tests::source_dir())) ADD_FAILURE() << error;
}

TEST(Layering, NoIncludeOfTheTreeRunsUp) {
  const fs::path root = tests::source_dir();
  ASSERT_TRUE(fs::exists(root / "core/tensor/tensor.h")) << root << " is not the source tree";
  for (const std::string& error : layering_errors(root)) ADD_FAILURE() << error;
}

TEST(Layering, NoUnitsIncludeEachOtherInACircle) {
  for (const std::string& error : cycle_errors(tests::source_dir())) ADD_FAILURE() << error;
}

TEST(Layering, NoFoldersIncludeEachOtherInACircle) {
  for (const std::string& error : folder_circle_errors(tests::source_dir())) {
    ADD_FAILURE() << error;
  }
}

TEST(Layering, FoldersAndFilesCanBeOverlooked) {
  for (const std::string& error : size_errors(tests::source_dir())) ADD_FAILURE() << error;
}

TEST(Layering, TheUmbrellaHeaderHasEveryHeaderOfAUser) {
  for (const std::string& error : umbrella_errors(tests::source_dir())) ADD_FAILURE() << error;
}

// A tree in which every kind of violation is planted.
class PlantedTree : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tessera-layering-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    for (const auto& [floor, sees] : kSees) {
      write(floor + "/ground.h", "#pragma once\n");
      write(floor + "/roof.cpp", "#include <tessera/" + floor + "/ground.h>\n#include <vector>\n");
    }
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& name, const std::string& text) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::app) << text;
  }
  fs::path root_;
};

TEST_F(PlantedTree, EveryEdgeIsAllowedOrReportedAsTheTableSays) {
  EXPECT_TRUE(layering_errors(root_).empty());
  int upward = 0;
  for (const auto& [floor, sees] : kSees) {
    for (const auto& [other, ignored] : kSees) {
      if (other == floor) continue;
      const std::string name = floor + "/deeper/to_" + other + ".h";
      write(name, "// #include in a comment\n  #  include <tessera/" + other + "/ground.h>\n");
      const std::vector<std::string> errors = layering_errors(root_);
      if (sees.count(other) != 0) {
        EXPECT_TRUE(errors.empty()) << errors.front();
      } else {
        ++upward;
        ASSERT_EQ(errors.size(), 1u) << floor << " to " << other;
        EXPECT_NE(errors[0].find(name + ":2: "), std::string::npos) << errors[0];
        EXPECT_NE(errors[0].find(floor + " does not see " + other), std::string::npos);
      }
      fs::remove(root_ / name);
    }
  }
  EXPECT_EQ(upward, 35);  // 56 ordered pairs, 21 of them allowed
}

TEST_F(PlantedTree, CirclesOfUnitsAreReported) {
  write("core/a.h", "#pragma once\n");
  write("core/b.h", "#include <tessera/core/a.h>\n");
  write("core/c.h", "#include <tessera/core/b.h>\n");
  write("core/a_cpu.cpp", "#include <tessera/core/a.h>\n");
  write("core/a_state.h", "#include <tessera/core/a.h>\n");
  write("core/a.cpp", "#include <tessera/core/a_state.h>\n");   // its own private header
  write("core/deeper/a.cpp", "#include <tessera/core/c.h>\n");  // another unit of that name
  EXPECT_TRUE(cycle_errors(root_).empty());
  write("core/a_cpu.cpp", "#include <tessera/core/c.h>\n");
  const std::vector<std::string> errors = cycle_errors(root_);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0],
            "core/a_cpu.cpp includes core/c, core/c.h includes core/b, core/b.h includes core/a");
}

TEST_F(PlantedTree, CirclesOfFoldersAreReported) {
  write("core/a/x.h", "#include <tessera/core/ground.h>\n");
  write("core/b/y.cpp", "#include <tessera/core/a/x.h>\n");
  EXPECT_TRUE(folder_circle_errors(root_).empty());
  write("core/roof.cpp", "#include <tessera/core/b/z.h>\n");  // by way of b and a
  const std::vector<std::string> errors = folder_circle_errors(root_);
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_EQ(errors[0], "core/roof.cpp includes core/b/z.h, and core/b needs core");
}

TEST_F(PlantedTree, FoldersAndFilesThatAreTooLargeAreReported) {
  for (size_t i = 0; i + 2 < kMostFiles; ++i) write("nn/f" + std::to_string(i) + ".h", "\n");
  write("tests/long.cpp", std::string(kMostLines, '\n'));
  EXPECT_TRUE(size_errors(root_).empty());
  write("nn/one_more.h", "\n");
  write("tests/long.cpp", "\n");
  EXPECT_EQ(size_errors(root_),
            (std::vector<std::string>{"nn: more than 40 files", "tests/long.cpp: 901 lines"}));
}

TEST_F(PlantedTree, UnknownFloorsLocalIncludesAndMissingHeadersAreReported) {
  write("core/a.cpp", "#include <tessera/utils/string.h>\n");
  write("core/b.cpp", "#include \"../nn/ground.h\"\n");
  write("core/c.cpp", "#include <tessera.h>\n");
  write("core/d.cpp", "#include <tessera/core/gone.h>\n");
  EXPECT_EQ(layering_errors(root_).size(), 4u);
}

TEST_F(PlantedTree, CallsOfTheRuntimeAreReported) {
  EXPECT_TRUE(cuda_call_errors(root_).empty());
  write("core/cuda/streams.cpp", "void f() { cudaDeviceSynchronize(); }\n");
  write("core/ground.h", "// cudaMalloc() is not called here\n#include <cudaFoo.h>\n");
  EXPECT_TRUE(cuda_call_errors(root_).empty());
  write("core/kernels/x/x.cu", "int device;\nTS_CUDA(cudaGetDevice(&device));\n");
  write("nn/roof.cpp", "cublasLtCreate(&handle);\n");
  const std::vector<std::string> errors = cuda_call_errors(root_);
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_EQ(errors[0], "core/kernels/x/x.cu:2: cudaGetDevice(): only core/cuda calls the runtime");
  EXPECT_EQ(errors[1], "nn/roof.cpp:3: cublasLtCreate(): only core/cuda calls the runtime");
}

TEST_F(PlantedTree, TestsThatForgetToCompareAreReported) {
  write("tests/a.cpp", "  compared_ranks(2, body);\n  failing_ranks(\"why\", 2, body);\n");
  write("tests/distributed/compared_ranks.h", "run_ranks(size, body);\n");
  write("tests/b.cpp", "// ctest ranks: 2\ncheck_equal_traces(scope);\n");
  write("tests/distributed/test_mpi_timeout.cpp", "// ctest ranks: 2\n");
  EXPECT_TRUE(comparison_errors(root_).empty());
  write("tests/c.cpp", "\nrun_ranks(2, body);\n");
  write("tests/deeper/d.cpp", "  distributed::run_ranks(2, body);\n");
  write("tests/e.cpp", "// ctest ranks: 2 4\n");
  const std::vector<std::string> errors = comparison_errors(root_);
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_NE(std::find_if(errors.begin(), errors.end(),
                         [](const std::string& e) { return e.rfind("tests/c.cpp:2: ", 0) == 0; }),
            errors.end());
}

TEST_F(PlantedTree, HeadersThatTheUmbrellaForgetsAreReported) {
  write("tessera.h", "#include <tessera/nn/ground.h>\n");
  write("nn/ground.h", "#include <tessera/core/ground.h>\n");
  const std::vector<std::string> errors = umbrella_errors(root_);
  const auto reported = [&](const std::string& name) {
    return std::any_of(errors.begin(), errors.end(),
                       [&](const std::string& e) { return e.rfind(name + ":", 0) == 0; });
  };
  EXPECT_TRUE(reported("optim/ground.h"));
  EXPECT_FALSE(reported("nn/ground.h"));
  EXPECT_FALSE(reported("core/ground.h"));   // through nn
  EXPECT_TRUE(reported("core/functors.h"));  // a reason for what is not there
}

TEST(Layering, AllowedPairsAreDirected) {
  for (const auto& [floor, sees] : kSees) {
    for (const std::string& below : sees) {
      EXPECT_EQ(kSees.at(below).count(floor), 0u) << floor << " and " << below << " see each other";
    }
  }
}

}  // namespace
}  // namespace tessera::test_layering
