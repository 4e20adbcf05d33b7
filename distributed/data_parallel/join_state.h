// The state that the ranks under join.h agree on, for the model's hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <tessera/distributed/backward/backward_pass.h>
#include <tessera/distributed/data_parallel/join.h>

namespace tessera::distributed {

class JoinState {
 public:
  // `synchronise_buffers`, `synchronise_all`: the model's broadcasts, from rank 0 and from a given
  // rank.
  JoinState(std::shared_ptr<BackwardPass> pass, const JoinOptions& options,
            std::function<void()> synchronise_buffers, std::function<void(int)> synchronise_all)
      : pass_(std::move(pass)),
        options_(options),
        synchronise_buffers_(std::move(synchronise_buffers)),
        synchronise_all_(std::move(synchronise_all)) {
    pass_->divides_each = true;
  }

  bool open() const { return open_; }
  void before_forward();  // on a rank at work
  void finish();
  void close();

 private:
  struct Poll {
    int active = 0;
    bool synchronises = false;
    int64_t micro_index = 0;
  };
  Poll poll(bool active);
  int last_at_work();

  std::shared_ptr<BackwardPass> pass_;
  JoinOptions options_;
  std::function<void()> synchronise_buffers_;
  std::function<void(int)> synchronise_all_;
  bool open_ = true;
  int64_t forwards_ = 0;
};

}  // namespace tessera::distributed
