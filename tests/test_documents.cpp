// Documents tell the truth: code that they show is code that is compiled, links lead somewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace tessera {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = TESSERA_SOURCE_DIR;

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// Without blocks of code, where brackets have other meanings: `[&](int rank)` is no link.
std::string prose_of(const std::string& text) {
  std::istringstream lines(text);
  std::string prose;
  bool fenced = false;
  for (std::string line; std::getline(lines, line);) {
    const bool is_fence = line.rfind("```", 0) == 0;
    fenced ^= is_fence;
    if (!fenced && !is_fence) prose += line + "\n";
  }
  return prose;
}

std::vector<fs::path> documents() {
  std::vector<fs::path> files = {kRoot / "README.md", kRoot / "CONTRIBUTING.md"};
  for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
    if (entry.path().extension() == ".md") files.push_back(entry.path());
  }
  return files;
}

// The text between ```cpp and ``` of the first such block that contains `part`.
std::string code_block(const std::string& text, const std::string& part) {
  for (size_t at = text.find("```cpp\n"); at != std::string::npos; at = text.find("```cpp\n", at)) {
    at += 7;
    const std::string block = text.substr(at, text.find("```", at) - at);
    if (block.find(part) != std::string::npos) return block;
  }
  return "";
}

TEST(Documents, ReadmeShowsTheQuickstartProgramAsItIs) {
  const std::string program = read(kRoot / "examples/quickstart.cpp");
  ASSERT_FALSE(program.empty());
  EXPECT_EQ(code_block(read(kRoot / "README.md"), "int main()"), program);
}

TEST(Documents, TheMigrationPageShowsAProgramThatIsCompiledBesideItsScript) {
  const std::string page = read(kRoot / "docs/accelerator.md");
  const std::string program = read(kRoot / "examples/by_feature/from_accelerate.cpp");
  EXPECT_EQ(code_block(page, "struct Classifier"), program);
  const size_t begin = page.find("```python\n") + 10;
  const std::string script = page.substr(begin, page.find("```", begin) - begin);
  EXPECT_EQ(std::count(script.begin(), script.end(), '\n'),
            std::count(program.begin(), program.end(), '\n'))
      << "line n is line n";
}

TEST(Documents, RelativeLinksLeadToFiles) {
  int links = 0;
  for (const fs::path& file : documents()) {
    const std::string text = prose_of(read(file));
    ASSERT_FALSE(text.empty()) << file;
    for (size_t at = text.find("]("); at != std::string::npos; at = text.find("](", at + 2)) {
      if (text[at - 1] == '[') continue;  // a lambda in `code`
      std::string target = text.substr(at + 2, text.find(')', at) - at - 2);
      if (target.rfind("http", 0) == 0 || target.rfind('#', 0) == 0) continue;
      target = target.substr(0, target.find('#'));
      EXPECT_TRUE(fs::exists(file.parent_path() / target)) << file << " links to " << target;
      ++links;
    }
  }
  EXPECT_GT(links, 0);
}

// Paths in `backticks` that begin with a folder of the tree: `scripts/test.sh`, `core/tensor.h`.
TEST(Documents, FilesThatTheyNameExist) {
  int names = 0;
  for (const fs::path& file : documents()) {
    std::istringstream lines(prose_of(read(file)));
    for (std::string line; std::getline(lines, line);) {
      for (size_t begin = line.find('`'); begin != std::string::npos;) {
        const size_t end = line.find('`', begin + 1);
        if (end == std::string::npos) break;
        const std::string name = line.substr(begin + 1, end - begin - 1);
        begin = line.find('`', end + 1);
        const size_t slash = name.find('/');
        if (slash == std::string::npos || slash == 0) continue;
        const std::string top = name.substr(0, slash);
        if (top == "build" || top == "out" || !fs::is_directory(kRoot / top)) continue;
        if (name.find_first_of(" *<>{}$") != std::string::npos) continue;
        EXPECT_TRUE(fs::exists(kRoot / name)) << file << " names " << name;
        ++names;
      }
    }
  }
  EXPECT_GT(names, 0);
}

}  // namespace
}  // namespace tessera
