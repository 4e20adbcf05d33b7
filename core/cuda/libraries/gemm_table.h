// Which algorithm is fastest for a matrix product, measured once and kept in a file.
//
//     GemmTable table("gemm.json");
//     if (const auto known = table.find(key)) ...known->algorithm...
//     table.add(key, {bytes, microseconds});        // the file is whole at any moment
//     table.write_due();                            // with each product
//
// A key names GPU, library version and problem (gemm.h, describe), so that one file serves several
// machines. The file is JSON: {"format": "tessera gemm table 1", "entries": {KEY: {"algorithm":
// hexadecimal, "microseconds": number}}}. It is written at most once a second, since a step of a
// new shape brings a hundred entries, and where the table ends. Entries that another process added
// meanwhile stay; of one key the last one written does. A file that is damaged is a FormatError
// that names it and the place; one that cannot be read or written an IoError. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::gpu {

struct GemmAlgorithm {
  std::string bytes;  // the library's own description, opaque
  double microseconds = 0;
};

class GemmTable {
 public:
  // A file that is not there yet is an empty table. Without a path it is kept in memory alone.
  // `seconds` is the time; null: a steady clock's.
  explicit GemmTable(std::string path, std::function<double()> seconds = nullptr);
  ~GemmTable();  // as close()
  GemmTable(const GemmTable&) = delete;
  GemmTable& operator=(const GemmTable&) = delete;

  std::optional<GemmAlgorithm> find(const std::string& key) const;
  // Writes, or has the entry wait where the last time is less than a second ago. An entry that
  // could not be written is not added.
  void add(const std::string& key, const GemmAlgorithm& algorithm);
  // Writes what has waited for its second.
  void write_due();
  // Writes what waits.
  void write();
  // The same; what goes wrong is said on stderr.
  void close() noexcept;
  size_t size() const;
  const std::string& path() const { return path_; }

 private:
  void write_locked();
  bool is_due() const;

  std::string path_;
  std::function<double()> seconds_;
  mutable std::mutex mutex_;
  std::map<std::string, GemmAlgorithm> entries_;
  std::map<std::string, GemmAlgorithm> waiting_;  // of entries_
  std::atomic<bool> waits_ = false;
  double written_;  // when
};

// The table that the environment asks for. TESSERA_GEMM_TABLE names its file; empty, there is none.
// Unset: tessera/gemm_table.json in the user's cache folder (XDG_CACHE_HOME or ~/.cache), which is
// made; in memory where it cannot be written, and then each process measures for itself.
std::unique_ptr<GemmTable> gemm_table_of_environment();
// The same, made by the first call and written for the last time where the program exits; null
// where the environment asks for none.
GemmTable* process_gemm_table();

// What was measured on cards and lies in the program (core/cuda/libraries/tables, which
// scripts/gpu_kit.sh take writes): keys have the names of cards. Asked after the user's table.
std::optional<GemmAlgorithm> find_shipped(const std::string& key);
std::vector<std::string_view> shipped_gemm_texts();  // the files; generated

// Runs candidates 0 to count - 1 in turn, `rounds` times after one turn that does not count, and
// compares their medians. time(i) is the microseconds of one run, or nothing where the candidate
// cannot run, which excludes it. Candidates come in the library's order of preference: a later one
// has to be 1% faster than the best before it, which is more than a measurement trembles. Nothing
// where none runs.
struct FastestCandidate {
  size_t index = 0;
  double microseconds = 0;
};
std::optional<FastestCandidate> fastest_candidate(
    size_t count, int rounds, const std::function<std::optional<double>(size_t)>& time);

}  // namespace tessera::gpu
