// What a training tells of its steps: rows of JSON in a file, and a line on the screen.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <tessera/precision/fp8_linear.h>

namespace tessera::examples {

struct StepRow {
  int64_t step = 0;
  double loss = 0;
  std::optional<double> val_loss = {};
  double grad_norm = 0, lr = 0, milliseconds = 0, tokens_per_s = 0;
  std::vector<int64_t> peak_bytes = {};          // by rank
  std::optional<precision::Fp8Report> fp8 = {};  // since the training began, or went on
};

class TrainingLog {
 public:
  // An empty path: no file. A file that is there is continued behind the rows up to step `kept`;
  // without `kept` it is begun anew. IoError where it cannot be written, here and by write().
  TrainingLog(std::string path, std::optional<int64_t> kept);
  ~TrainingLog();
  TrainingLog(const TrainingLog&) = delete;
  TrainingLog& operator=(const TrainingLog&) = delete;

  // Whether anybody looks at every row.
  bool is_followed() const { return file_ != nullptr || terminal_; }
  // Where the output is a file it gets a line for each validation and each hundredth step.
  static bool is_shown(int64_t step) { return step % 100 == 0; }
  void write(const StepRow& row);
  void show(const StepRow& row, int64_t steps, bool last);

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
  bool terminal_;
  double smooth_ms_ = 0;
  std::optional<double> last_val_loss_;
};

}  // namespace tessera::examples
