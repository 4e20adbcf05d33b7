// The checkpoints of automatic naming: which number comes next, whose they are, which of them stay.
// Internal: state_io.h is the interface. For rank 0, which alone looks at the folder.
//
// [Note: runs] A run has an id, which its checkpoints carry: a random one from its first save on,
// or that of the checkpoint that it has loaded, which it goes on with. Numbers go on behind whatever
// the folder has; rotation and "the newest" look at the own run alone. Checkpoints without an id
// (of earlier versions) are those of the run "".
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
// In numeric order. Folders of other names are not among them.
std::vector<NumberedCheckpoint> list_checkpoints(const std::string& project_dir);
std::string checkpoints_folder(const std::string& project_dir);
std::string numbered_folder(const std::string& project_dir, int64_t number);
// "checkpoint_12" -> 12; nothing for any other spelling.
std::optional<int64_t> checkpoint_number(std::string_view name);

// As StateIoOptions has them.
struct CheckpointRotation {
  std::string project_dir;
  int64_t total_limit = 0, keep_every = 0, keep_best = 0;
  bool larger_is_better = false;
};

class NumberedCheckpoints {
 public:
  explicit NumberedCheckpoints(CheckpointRotation options) : options_(std::move(options)) {}

  // The run's id, for the metadata of what is saved. The first call makes it, unless one was taken.
  const std::string& run();
  bool has_run() const { return run_.has_value(); }
  void take_run(std::string id) { run_ = std::move(id); }

  // The first free number from `least` on that is behind all that the folder has.
  int64_t next_number(int64_t least) const;

  // This run has saved it.
  void note(int64_t number, std::optional<double> metric);

  // Newest first: those of the own run, or of that which saved last where this one has not begun,
  // and those whose run cannot be read.
  struct Candidates {
    std::vector<NumberedCheckpoint> list;
    int64_t newest = -1;  // number in the folder, of any run
    int64_t of_other_runs = 0;
  };
  Candidates candidates();

  // Of those of candidates() the one with the best metric, the newest of equals; nothing where none
  // has one.
  std::optional<NumberedCheckpoint> best();

  // After the commit of `newest`: see state_io.h, [Note: rotation].
  void rotate(int64_t newest, const std::function<void(const std::string&)>& warn);

 private:
  struct Known {
    std::string run;
    std::optional<double> metric;
  };
  // Nothing of a folder that cannot be read.
  std::optional<Known> known(const NumberedCheckpoint& checkpoint);
  std::vector<NumberedCheckpoint> own();
  std::vector<std::pair<double, NumberedCheckpoint>> by_metric(
      const std::vector<NumberedCheckpoint>& checkpoints);  // the best first

  const CheckpointRotation options_;
  std::optional<std::string> run_;
  std::map<int64_t, Known> known_;
};

}  // namespace tessera::accelerate
