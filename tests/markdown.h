// Pages of Markdown as the tests of documents read them: blocks of code, prose, headings.
//
// A comment above a block says what a reader does not need to see:
//
//     <!-- not compiled: REASON -->   ```cpp that is no C++ of ours
//     <!-- not run: REASON -->        ```sh whose lines need more than a machine with two cores
//     <!-- context: a plain loop -->  ...
#pragma once

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::markdown {

inline std::string read(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// README.md, CONTRIBUTING.md and everything under docs, in order.
inline std::vector<std::filesystem::path> pages_of(const std::filesystem::path& root) {
  std::vector<std::filesystem::path> pages = {root / "README.md", root / "CONTRIBUTING.md"};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / "docs")) {
    if (entry.path().extension() == ".md") pages.push_back(entry.path());
  }
  std::sort(pages.begin(), pages.end());
  return pages;
}

struct Block {
  std::string language;  // "cpp", "sh", "" for none
  int line = 0;          // of its first line of text, from 1
  std::vector<std::string> text;
  std::string note;  // what the comment above it says
  bool notes(std::string_view what) const { return note.rfind(what, 0) == 0; }
};

struct Page {
  std::vector<Block> blocks;
  std::string prose;  // everything else; lines of blocks are empty ones, so that numbers stay
};

// Fences may be indented (in a list); so many spaces are taken from each line of the block.
inline Page parse(const std::string& text) {
  Page page;
  std::istringstream lines(text);
  std::string note;
  bool inside = false;
  size_t indent = 0;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const size_t begin = line.find_first_not_of(' ');
    const bool fence = begin != std::string::npos && line.compare(begin, 3, "```") == 0;
    if (fence) {
      inside = !inside;
      if (inside) {
        indent = begin;
        page.blocks.push_back({line.substr(begin + 3), number + 1, {}, note});
      }
      note.clear();
      page.prose += '\n';
    } else if (inside) {
      page.blocks.back().text.push_back(line.substr(std::min(indent, line.size())));
      page.prose += '\n';
    } else {
      const bool comment = line.rfind("<!-- ", 0) == 0 && line.size() > 9 &&
                           line.compare(line.size() - 4, 4, " -->") == 0;
      if (comment) {
        note = line.substr(5, line.size() - 9);
      } else if (begin != std::string::npos) {
        note.clear();
      }
      page.prose += line + '\n';
    }
  }
  return page;
}

// The anchor that GitHub gives a heading: lower case, spaces to hyphens, no other punctuation.
inline std::string anchor(const std::string& heading) {
  std::string out;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == ' ' || byte == '-') {
      out += '-';
    } else if (std::isalnum(byte) != 0 || byte == '_' || byte >= 128) {
      out += static_cast<char>(std::tolower(byte));
    }
  }
  return out;
}

}  // namespace tessera::markdown
