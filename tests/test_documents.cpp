// Documents tell the truth: code that they show is code that is compiled, links lead somewhere,
// every page is found. What blocks of code say is compiled and run by tests/docs.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "markdown.h"
#include "source_dir.h"

namespace tessera::test_documents {
namespace {

namespace fs = std::filesystem;
using markdown::Block;
using markdown::read;

const fs::path kRoot = tests::source_dir();

// The first block of the language that contains `part`.
std::string code_block(const fs::path& page, const std::string& language, const std::string& part) {
  for (const Block& block : markdown::parse(read(page)).blocks) {
    std::string text;
    for (const std::string& line : block.text) text += line + '\n';
    if (block.language == language && text.find(part) != std::string::npos) return text;
  }
  return "";
}

struct Link {
  fs::path from;
  int line;
  std::string target;
};

// [text](target), without those to the web.
std::vector<Link> links_of(const fs::path& page) {
  std::vector<Link> links;
  std::istringstream lines(markdown::parse(read(page)).prose);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    for (size_t at = line.find("]("); at != std::string::npos; at = line.find("](", at + 2)) {
      if (at > 0 && line[at - 1] == '[') continue;  // a lambda in `code`
      const std::string target = line.substr(at + 2, line.find(')', at) - at - 2);
      if (target.rfind("http", 0) != 0) links.push_back({page, number, target});
    }
  }
  return links;
}

std::set<std::string> anchors_of(const fs::path& page) {
  std::set<std::string> anchors;
  std::istringstream lines(markdown::parse(read(page)).prose);
  for (std::string line; std::getline(lines, line);) {
    const size_t marks = line.find_first_not_of('#');
    if (marks == 0 || marks == std::string::npos || line[marks] != ' ') continue;
    std::string anchor = markdown::anchor(line.substr(marks + 1));
    for (int again = 1; !anchors.insert(anchor).second; ++again) {
      anchor = markdown::anchor(line.substr(marks + 1)) + "-" + std::to_string(again);
    }
  }
  return anchors;
}

// What stands in `backticks` outside of blocks, with its line.
std::vector<std::pair<int, std::string>> names_of(const fs::path& page) {
  std::vector<std::pair<int, std::string>> names;
  std::istringstream lines(markdown::parse(read(page)).prose);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    for (size_t begin = line.find('`'); begin != std::string::npos;) {
      const size_t end = line.find('`', begin + 1);
      if (end == std::string::npos) break;
      names.emplace_back(number, line.substr(begin + 1, end - begin - 1));
      begin = line.find('`', end + 1);
    }
  }
  return names;
}

TEST(Documents, ReadmeShowsTheQuickstartProgramAsItIs) {
  const std::string program = read(kRoot / "examples/quickstart.cpp");
  ASSERT_FALSE(program.empty());
  EXPECT_EQ(code_block(kRoot / "README.md", "cpp", "int main()"), program);
}

TEST(Documents, RecipesShowTheirProgramsAsTheyAre) {
  const fs::path page = kRoot / "docs/recipes.md";
  int programs = 0;
  for (const auto& entry : fs::directory_iterator(kRoot / "examples/recipes")) {
    if (entry.path().extension() != ".cpp") continue;
    const std::string program = read(entry.path());
    EXPECT_EQ(code_block(page, "cpp", program.substr(0, program.find('\n'))), program) << entry;
    ++programs;
  }
  EXPECT_GE(programs, 4);
}

TEST(Documents, TheMigrationPageShowsAProgramThatIsCompiledBesideItsScript) {
  const fs::path page = kRoot / "docs/accelerator.md";
  const std::string program = read(kRoot / "examples/by_feature/from_accelerate.cpp");
  EXPECT_EQ(code_block(page, "cpp", "struct Classifier"), program);
  const std::string script = code_block(page, "python", "import torch");
  EXPECT_EQ(std::count(script.begin(), script.end(), '\n'),
            std::count(program.begin(), program.end(), '\n'))
      << "line n is line n";
}

TEST(Documents, LinksLeadToFilesAndHeadings) {
  int links = 0, anchors = 0;
  for (const fs::path& page : markdown::pages_of(kRoot)) {
    for (const Link& link : links_of(page)) {
      const size_t hash = std::min(link.target.find('#'), link.target.size());
      const fs::path file = hash == 0 ? page : page.parent_path() / link.target.substr(0, hash);
      EXPECT_TRUE(fs::exists(file)) << page << ":" << link.line << " links to " << link.target;
      ++links;
      if (hash == link.target.size() || file.extension() != ".md") continue;
      EXPECT_EQ(anchors_of(file).count(link.target.substr(hash + 1)), 1u)
          << page << ":" << link.line << " links to " << link.target
          << ", which has no such heading";
      ++anchors;
    }
  }
  EXPECT_GT(links, 0);
  EXPECT_GT(anchors, 0);
}

TEST(Documents, EveryPageIsFoundFromTheIndex) {
  std::set<fs::path> found;
  std::vector<fs::path> next = {kRoot / "README.md"};
  while (!next.empty()) {
    const fs::path page = fs::weakly_canonical(next.back());
    next.pop_back();
    if (page.extension() != ".md" || !found.insert(page).second) continue;
    for (const Link& link : links_of(page)) {
      next.push_back(page.parent_path() / link.target.substr(0, link.target.find('#')));
    }
    // The README is the door: from it only the index counts.
    if (found.size() == 1) next = {kRoot / "docs/index.md", kRoot / "CONTRIBUTING.md"};
  }
  for (const fs::path& page : markdown::pages_of(kRoot)) {
    EXPECT_EQ(found.count(fs::weakly_canonical(page)), 1u) << page << " is linked by no page";
  }
}

// Paths in `backticks` that begin with a folder of the tree: `scripts/test.sh`,
// `core/tensor/tensor.h`. And tests by their names: `test_layering`.
TEST(Documents, FilesThatTheyNameExist) {
  std::vector<fs::path> folders = {kRoot / "tests"};
  for (const auto& entry : fs::directory_iterator(kRoot / "tests")) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  int names = 0, tests = 0;
  for (const fs::path& page : markdown::pages_of(kRoot)) {
    for (const auto& [line, name] : names_of(page)) {
      if (name.find_first_of(" *<>{}$") != std::string::npos) continue;
      if (name.rfind("test_", 0) == 0 && name.find_first_of(".(=") == std::string::npos) {
        const bool exists =
            std::any_of(folders.begin(), folders.end(), [&](const fs::path& folder) {
              return fs::exists(folder / (name + ".cpp")) || fs::exists(folder / (name + ".cu"));
            });
        EXPECT_TRUE(exists) << page << ":" << line << " names " << name;
        ++tests;
      }
      const size_t slash = name.find('/');
      if (slash == std::string::npos || slash == 0) continue;
      const std::string top = name.substr(0, slash);
      if (top == "build" || top == "out" || !fs::is_directory(kRoot / top)) continue;
      const std::string path = name.substr(0, name.find(':'));
      EXPECT_TRUE(fs::exists(kRoot / path) || fs::exists(kRoot / (path + ".h")) ||
                  fs::exists(kRoot / (path + ".cpp")))
          << page << ":" << line << " names " << name;
      ++names;
    }
  }
  EXPECT_GT(names, 0);
  EXPECT_GT(tests, 0);
}

// ---- Pages of criteria and scenarios: | ID | what | `test_program`: `Suite.Name`... |

const std::regex kId("\\b([A-Z0-9]{1,3}[A-Z0-9])-([A-Z]?[0-9]+)");

std::vector<std::string> rows_of(const fs::path& page) {
  std::vector<std::string> rows;
  std::istringstream lines(read(page));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("| ", 0) == 0) rows.push_back(line);
  }
  return rows;
}
std::string first_cell(const std::string& row) { return row.substr(0, row.find('|', 1)); }
std::string last_cell(const std::string& row) {
  const size_t begin = row.rfind('|', row.rfind('|') - 1);
  return row.substr(begin + 1, row.rfind('|') - begin - 1);
}

bool names_tests(const std::string& cell) {
  return std::regex_search(cell, std::regex("`[A-Z]\\w*\\.\\w+\\*?`"));
}

// "Suite.Name" of every test, by program.
std::map<std::string, std::set<std::string>> tests_of_programs() {
  std::map<std::string, std::set<std::string>> tests;
  const std::regex macro("TEST(?:_F|_P)?\\(\\s*(\\w+),\\s*(\\w+)\\)");
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "tests")) {
    const fs::path& file = entry.path();
    const bool is_source = file.extension() == ".cpp" || file.extension() == ".cu";
    if (!is_source || file.stem().string().rfind("test_", 0) != 0) continue;
    const std::string text = read(file);
    for (std::sregex_iterator at(text.begin(), text.end(), macro), end; at != end; ++at) {
      tests[file.stem()].insert((*at)[1].str() + "." + (*at)[2].str());
    }
  }
  return tests;
}

// Whether there is the test, or with a `*` at its end one that begins so.
bool has_test(const std::set<std::string>& tests, const std::string& name) {
  if (name.back() != '*') return tests.count(name) == 1;
  const std::string begin = name.substr(0, name.size() - 1);
  const auto at = tests.lower_bound(begin);
  return at != tests.end() && at->rfind(begin, 0) == 0;
}

// A name stands behind its program; one of a trap may stand alone, without its suite.
TEST(Documents, TestsThatCriteriaAndScenariosNameExist) {
  const std::map<std::string, std::set<std::string>> programs = tests_of_programs();
  std::set<std::string> all, names;
  for (const auto& [program, tests] : programs) {
    for (const std::string& test : tests) {
      all.insert(test), names.insert(test.substr(test.find('.') + 1));
    }
  }
  for (const char* page : {"docs/distributed-criteria.md", "docs/accelerate-scenarios.md"}) {
    int looked_up = 0;
    for (const std::string& row : rows_of(kRoot / page)) {
      const std::string cell = last_cell(row);
      std::string program;
      const std::regex code("`([^`]+)`");
      for (std::sregex_iterator at(cell.begin(), cell.end(), code), end; at != end; ++at) {
        const std::string name = (*at)[1];
        if (name.rfind("test_", 0) == 0) {
          program = name;
          EXPECT_EQ(programs.count(program), 1u) << page << " names " << program;
        } else if (name[0] >= 'A' && name[0] <= 'Z') {
          const bool whole = name.find('.') != std::string::npos;
          const auto& tests = !whole            ? names
                              : program.empty() ? all
                                                : programs.find(program)->second;
          EXPECT_TRUE(has_test(tests, name))
              << page << " names " << name << ", which " << program << " has not:\n"
              << row;
          ++looked_up;
        }
      }
    }
    EXPECT_GT(looked_up, 10) << page;
  }
}

// docs/distributed-criteria.md: each criterion has one row, with a test or saying what is not built.
TEST(Documents, EveryCriterionHasItsTests) {
  std::map<std::string, int> rows;
  for (const std::string& row : rows_of(kRoot / "docs/distributed-criteria.md")) {
    const std::string cell = first_cell(row);
    std::smatch id;
    if (!std::regex_search(cell, id, kId)) continue;
    ++rows[id.str()];
    const std::string tests = last_cell(row);
    EXPECT_TRUE(names_tests(tests) || tests.find("not built") != std::string::npos) << row;
  }
  const std::pair<char, int> criteria[] = {{'D', 14}, {'F', 20}, {'Z', 10}, {'T', 6},
                                           {'P', 1},  {'C', 1},  {'K', 6},  {'E', 4}};
  size_t count = 0;
  for (const auto& [letter, last] : criteria) {
    for (int i = 1; i <= last; ++i, ++count) {
      const std::string id = std::string("AC-") + letter + std::to_string(i);
      EXPECT_EQ(rows[id], 1) << id;
    }
  }
  EXPECT_EQ(rows.size(), count);
}

// docs/accelerate-scenarios.md: each ID is in a test, as ACC-3, ACC_3 or ACC3, or its row names the
// tests, or says that it is not built.
TEST(Documents, ScenariosAreFoundInTestsByTheirIds) {
  std::string tests;
  for (const char* folder : {"tests", "examples"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const fs::path& file = entry.path();
      const std::string end = file.extension();
      if (end == ".cpp" || end == ".h" || end == ".txt" || end == ".sh") tests += read(file);
    }
  }
  int ids = 0;
  for (const std::string& row : rows_of(kRoot / "docs/accelerate-scenarios.md")) {
    const std::string cell = first_cell(row), last = last_cell(row);
    const bool named = names_tests(last) || last.find("not built") == 1;
    for (std::sregex_iterator at(cell.begin(), cell.end(), kId), end; at != end; ++at, ++ids) {
      const std::string part = (*at)[1], number = (*at)[2];
      const auto has = [&](const char* between) {
        return tests.find(part + between + number) != std::string::npos;
      };
      EXPECT_TRUE(named || has("-") || has("_") || has("")) << at->str() << " is in no test";
    }
  }
  EXPECT_GT(ids, 20);
}

TEST(Documents, BlocksOfCodeSayTheirLanguageAndFewAreLeftOut) {
  static const std::set<std::string> kLanguages = {"cpp",    "sh",    "text", "json",
                                                   "python", "cmake", "yaml", "csv"};
  int left_out = 0;
  for (const fs::path& page : markdown::pages_of(kRoot)) {
    for (const Block& block : markdown::parse(read(page)).blocks) {
      EXPECT_EQ(kLanguages.count(block.language), 1u)
          << page << ":" << block.line << ": the block's language is \"" << block.language << "\"";
      const bool noted = block.notes("not compiled: ") || block.notes("not run: ");
      EXPECT_FALSE(noted && block.note.size() < 20) << page << ":" << block.line << ": why not?";
      left_out += noted ? 1 : 0;
    }
    std::istringstream lines(markdown::parse(read(page)).prose);
    int number = 0;
    for (std::string line, before; std::getline(lines, line); before = line) {
      ++number;  // code by four spaces is seen by no test
      const bool indented = before.empty() && line.rfind("    ", 0) == 0;
      EXPECT_FALSE(indented) << page << ":" << number << ": write code between ``` and ```";
    }
  }
  EXPECT_LE(left_out, 11) << "blocks that no test reads";
}

}  // namespace
}  // namespace tessera::test_documents
