#include <tessera/core/cuda/libraries/gemm_table.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>

namespace tessera::gpu {
namespace {

using Json = nlohmann::json;
constexpr const char* kFormat = "tessera gemm table 1";

std::string to_hex(const std::string& bytes) {
  constexpr const char* digits = "0123456789abcdef";
  std::string hex;
  for (const char c : bytes) {
    hex += digits[static_cast<unsigned char>(c) >> 4];
    hex += digits[static_cast<unsigned char>(c) & 15];
  }
  return hex;
}

std::optional<std::string> from_hex(const std::string& hex) {
  if (hex.size() % 2 != 0) return {};
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    const int high = digit(hex[i]), low = digit(hex[i + 1]);
    if (high < 0 || low < 0) return {};
    bytes += static_cast<char>(high * 16 + low);
  }
  return bytes;
}

template <class... Args>
[[noreturn]] void refuse(const std::string& path, const Args&... what) {
  TS_THROW(FormatError, path, "is not a table of matrix products: ", what...,
           "; delete it, and it is measured anew");
}

// `path` is the name of the text.
std::map<std::string, GemmAlgorithm> parse(const std::string& path, std::string_view text) {
  std::map<std::string, GemmAlgorithm> entries;
  Json file;
  try {
    file = Json::parse(text);
  } catch (const Json::exception& error) {
    refuse(path, error.what());
  }
  const bool is_ours = file.is_object() && file.contains("format") && file["format"] == kFormat &&
                       file.contains("entries") && file["entries"].is_object();
  if (!is_ours) refuse(path, "it lacks \"format\": \"", kFormat, "\" or \"entries\"");
  for (const auto& [key, entry] : file["entries"].items()) {
    const bool complete = entry.is_object() && entry.contains("algorithm") &&
                          entry["algorithm"].is_string() && entry.contains("microseconds") &&
                          entry["microseconds"].is_number();
    if (!complete) refuse(path, "the entry '", key, "' lacks \"algorithm\" or \"microseconds\"");
    const auto bytes = from_hex(entry["algorithm"].get<std::string>());
    const double microseconds = entry["microseconds"];
    if (!bytes || bytes->empty()) {
      refuse(path, "the algorithm of '", key, "' is not hexadecimal");
    }
    if (!(microseconds > 0)) refuse(path, "the time of '", key, "' is ", microseconds);
    entries[key] = {*bytes, microseconds};
  }
  return entries;
}

std::map<std::string, GemmAlgorithm> read(const std::string& path) {
  if (path.empty() || !std::filesystem::exists(path)) return {};
  return parse(path, MappedFile(path).text());
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

GemmTable::GemmTable(std::string path, std::function<double()> seconds)
    : path_(std::move(path)),
      seconds_(seconds != nullptr ? std::move(seconds) : steady_seconds),
      entries_(read(path_)),
      written_(-std::numeric_limits<double>::infinity()) {}

GemmTable::~GemmTable() { close(); }

void GemmTable::close() noexcept {
  try {
    write();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
  }
}

std::optional<GemmAlgorithm> GemmTable::find(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  return found == entries_.end() ? std::nullopt : std::optional(found->second);
}

void GemmTable::add(const std::string& key, const GemmAlgorithm& algorithm) {
  TS_CHECK(!algorithm.bytes.empty() && algorithm.microseconds > 0, "gemm table",
           "an entry has an algorithm and a positive time; got ", algorithm.bytes.size(),
           " bytes and ", algorithm.microseconds);
  const std::lock_guard lock(mutex_);
  if (path_.empty()) {
    entries_[key] = algorithm;
    return;
  }
  waiting_[key] = algorithm;
  if (is_due()) {
    try {
      write_locked();
    } catch (...) {
      waiting_.erase(key);
      waits_ = !waiting_.empty();
      throw;
    }
  } else {
    entries_[key] = algorithm;
    waits_ = true;
  }
}

bool GemmTable::is_due() const {
  constexpr double kBetweenWrites = 1;  // two fsyncs each
  return seconds_() - written_ >= kBetweenWrites;
}

void GemmTable::write_locked() {
  if (waiting_.empty()) return;
  std::map<std::string, GemmAlgorithm> now = read(path_);
  for (const auto& [key, algorithm] : waiting_) now[key] = algorithm;
  Json entries = Json::object();
  for (const auto& [name, entry] : now) {
    entries[name] = {{"algorithm", to_hex(entry.bytes)}, {"microseconds", entry.microseconds}};
  }
  write_file_atomically(path_, Json{{"format", kFormat}, {"entries", entries}}.dump(1) + "\n");
  entries_ = std::move(now);
  waiting_.clear();
  waits_ = false;
  written_ = seconds_();
}

void GemmTable::write_due() {
  if (!waits_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  if (is_due()) write_locked();
}

void GemmTable::write() {
  const std::lock_guard lock(mutex_);
  write_locked();
}

size_t GemmTable::size() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

std::unique_ptr<GemmTable> gemm_table_of_environment() {
  const auto value_of = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (std::getenv("TESSERA_GEMM_TABLE") != nullptr) {
    const std::string path = value_of("TESSERA_GEMM_TABLE");
    return path.empty() ? nullptr : std::make_unique<GemmTable>(path);
  }
  std::filesystem::path folder = value_of("XDG_CACHE_HOME");
  if (folder.empty() && !value_of("HOME").empty()) {
    folder = std::filesystem::path(value_of("HOME")) / ".cache";
  }
  if (folder.empty()) return std::make_unique<GemmTable>("");
  folder /= "tessera";
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  const bool is_writable = ::access(folder.c_str(), W_OK | X_OK) == 0;
  return std::make_unique<GemmTable>(is_writable ? (folder / "gemm_table.json").string() : "");
}

GemmTable* process_gemm_table() {
  static std::unique_ptr<GemmTable>& the_table = *[] {
    auto* const made = new std::unique_ptr<GemmTable>(gemm_table_of_environment());
    // Products may be asked for while the program exits: the table is written and stays.
    std::atexit([] {
      if (GemmTable* const table = process_gemm_table()) table->close();
    });
    return made;
  }();
  return the_table.get();
}

std::optional<GemmAlgorithm> find_shipped(const std::string& key) {
  static const auto* const entries = [] {
    auto* const all = new std::map<std::string, GemmAlgorithm>;
    for (const std::string_view text : shipped_gemm_texts()) {
      all->merge(parse("a table that lies in the program", text));
    }
    return all;
  }();
  const auto found = entries->find(key);
  return found == entries->end() ? std::nullopt : std::optional(found->second);
}

std::optional<FastestCandidate> fastest_candidate(
    size_t count, int rounds, const std::function<std::optional<double>(size_t)>& time) {
  std::vector<std::vector<double>> times(count);
  std::vector<bool> runs(count, true);
  for (int round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < count; ++i) {
      if (!runs[i]) continue;
      const std::optional<double> microseconds = time(i);
      runs[i] = microseconds.has_value() && std::isfinite(*microseconds);
      if (runs[i] && round > 0) times[i].push_back(*microseconds);
    }
  }
  std::optional<FastestCandidate> best;
  for (size_t i = 0; i < count; ++i) {
    if (!runs[i] || times[i].empty()) continue;
    const auto middle = times[i].begin() + static_cast<std::ptrdiff_t>(times[i].size() / 2);
    std::nth_element(times[i].begin(), middle, times[i].end());
    if (!best || *middle < 0.99 * best->microseconds) best = FastestCandidate{i, *middle};
  }
  return best;
}

}  // namespace tessera::gpu
