#include "training_log.h"

#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>

namespace tessera::examples {

using Json = nlohmann::json;

TrainingLog::TrainingLog(std::string path, std::optional<int64_t> kept)
    : path_(std::move(path)), terminal_(isatty(STDOUT_FILENO) != 0) {
  if (path_.empty()) return;
  std::string rows;
  if (kept) {
    std::ifstream old(path_);
    for (std::string line; std::getline(old, line);) {
      const Json row = Json::parse(line, nullptr, false);
      if (row.is_object() && row.value("step", *kept + 1) <= *kept) rows += line + "\n";
    }
  }
  // Devices cannot be replaced and have no rows to keep.
  if (!rows.empty()) write_file_atomically(path_, rows);
  file_ = std::fopen(path_.c_str(), rows.empty() ? "w" : "a");
  TS_CHECK_AS(IoError, file_ != nullptr, "train", "cannot write the log '", path_,
              "': ", std::strerror(errno), "; choose a --log file that can be written");
}

TrainingLog::~TrainingLog() {
  if (file_ != nullptr) std::fclose(file_);
}

void TrainingLog::write(const StepRow& row) {
  if (file_ == nullptr) return;
  const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
  Json json = {{"step", row.step},
               {"loss", number(row.loss)},
               {"val_loss", row.val_loss ? number(*row.val_loss) : Json()},
               {"grad_norm", number(row.grad_norm)},
               {"lr", row.lr},
               {"ms", row.milliseconds},
               {"tokens_per_s", row.tokens_per_s},
               {"peak_bytes", std::ranges::max(row.peak_bytes)},
               {"peak_bytes_by_rank", row.peak_bytes}};
  if (row.fp8) {
    json["fp8_calls"] = row.fp8->fp8_calls();
    json["fp8_fallbacks"] = row.fp8->fallbacks();
  }
  std::fputs((json.dump() + "\n").c_str(), file_);
  TS_CHECK_AS(IoError, std::fflush(file_) == 0, "train", "cannot write the log '", path_,
              "' at step ", row.step, ": ", std::strerror(errno),
              "; free some space or choose another --log. The last save is kept");
}

void TrainingLog::show(const StepRow& row, int64_t steps, bool last) {
  if (row.val_loss) last_val_loss_ = row.val_loss;
  const double ms = row.milliseconds, tokens = row.tokens_per_s * ms;
  smooth_ms_ = smooth_ms_ == 0 ? ms : 0.95 * smooth_ms_ + 0.05 * ms;
  const bool stays = row.val_loss || last;
  if (!terminal_ && !stays && !is_shown(row.step)) return;
  const auto seconds_left =
      static_cast<int>(static_cast<double>(steps - row.step) * smooth_ms_ / 1e3);
  char val_text[32] = "-";
  if (last_val_loss_) std::snprintf(val_text, sizeof val_text, "%.4f", *last_val_loss_);
  std::printf("%sstep %lld/%lld  loss %.4f  val %s  %.0f tokens/s  %.1f ms/step  %dm%02ds left%s",
              terminal_ ? "\r\033[K" : "", static_cast<long long>(row.step),
              static_cast<long long>(steps), row.loss, val_text, tokens / smooth_ms_, smooth_ms_,
              seconds_left / 60, seconds_left % 60, terminal_ && !stays ? "" : "\n");
  std::fflush(stdout);
}

}  // namespace tessera::examples
