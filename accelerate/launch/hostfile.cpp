#include <tessera/accelerate/launch/hostfile.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::launch {
namespace {

// Bytes that a terminal shows as nothing, or as another letter, as \xNN.
std::string visible(std::string_view text) {
  std::string shown;
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", byte);
    shown += byte > ' ' && byte < 127 ? std::string(1, letter) : code;
  }
  return shown;
}

int parse_slots(std::string_view text, const std::string& where) {
  int slots = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), slots);
  TS_CHECK_AS(FormatError, problem == std::errc() && end == text.data() + text.size() && slots >= 1,
              where, "slots are a whole number of at least 1; got \"", visible(text), "\"");
  return slots;
}

bool is_host_name(std::string_view name) {
  // What a shell or mpirun would read otherwise cannot be a name.
  return !name.empty() && name[0] != '-' &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
             "0123456789.-_@") == std::string_view::npos;
}

}  // namespace

std::vector<Host> parse_hosts(std::string_view text, std::string_view name) {
  std::vector<Host> hosts;
  std::set<std::string> seen;
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);  // an editor's mark of UTF-8
  PlainText<std::istringstream> lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string where = std::string(name) + ":" + std::to_string(number);
    PlainText<std::istringstream> words(line.substr(0, line.find('#')));
    std::string word;
    if (!(words >> word)) continue;
    Host host;
    const size_t colon = word.find(':');
    TS_CHECK_AS(
        FormatError, colon == word.rfind(':'), where, "\"", visible(word),
        "\" has several colons; of addresses of IPv6 write the machine's name, and NAME:N or "
        "NAME slots=N");
    host.name = word.substr(0, colon);
    TS_CHECK_AS(FormatError, is_host_name(host.name), where, "\"", visible(host.name),
                "\" is no host name; write NAME slots=N");
    bool counted = colon != std::string::npos;
    if (counted) host.slots = parse_slots(std::string_view(word).substr(colon + 1), where);
    while (words >> word) {
      if (word.starts_with("slots=")) {
        TS_CHECK_AS(FormatError, !counted, where, "slots are given twice");
        counted = true;
        host.slots = parse_slots(std::string_view(word).substr(6), where);
      } else if (word.starts_with("max_slots=") || word.starts_with("max-slots=")) {
        parse_slots(std::string_view(word).substr(10), where);  // mpirun's; slots decide here
      } else {
        TS_THROW(FormatError, where, "\"", visible(word), "\" is unknown; write NAME slots=N");
      }
    }
    TS_CHECK_AS(FormatError, seen.insert(host.name).second, where, "host ", host.name,
                " was named before; give it one line with all its slots");
    hosts.push_back(std::move(host));
  }
  TS_CHECK_AS(FormatError, !hosts.empty(), std::string(name), "no host is named; write one a line");
  return hosts;
}

std::vector<Host> read_host_file(const std::string& path) {
  PlainText<std::ifstream> file(path);
  TS_CHECK_AS(IoError, file.is_open(), "host file", "cannot read ", path, "; check the path");
  PlainText<std::ostringstream> text;
  text << file.rdbuf();
  TS_CHECK_AS(IoError, !file.bad(), "host file", "cannot read ", path);
  return parse_hosts(text.str(), path);
}

std::string format_hosts(const std::vector<Host>& hosts) {
  std::string text;
  for (const Host& host : hosts) {
    text += host.name + " slots=" + std::to_string(host.slots) + "\n";
  }
  return text;
}

void check_slots(const std::vector<Host>& hosts, int ranks, bool oversubscribe) {
  int64_t slots = 0;
  for (const Host& host : hosts) slots += host.slots;
  TS_CHECK_AS(ConfigError, oversubscribe || ranks <= slots, "tessera launch", ranks,
              " ranks do not fit into the ", slots, " slots of ", hosts.size(),
              " hosts; start fewer, raise slots, or pass --oversubscribe");
}

}  // namespace tessera::launch
