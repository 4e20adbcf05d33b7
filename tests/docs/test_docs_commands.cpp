// Every command of ours that a page shows is run as it stands: the blocks of a page in their order,
// in a folder of their own that has the files of tests/docs/files and a tiny Llama, as a user with empty settings.
// Empty lines are typed at questions. `<!-- not run: REASON -->` above a block leaves it out.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../markdown.h"
#include "../source_dir.h"

namespace tessera::markdown {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = tests::source_dir();

// The programs that pages call by name: "tessera=/build/bin/tessera|train=...".
std::map<std::string, std::string> programs() {
  std::map<std::string, std::string> out;
  std::istringstream list(TESSERA_DOCS_PROGRAMS);
  for (std::string entry; std::getline(list, entry, '|');) {
    const size_t equals = entry.find('=');
    out[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  return out;
}

struct Command {
  int line;
  std::string text;
};

// Lines that end with a backslash go on. Empty lines and comments are left out.
std::vector<Command> commands_of(const Block& block) {
  std::vector<Command> commands;
  bool goes_on = false;
  for (size_t i = 0; i < block.text.size(); ++i) {
    const std::string& line = block.text[i];
    if (!goes_on && (line.empty() || line[0] == '#')) continue;
    if (!goes_on) commands.push_back({block.line + static_cast<int>(i), ""});
    commands.back().text += line + '\n';
    goes_on = !line.empty() && line.back() == '\\';
  }
  return commands;
}

std::string first_word(const std::string& command) {
  std::istringstream words(command);
  std::string word;
  while (words >> word && word.find('=') != std::string::npos) {
  }
  return word;
}

std::vector<std::string> pages_with_commands() {
  std::vector<std::string> pages;
  for (const fs::path& file : pages_of(kRoot)) {
    for (const Block& block : parse(read(file)).blocks) {
      if (block.language != "sh") continue;
      pages.push_back(fs::relative(file, kRoot).string());
      break;
    }
  }
  return pages;
}

class Page : public testing::TestWithParam<std::string> {};

TEST_P(Page, CommandsRunAsTheyStand) {
  // What a page may show and this test does not run.
  static const std::set<std::string> kOthers = {"cmake", "ctest",  "apt", "python",
                                                "ninja", "mpirun", "git", "cd"};
  const auto ours = programs();
  std::string name = GetParam();
  std::replace(name.begin(), name.end(), '/', '_');
  const fs::path folder = fs::path(testing::TempDir()) / ("tessera_docs_" + name);
  fs::remove_all(folder);
  fs::create_directories(folder / "bin");
  fs::copy(kRoot / "tests/docs/files", folder / "work", fs::copy_options::recursive);
  fs::rename(folder / "work/ssh", folder / "bin/ssh");
  // A tiny Llama with its tokenizer, and data that it is fine-tuned on.
  const fs::path tuned = kRoot / "tests/golden/finetune";
  fs::copy(tuned, folder / "work/Llama-3.2-1B-Instruct", fs::copy_options::recursive);
  fs::copy_file(tuned / "data.jsonl", folder / "work/train.jsonl");
  for (const auto& [program, path] : ours) {
    fs::create_symlink(path, folder / "bin" / program);
  }
  const std::string environment = "cd '" + (folder / "work").string() + "' && export PATH='" +
                                  (folder / "bin").string() + "':\"$PATH\" HOME='" +
                                  folder.string() + "' XDG_CONFIG_HOME='" + folder.string() +
                                  "/config' OMP_WAIT_POLICY=passive && ";

  ASSERT_EQ(std::system((environment + "make_files").c_str()), 0);

  int run = 0;
  for (const Block& block : parse(read(kRoot / GetParam())).blocks) {
    if (block.language != "sh" || block.notes("not run: ")) continue;
    for (const Command& command : commands_of(block)) {
      const std::string word = first_word(command.text);
      if (ours.count(word) == 0) {
        EXPECT_TRUE(kOthers.count(word) != 0 || fs::exists(kRoot / word))
            << GetParam() << ":" << command.line << ": nobody knows `" << word << "`";
        continue;
      }
      const fs::path script = folder / "command.sh";
      std::ofstream(script) << environment << "yes '' 2> /dev/null | (" << command.text << ")\n";
      const fs::path output = folder / "output.txt";
      fs::remove(output);
      const int status = std::system(
          ("timeout 60 sh '" + script.string() + "' >> '" + output.string() + "' 2>&1").c_str());
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << GetParam() << ":" << command.line << ": " << command.text << "exit code "
          << WEXITSTATUS(status) << "\n"
          << read(output);
      ++run;
    }
  }
  RecordProperty("commands", run);
  if (!HasFailure()) fs::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Docs, Page, testing::ValuesIn(pages_with_commands()),
                         [](const auto& page) {
                           std::string name;
                           for (const char c : page.param) {
                             name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace tessera::markdown
