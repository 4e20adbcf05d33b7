// A call on its way from group_calls.cpp, which knows what it is, to group.cpp, which issues it.
// Private to these two.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// What start() needs to know of a call, whatever it is.
struct Group::Request {
  Operation operation;
  DType dtype = DType::kUInt8;
  ReduceOp reduce = ReduceOp::kSum;
  int root = -1;
  int tag = 0;
  int64_t count = 0;  // -1: differs between ranks
  int64_t bytes = 0;
  bool onto = false;
  std::string mistake = {};  // of a send or recv whose peer is to be told
  std::vector<Part> sends = {}, receives = {};
  // Tensors whose memory the transport uses, and where results go that it cannot write directly.
  std::vector<Tensor> keep = {};
  std::vector<std::pair<Tensor, Tensor>> copy_back = {};  // to, from
  std::vector<std::pair<Tensor, Tensor>> add_back = {};   // the same, for what is added there

  Device device() const { return keep.empty() ? kCpu : keep.front().device(); }
  // A contiguous tensor that the transport reads.
  Tensor input(const Tensor& tensor);
  // One that it writes (and reads, where in_place).
  Tensor output(const Tensor& tensor, bool in_place = false);
};

// A call that the backend is about to get; none where a hook holds it back.
struct Group::Issue {
  std::shared_ptr<Work::State> state;
  CallPtr call;

  Work started();
};

// "all_reduce with a mistake (what is wrong)", of the exception that is being handled.
std::string describe_mistake(std::string_view operation);

template <class Check>
void Group::checked(Operation operation, const CollectiveOptions& options, Check&& check) {
  try {
    check();
  } catch (...) {
    invalid(options, name_of(operation));
  }
}

}  // namespace tessera::distributed
