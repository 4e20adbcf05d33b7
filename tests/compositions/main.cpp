// compositions: trains random compositions by the facade and by a plain loop, and compares.
//
//     compositions --count 300                   seeds 0 to 299
//     compositions --first 5000 --count 100
//     compositions --one "ranks=2 sharding=fsdp clip=0.5 seed=7"
//     compositions --file found.txt --count 300  a line each, and the seeds after them
//
// A composition that differs, fails or is refused is made simpler as long as that stays so, and is printed
// as a line for --one. The exit code is 1 where any differed or failed. Refusals (typed errors before
// anything differs) are counted by their message; --refusals allowed so many in a hundred.
#include <CLI/CLI.hpp>

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <tessera/core/error.h>

#include "compositions/composition.h"
#include "compositions/trainings.h"

namespace {

using namespace tessera::compositions;

struct Verdict {
  enum class Kind { kAgrees, kRefused, kDiffers, kFails } kind = Kind::kAgrees;
  std::string text;
};

Verdict judge(const Composition& composition) {
  const std::string folder = std::filesystem::temp_directory_path() /
                             ("tessera-composition-" + std::to_string(::getpid()));
  try {
    const Outcome facade = train_by_facade(composition, folder);
    if (!facade.refusal.empty()) return {Verdict::Kind::kRefused, facade.refusal};
    const std::string text = difference(composition, facade, train_plainly(composition));
    return {text.empty() ? Verdict::Kind::kAgrees : Verdict::Kind::kDiffers, text};
  } catch (const std::exception& error) {
    std::filesystem::remove_all(folder);
    return {Verdict::Kind::kFails, error.what()};
  }
}

Composition shrink(Composition composition, Verdict::Kind kind) {
  for (bool found = true; found;) {
    found = false;
    for (const Composition& one : simpler(composition)) {
      if (judge(one).kind != kind) continue;
      composition = one;
      found = true;
      break;
    }
  }
  return composition;
}

// A message without the numbers and names that differ from case to case.
std::string kind_of(const std::string& message) {
  std::string kind;
  bool quoted = false;
  for (const char c : message.substr(0, message.find('\n'))) {
    if (c == '\'') quoted = !quoted;
    if (!quoted && (c < '0' || c > '9')) kind += c;
  }
  return kind;
}

}  // namespace

int main(int count, char** arguments) {
  CLI::App app("Trains random compositions by the facade and by a plain loop, and compares");
  uint64_t first = 0, number = 100;
  std::string one, file;
  double refusals = 5, seconds = 0;
  app.add_option("--first", first, "the first seed");
  app.add_option("--count", number, "so many seeds");
  app.add_option("--one", one, "this composition alone, as it is printed");
  app.add_option("--file", file, "compositions by the line, tried first");
  app.add_option("--refusals", refusals, "so many in a hundred may be refused");
  app.add_option("--seconds", seconds, "ends after so many seconds; 0: after all seeds");
  CLI11_PARSE(app, count, arguments);

  if (!one.empty()) {
    const Composition composition = parse(one);
    const Verdict verdict = judge(composition);
    constexpr const char* kWords[] = {"agrees", "is refused", "differs", "fails"};
    std::printf("%s %s\n%s\n", describe(composition).c_str(),
                kWords[static_cast<int>(verdict.kind)], verdict.text.c_str());
    return verdict.kind == Verdict::Kind::kAgrees ? 0 : 1;
  }
  std::vector<Composition> all;
  if (!file.empty()) {
    std::ifstream lines(file);
    if (!lines) {
      std::fprintf(stderr, "compositions: cannot read %s\n", file.c_str());
      return 2;
    }
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty() && line[0] != '#') all.push_back(parse(line));
    }
  }
  for (uint64_t seed = first; seed < first + number; ++seed) all.push_back(draw(seed));
  uint64_t tried = 0, wrong = 0, refused = 0;
  std::map<std::string, std::pair<uint64_t, std::string>> kinds;  // how many, and one of them
  const auto start = std::chrono::steady_clock::now();
  for (const Composition& composition : all) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (seconds > 0 && spent.count() > seconds) break;
    const Verdict verdict = judge(composition);
    ++tried;
    if (verdict.kind == Verdict::Kind::kAgrees) continue;
    if (verdict.kind == Verdict::Kind::kRefused) {
      ++refused;
      auto& [times, example] = kinds[kind_of(verdict.text)];
      if (times++ == 0) {
        example = describe(shrink(composition, verdict.kind)) + "\n    " + verdict.text;
      }
      continue;
    }
    ++wrong;
    const Composition small = shrink(composition, verdict.kind);
    std::printf("%s: %s\n  as drawn: %s\n%s\n",
                verdict.kind == Verdict::Kind::kDiffers ? "differs" : "fails",
                describe(small).c_str(), describe(composition).c_str(), judge(small).text.c_str());
    std::fflush(stdout);
  }
  for (const auto& [kind, times] : kinds) {
    std::printf("refused %llu times, as: %s\n", static_cast<unsigned long long>(times.first),
                times.second.c_str());
  }
  std::printf("%llu compositions: %llu wrong, %llu refused\n",
              static_cast<unsigned long long>(tried), static_cast<unsigned long long>(wrong),
              static_cast<unsigned long long>(refused));
  const bool too_many = static_cast<double>(refused) > refusals / 100 * static_cast<double>(tried);
  if (too_many) std::printf("more than %g in a hundred were refused\n", refusals);
  return wrong > 0 || too_many || tried == 0 ? 1 : 0;
}
