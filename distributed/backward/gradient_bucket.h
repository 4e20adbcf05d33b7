// Gradients of several parameters of one dtype and device in one flat buffer: the payload of one
// reduction.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/backward/buffer.h>
#include <tessera/distributed/backward/managed_param.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

class GradientBucket {
 public:
  // `members`: positions in `params`, in the order of the buffer. `params` must outlive the bucket.
  GradientBucket(int index, std::vector<size_t> members, std::vector<ManagedParam>& params,
                 Group& ranks, bool gradients_are_views, std::optional<DType> gradient_dtype = {});

  // `wanted` where it is wider than the parameter's dtype, else the parameter's.
  static DType gradient_dtype_of(const Tensor& parameter, std::optional<DType> wanted) {
    return wanted && size_of(*wanted) > size_of(parameter.dtype()) ? *wanted : parameter.dtype();
  }

  int index() const { return index_; }  // in launch order
  Group& ranks() const { return *ranks_; }
  // "bucket 3", and what the ranks have to agree on: in the trace and in errors.
  const std::string& tag() const { return tag_; }
  DType dtype() const { return gradients_.flat().dtype(); }  // of the gradients

  size_t size() const { return members_.size(); }
  std::span<const size_t> members() const { return members_; }
  const ManagedParam& param(size_t slot) const { return (*params_)[members_[slot]]; }
  // The gradients one behind the other, each at a multiple of 16 bytes with zeros between them, and
  // each one's part with the parameter's shape (and its strides, where they are dense).
  const Tensor& gradients() const { return gradients_.flat(); }
  const Tensor& gradient(size_t slot) const { return views_[slot]; }
  int64_t numel() const { return numel_; }              // of the gradients alone
  int64_t bytes() const { return gradients_.bytes(); }  // of all that a reduction sends

  // ---- One backward
  // `changes`: requires_grad_changes.h.
  void begin_backward(const std::string& changes) {
    pending_ = size(), launched_ = false;
    tag_ = "bucket " + std::to_string(index_) + changes;
  }
  // Brings this rank's gradient of a parameter into the buffer: nothing to do if `.grad` is there;
  // zeros if there is none.
  void collect(size_t slot);
  void collect_zeros(size_t slot);
  bool complete() const { return pending_ == 0; }
  bool launched() const { return launched_; }
  void set_launched() { launched_ = true; }
  // Makes the buffer's part the parameter's `.grad`.
  void hand_out(size_t slot);

  // Moves gradients and their `.grad` from `from` to here.
  void adopt(size_t slot, const Tensor& from);
  // Keeps `.grad` in the buffer from now on, or no longer.
  void install_homes();
  void remove_homes();

 private:
  ManagedParam& own(size_t slot) { return (*params_)[members_[slot]]; }

  int index_;
  std::vector<size_t> members_;
  std::vector<ManagedParam>* params_;
  Group* ranks_;
  std::string tag_;
  bool gradients_are_views_;
  FlatBuffer gradients_;
  std::vector<Tensor> views_;
  int64_t numel_ = 0;
  size_t pending_ = 0;
  bool launched_ = false;
};

}  // namespace tessera::distributed
