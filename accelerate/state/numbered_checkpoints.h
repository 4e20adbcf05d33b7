// The checkpoints of automatic naming: the next number, the run of each, and which of them stay.
// Internal: state_io.h is the interface. Only rank 0 uses it.
//
// [Note: runs] A run has an id, which its checkpoints carry: a random one from its first save on,
// or that of the checkpoint that it has loaded and continues. Numbers continue after all in the
// folder; rotation and "the newest" consider the own run only. Checkpoints without an id (of
// earlier versions) belong to the run "".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::accelerate {

struct NumberedCheckpoint {
  int64_t number = 0;
  std::string folder;
};
// In numeric order. Folders with other names are ignored.
std::vector<NumberedCheckpoint> list_checkpoints(const std::string& project_dir);
std::string checkpoints_folder(const std::string& project_dir);
std::string numbered_folder(const std::string& project_dir, int64_t number);
// "checkpoint_12" -> 12; nothing for any other spelling.
std::optional<int64_t> checkpoint_number(std::string_view name);

// The limits of StateIoOptions.
struct CheckpointRotation {
  std::string project_dir;
  int64_t total_limit = 0, keep_every = 0, keep_best = 0;
  bool larger_is_better = false;
};

class NumberedCheckpoints {
 public:
  explicit NumberedCheckpoints(CheckpointRotation options) : options_(std::move(options)) {}

  // The run's id, for the metadata of a save. The first call creates it, unless one was adopted.
  const std::string& run();
  bool has_run() const { return run_.has_value(); }
  void take_run(std::string id) { run_ = std::move(id); }

  // The first free number, at least `least` and after all in the folder.
  int64_t next_number(int64_t least) const;

  // Records that this run has saved it.
  void note(int64_t number, std::optional<double> metric);

  // Newest first: the checkpoints of the own run, or of the run that saved last if this one has not
  // begun, and those whose run cannot be read.
  struct Candidates {
    std::vector<NumberedCheckpoint> list;
    int64_t newest = -1;  // number in the folder, of any run
    int64_t of_other_runs = 0;
  };
  Candidates candidates();

  // The one of candidates() with the best metric, the newest of equals; nothing if none has one.
  std::optional<NumberedCheckpoint> best();

  // Called after the commit of `newest`: see state_io.h, [Note: rotation].
  void rotate(int64_t newest, const std::function<void(const std::string&)>& warn);

 private:
  struct Known {
    std::string run;
    std::optional<double> metric;
  };
  // Nothing for a folder that cannot be read.
  std::optional<Known> known(const NumberedCheckpoint& checkpoint);
  std::vector<NumberedCheckpoint> own();
  std::vector<std::pair<double, NumberedCheckpoint>> by_metric(
      const std::vector<NumberedCheckpoint>& checkpoints);  // the best first

  const CheckpointRotation options_;
  std::optional<std::string> run_;
  std::map<int64_t, Known> known_;
};

}  // namespace tessera::accelerate
