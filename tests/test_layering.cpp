// The floors of the library: reads every include of the tree and fails on an edge that runs up.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {
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

// What an include directive names, with its opening mark: `<tessera/core/tensor.h`, `"x.h`; empty
// for other lines.
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

TEST(Layering, NoIncludeOfTheTreeRunsUp) {
  const fs::path root = TESSERA_SOURCE_DIR;
  ASSERT_TRUE(fs::exists(root / "core/tensor.h")) << root << " is not the source tree";
  for (const std::string& error : layering_errors(root)) ADD_FAILURE() << error;
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

TEST_F(PlantedTree, UnknownFloorsLocalIncludesAndMissingHeadersAreReported) {
  write("core/a.cpp", "#include <tessera/utils/string.h>\n");
  write("core/b.cpp", "#include \"../nn/ground.h\"\n");
  write("core/c.cpp", "#include <tessera.h>\n");
  write("core/d.cpp", "#include <tessera/core/gone.h>\n");
  EXPECT_EQ(layering_errors(root_).size(), 4u);
}

TEST(Layering, AllowedPairsAreDirected) {
  for (const auto& [floor, sees] : kSees) {
    for (const std::string& below : sees) {
      EXPECT_EQ(kSees.at(below).count(floor), 0u) << floor << " and " << below << " see each other";
    }
  }
}

}  // namespace
}  // namespace tessera
