// snippets FOLDER COUNT ROOT FILE...: writes FOLDER/snippets_0.cpp ... in which every block of C++
// of the pages and headers stands in a namespace of its own, so that the compiler reads what users
// read.
//
// Whole programs and definitions (they begin in the first column) stay as they are; the statements
// of a fragment become a function. Names that a fragment uses without making them (model, loader)
// are those of snippet_context.h. `...` for what a reader fills in is an empty statement. #line
// gives errors the place in the page. Nothing is linked or run.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "../markdown.h"

namespace tessera::markdown {
namespace {

bool starts_with(const std::string& text, std::string_view prefix) {
  return text.rfind(prefix, 0) == 0;
}

// A line that ends as a statement does. A part of an example without one is a table or a text.
bool is_statement(const std::string& line) {
  const std::string code = line.substr(0, line.find(" //"));
  const size_t last = code.find_last_not_of(' ');
  return last != std::string::npos && code[last] == ';';
}

// The examples above `#pragma once`: lines of `//` and at least five spaces, empty lines between
// their parts.
std::vector<Block> comment_blocks(const std::string& text) {
  std::vector<Block> blocks;
  std::istringstream lines(text);
  bool inside = false;
  int number = 0;
  for (std::string line; std::getline(lines, line) && line != "#pragma once";) {
    ++number;
    const size_t begin = line.find_first_not_of(' ');
    const std::string comment = begin == std::string::npos ? "" : line.substr(begin);
    if (starts_with(comment, "//     ")) {
      if (!inside) blocks.push_back({"cpp", number, {}, ""});
      inside = true;
      blocks.back().text.push_back(comment.substr(7));
    } else if (comment == "//" && inside) {
      blocks.back().text.emplace_back();
    } else {
      inside = false;
    }
  }
  for (Block& block : blocks) {
    for (auto part = block.text.begin(); part != block.text.end();) {
      const auto end = std::find(part, block.text.end(), "");
      if (std::none_of(part, end, is_statement)) std::fill(part, end, "");
      part = end == block.text.end() ? end : end + 1;
    }
  }
  std::erase_if(blocks, [](const Block& block) {
    return std::none_of(block.text.begin(), block.text.end(), is_statement);
  });
  return blocks;
}

// `...` that stands for code of the reader: an empty statement; `for (...)` goes over the loader.
std::string fill_in(std::string line) {
  bool quoted = false;
  for (size_t at = 0; at < line.size(); ++at) {
    if (line[at] == '\\') {
      ++at;
    } else if (line[at] == '"') {
      quoted = !quoted;
    } else if (!quoted && line.compare(at, 2, "//") == 0) {
      break;
    } else if (!quoted && line.compare(at, 9, "for (...)") == 0) {
      line.replace(at, 9, "for (auto& batch : loader)");
    } else if (!quoted && line.compare(at, 3, "...") == 0) {
      const bool opens = at == 0 || std::string_view(" {").find(line[at - 1]) != std::string::npos;
      const bool closes =
          at + 3 == line.size() || std::string_view(" ;}").find(line[at + 3]) != std::string::npos;
      if (opens && closes) line.replace(at, 3, ";  ");
    }
  }
  return line;
}

// Whether a definition begins here, which stands outside of functions.
bool defines(const std::string& line) {
  static constexpr std::array kWords = {"struct ",    "class ", "template ", "enum ",  "#",
                                        "namespace ", "using ", "extern ",   "static "};
  if (line.empty() || line[0] == ' ') return false;
  for (const char* word : kWords) {
    if (starts_with(line, word)) return true;
  }
  // A function: a type, a name, parameters and an opening brace.
  static const std::set<std::string> kStatements = {"for", "if",     "while", "switch", "else",
                                                    "do",  "return", "try",   "auto"};
  const size_t open = line.find('('), space = line.find(' ');
  if (open == std::string::npos || space == std::string::npos || space > open) return false;
  if (line.back() != '{' || kStatements.count(line.substr(0, space)) != 0) return false;
  const std::string name = line.substr(space + 1, open - space - 1);
  if (line.find("[", open) != std::string::npos) return false;  // an object that gets a lambda
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  });
}

// A definition ends with the first line in its first column that closes it.
bool ends(const std::string& line) {
  if (line.empty() || line[0] == ' ') return false;
  return line[0] == '}' || line[0] == '#' || starts_with(line, "using ") || line.back() == ';' ||
         (line.back() == '}' && line.find('{') != std::string::npos);
}

std::string translate(const Block& block, const std::string& file, const std::string& name,
                      std::set<std::string>& includes) {
  std::string definitions, statements;
  bool defining = false;
  int last[2] = {-1, -1};
  for (size_t i = 0; i < block.text.size(); ++i) {
    const std::string line = fill_in(block.text[i]);
    if (starts_with(line, "#include")) {
      includes.insert(line);
      continue;
    }
    defining = defining || defines(line);
    std::string& out = defining ? definitions : statements;
    const int number = block.line + static_cast<int>(i);
    if (last[defining] != number - 1) {
      out += "#line " + std::to_string(number) + " \"" + file + "\"\n";
    }
    last[defining] = number;
    out += line + '\n';
    if (defining && ends(line) && !starts_with(line, "template")) defining = false;
  }
  std::string out = "namespace docs::" + name + " {\n";
  // A header's example stands in its namespace.
  for (const char* floor : {"nn", "optim", "precision", "distributed", "data", "accelerate"}) {
    if (starts_with(file, std::string(floor) + "/")) {
      out += "using namespace tessera::" + std::string(floor) + ";\n";
    }
  }
  out += definitions;
  if (!statements.empty()) {
    out += "void fragment() {\n" + statements + "}\n";
  }
  return out + "}  // namespace docs::" + name + "\n\n";
}

int write_all(const std::filesystem::path& folder, size_t count, const std::filesystem::path& root,
              const std::vector<std::string>& files) {
  struct Unit {
    std::set<std::string> includes;
    std::string text;
  };
  std::vector<Unit> units(count);
  int blocks = 0;
  for (const std::string& file : files) {
    const std::string text = read(root / file);
    const bool header = file.size() > 2 && file.compare(file.size() - 2, 2, ".h") == 0;
    const auto unit = std::min_element(  // the shortest
        units.begin(), units.end(),
        [](const Unit& a, const Unit& b) { return a.text.size() < b.text.size(); });
    std::string stem;
    for (const char c : file) stem += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
    for (const Block& block : header ? comment_blocks(text) : parse(text).blocks) {
      if (block.language != "cpp" || block.notes("not compiled: ")) continue;
      unit->text += translate(block, file, stem + "_" + std::to_string(block.line), unit->includes);
      ++blocks;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    std::string text = "// Made of the pages by tests/docs/snippets.cpp.\n#include <tessera.h>\n";
    for (const std::string& include : units[i].includes) text += include + '\n';
    text += "#include \"snippet_context.h\"\n\n" + units[i].text;
    const auto path = folder / ("snippets_" + std::to_string(i) + ".cpp");
    if (read(path) == text) continue;  // what has not changed is not compiled again
    std::ofstream(path, std::ios::binary) << text;
  }
  std::printf("%d blocks\n", blocks);
  return blocks > 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::markdown

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  return tessera::markdown::write_all(argv[1], std::stoul(argv[2]), argv[3],
                                      std::vector<std::string>(argv + 4, argv + argc));
}
