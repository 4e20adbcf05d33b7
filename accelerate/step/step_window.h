// The micro-batches of one optimizer step of one model.
//
//     window.begin_micro(4, loader_is_at_its_end);   // accumulate()
//     window.add_weight(batch_weight / nominal);     // backward()
//     if (window.is_boundary()) ...                  // step, zero_grad, clip, schedule
//
// Bookkeeping without tensors and ranks. Every model has its own window, so models that are trained
// in turn may accumulate different numbers of micro-batches.
#pragma once

#include <cstdint>

namespace tessera {

class StepWindow {
 public:
  // Opens the next micro-batch. The first one of a window fixes their number; `ends` makes this one
  // the last, whatever the number.
  void begin_micro(int64_t steps, bool ends) {
    if (boundary_) {
      index_ = 0;
      steps_ = steps;
      weight_ = 0;
      pending_ = reduced_ = left_ = false;
    } else {
      ++index_;
    }
    weighed_ = false;
    boundary_ = ends || index_ + 1 >= steps_;
  }

  // Ends the window before its last micro-batch: the next one begins a new window.
  void leave() {
    boundary_ = left_ = true;
    pending_ = reduced_ = false;
    weight_ = 0;
  }
  bool left() const { return left_; }  // and no other has begun

  int64_t index() const { return index_; }
  bool is_boundary() const { return boundary_; }  // this micro-batch is the window's last
  bool is_short() const { return boundary_ && index_ + 1 < steps_; }  // the last, before its time
  bool is_whole() const { return boundary_ && index_ == 0; }          // the only one of the window

  // No backward has come since it began, which was before its last micro-batch.
  bool is_untouched() const { return index_ == 0 && !boundary_ && !weighed_; }
  // Backwards have come, but not the last micro-batch's.
  bool awaits_last() const {
    return boundary_ && index_ > 0 && !weighed_ && (pending_ || reduced_);
  }

  // In units of the nominal weight. Several backwards of one micro-batch (two losses) have one
  // weight, that of the first, which the others must repeat. Returns false if they do not.
  bool add_weight(double weight) {
    if (weighed_) return weight == micro_weight_;
    weighed_ = true;
    micro_weight_ = weight;
    weight_ += weight;
    return true;
  }
  double weight() const { return weight_; }  // of this rank's micro-batches so far
  double micro_weight() const { return micro_weight_; }

  // ---- The state of the gradients
  // A backward has added to them, and they were neither reduced nor divided since.
  bool pending() const { return pending_; }
  // They are ready for the optimizer; a further backward in the window must resume the sum.
  bool reduced() const { return reduced_; }
  void set_pending() { pending_ = true, reduced_ = false; }
  void set_reduced() { pending_ = false, reduced_ = true; }

 private:
  int64_t steps_ = 1;
  int64_t index_ = 0;
  bool boundary_ = true;
  bool weighed_ = false;
  bool pending_ = false, reduced_ = false, left_ = false;
  double weight_ = 0, micro_weight_ = 0;
};

}  // namespace tessera
