// The calls of a group: what each asks of its arguments, and which bytes go where.
#include <algorithm>
#include <optional>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/distributed/transport/deterministic.h>
#include <tessera/distributed/transport/group_request.h>

namespace tessera::distributed {
namespace {

Part part_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.is_meta() ? nullptr : static_cast<char*>(tensor.data()), tensor.nbytes()};
}

// Memory that a collective writes. It is asked for on the stream that reads it later, as freed
// memory goes to what its own stream does next.
Tensor result_buffer(const Tensor& like) {
  return raw::empty(like.shape(), like.dtype(), like.device());
}

}  // namespace

Tensor Group::Request::input(const Tensor& tensor) {
  keep.push_back(contiguous(detach(tensor)));
  return keep.back();
}

Tensor Group::Request::output(const Tensor& tensor, bool in_place) {
  tensor.bump_version();
  if (tensor.is_contiguous()) {
    keep.push_back(tensor);
    return tensor;
  }
  const Tensor buffer = in_place ? contiguous(detach(tensor)) : result_buffer(tensor);
  keep.push_back(buffer);
  copy_back.emplace_back(detach(tensor), buffer);
  return buffer;
}

void Group::check_rank(int rank, std::string_view what) const {
  TS_CHECK(rank >= 0 && rank < size(), name_, what, " is rank ", rank,
           "; the group has ranks 0 to ", size() - 1);
}

// What a rank sends to itself.
void Group::check_own(std::span<const Tensor> parts, const Tensor& other, std::string_view where,
                      std::string_view part_name, std::string_view other_name) const {
  const Tensor& own = parts[static_cast<size_t>(rank_)];
  TS_CHECK_SHAPE(own.numel() == other.numel(), where, "the ", part_name, " for rank ", rank_,
                 " itself is ", own, " and its ", other_name, " ", other,
                 "; they need the same number of elements");
}

// Of one contiguous buffer, the piece that each rank sums.
std::vector<Part> Group::cut(const Tensor& flat) const {
  const Part all = part_of(flat);
  const int64_t element = size_of(flat.dtype());
  const int64_t step = (flat.numel() + size() - 1) / size() * element;
  std::vector<Part> parts(ranks_.size());
  for (size_t r = 0; r < parts.size(); ++r) {
    const int64_t begin = std::min(static_cast<int64_t>(r) * step, all.bytes);
    parts[r] = {all.data == nullptr ? nullptr : all.data + begin,
                std::min(step, all.bytes - begin)};
  }
  return parts;
}

namespace {

// One device and one dtype, which the group can carry.
void check_tensors(std::span<const Tensor> tensors, const Tensor& model, Backend* backend,
                   std::string_view where) {
  check_whole(model, where);
  for (const Tensor& tensor : tensors) {
    check_whole(tensor, where);
    TS_CHECK_DTYPE(tensor.dtype() == model.dtype(), where, "tensors of one call have one dtype; ",
                   model, " and ", tensor);
    TS_CHECK_DEVICE(tensor.device() == model.device(), where,
                    "tensors of one call are on one device; ", model, " and ", tensor);
  }
  TS_CHECK_DEVICE(!backend || backend->serves(model.device()), where, "the ", backend->name(),
                  " backend does not carry tensors of ", model.device(), "; given ", model);
}

const char* bytes_at(const Tensor& tensor) { return static_cast<const char*>(tensor.data()); }

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.is_meta() || b.is_meta()) return false;
  if (!a.is_contiguous() || !b.is_contiguous()) return false;  // one of them travels as a copy
  return bytes_at(a) < bytes_at(b) + b.nbytes() && bytes_at(b) < bytes_at(a) + a.nbytes();
}
// Whether `part` has memory of `whole`, and not as its r-th part.
bool clashes(const Tensor& whole, const Tensor& part, int r) {
  return overlap(whole, part) && bytes_at(part) != bytes_at(whole) + r * part.nbytes();
}

}  // namespace

Work Group::all_reduce(const Tensor& tensor, ReduceOp op, const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllReduce, .reduce = op};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "all_reduce");
    check_reduction(tensor.dtype(), op, "all_reduce");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  const NoGradGuard no_grad;
  request.sends = cut(request.output(tensor, true));
  return start(std::move(request), options);
}

Work Group::reduce(const Tensor& tensor, int root, ReduceOp op, const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduce, .reduce = op, .root = root};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "reduce");
    check_reduction(tensor.dtype(), op, "reduce");
    check_rank(root, "reduce: root");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  const NoGradGuard no_grad;
  request.sends = cut(request.output(tensor, true));
  return start(std::move(request), options);
}

Work Group::broadcast(const Tensor& tensor, int root, const CollectiveOptions& options) {
  Request request{.operation = Operation::kBroadcast, .root = root};
  checked(request.operation, options, [&] {
    check_tensors({&tensor, 1}, tensor, backend_.get(), "broadcast");
    check_rank(root, "broadcast: root");
  });
  request.dtype = tensor.dtype();
  request.count = tensor.numel();
  request.bytes = tensor.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  if (rank_ == root) {
    request.sends[static_cast<size_t>(root)] = part_of(request.input(tensor));
  } else {
    request.receives[static_cast<size_t>(root)] = part_of(request.output(tensor));
  }
  return start(std::move(request), options);
}

namespace {

void check_parts(const Tensor& whole, const Tensor& part, int ranks, std::string_view where,
                 std::string_view whole_name, std::string_view part_name) {
  TS_CHECK_SHAPE(whole.numel() == part.numel() * ranks, where, whole_name, " must have ", ranks,
                 " times the elements of ", part_name, "; given ", whole, " and ", part);
}

std::vector<Part> even_parts(const Tensor& flat, size_t ranks) {
  std::vector<Part> parts(ranks);
  const Part all = part_of(flat);
  const int64_t step = all.bytes / static_cast<int64_t>(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    parts[r] = {all.data == nullptr ? nullptr : all.data + static_cast<int64_t>(r) * step, step};
  }
  return parts;
}

void check_gather_in_place(bool clash, const Tensor& output, const Tensor& input) {
  TS_CHECK(!clash, "all_gather",
           "the input is this rank's own part of the output, or not of its memory; ", input,
           " overlaps ", output, "; give it memory of its own");
}

}  // namespace

Work Group::all_gather(const Tensor& output, const Tensor& input,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllGather};
  checked(request.operation, options, [&] {
    check_tensors({&output, 1}, input, backend_.get(), "all_gather");
    check_parts(output, input, size(), "all_gather", "output", "input");
    check_gather_in_place(clashes(output, input, rank_), output, input);
  });
  request.dtype = input.dtype();
  request.count = input.numel();
  request.bytes = input.nbytes();
  const NoGradGuard no_grad;
  request.sends.assign(ranks_.size(), part_of(request.input(input)));
  request.receives = even_parts(request.output(output), ranks_.size());
  return start(std::move(request), options);
}

Work Group::all_gather(std::span<const Tensor> outputs, const Tensor& input,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllGather, .count = -1};
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(outputs) == size(), "all_gather", "needs an output for each of ", size(),
             " ranks; given ", outputs.size());
    check_tensors(outputs, input, backend_.get(), "all_gather");
    check_own(outputs, input, "all_gather", "output", "input");
    for (int r = 0; r < size(); ++r) {
      const Tensor& output = outputs[static_cast<size_t>(r)];
      check_gather_in_place(r == rank_ ? clashes(output, input, 0) : overlap(output, input), output,
                            input);
    }
  });
  request.dtype = input.dtype();
  request.bytes = input.nbytes();
  const NoGradGuard no_grad;
  request.sends.assign(ranks_.size(), part_of(request.input(input)));
  for (const Tensor& output : outputs) {
    request.receives.push_back(part_of(request.output(output)));
  }
  return start(std::move(request), options);
}

Work Group::reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op,
                           const CollectiveOptions& options) {
  return scatter_sums(output, input, op, false, options);
}
Work Group::reduce_scatter(const Tensor& output, std::span<const Tensor> inputs, ReduceOp op,
                           const CollectiveOptions& options) {
  return scatter_sums(output, inputs, op, false, options);
}
Work Group::reduce_scatter_onto(const Tensor& output, const Tensor& input,
                                const CollectiveOptions& options) {
  return scatter_sums(output, input, ReduceOp::kSum, true, options);
}
Work Group::reduce_scatter_onto(const Tensor& output, std::span<const Tensor> inputs,
                                const CollectiveOptions& options) {
  return scatter_sums(output, inputs, ReduceOp::kSum, true, options);
}

namespace {

std::string_view name_of_scatter(bool onto) {
  return onto ? "reduce_scatter_onto" : "reduce_scatter";
}

// clash: the output has memory of the input where it must not.
void check_in_place(bool clash, bool onto, const Tensor& output, const Tensor& input) {
  TS_CHECK(!clash, name_of_scatter(onto),
           onto ? "the output is not of the input's memory, or its part would count twice; "
                : "the output is this rank's own part of the input, or not of its memory; ",
           output, " overlaps ", input, "; give it memory of its own");
}

}  // namespace

Work Group::scatter_sums(const Tensor& output, const Tensor& input, ReduceOp op, bool onto,
                         const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduceScatter, .reduce = op, .onto = onto};
  checked(request.operation, options, [&] {
    const std::string_view where = name_of_scatter(onto);
    check_tensors({&output, 1}, input, backend_.get(), where);
    check_reduction(input.dtype(), op, where);
    check_parts(input, output, size(), where, "input", "output");
    check_in_place(onto ? overlap(input, output) : clashes(input, output, rank_), onto, output,
                   input);
  });
  request.dtype = input.dtype();
  request.count = input.numel();
  request.bytes = output.nbytes();
  const NoGradGuard no_grad;
  request.sends = even_parts(request.input(input), ranks_.size());
  receive_sum(request, output);
  return start(std::move(request), options);
}

Work Group::scatter_sums(const Tensor& output, std::span<const Tensor> inputs, ReduceOp op,
                         bool onto, const CollectiveOptions& options) {
  Request request{.operation = Operation::kReduceScatter, .reduce = op, .count = -1, .onto = onto};
  checked(request.operation, options, [&] {
    const std::string_view where = name_of_scatter(onto);
    TS_CHECK(std::ssize(inputs) == size(), where, "needs an input for each of ", size(),
             " ranks; given ", inputs.size());
    check_tensors(inputs, output, backend_.get(), where);
    check_reduction(output.dtype(), op, where);
    check_own(inputs, output, where, "input", "output");
    for (int r = 0; r < size(); ++r) {
      const Tensor& input = inputs[static_cast<size_t>(r)];
      const bool may_be_same = r == rank_ && !onto;
      check_in_place(may_be_same ? clashes(input, output, 0) : overlap(input, output), onto, output,
                     input);
    }
  });
  request.dtype = output.dtype();
  request.bytes = output.nbytes();
  const NoGradGuard no_grad;
  for (const Tensor& input : inputs) request.sends.push_back(part_of(request.input(input)));
  receive_sum(request, output);
  return start(std::move(request), options);
}

// Where the sum of this rank's part goes: the transport adds to what the output holds, if at all,
// on CPUs. On a GPU it has no kernel for that, and alone a rank has no transport.
void Group::receive_sum(Request& request, const Tensor& output) const {
  const auto self = static_cast<size_t>(rank_);
  if (request.onto && size() == 1) {
    request.add_back.emplace_back(detach(output), view(request.keep[0], output.shape()));
    return;
  }
  request.receives.resize(ranks_.size());
  if (request.onto && output.device().is_cuda()) {
    const Tensor sum = result_buffer(output);
    output.bump_version();
    request.keep.push_back(sum);
    request.add_back.emplace_back(detach(output), sum);
    request.receives[self] = part_of(sum);
  } else {
    request.receives[self] = part_of(request.output(output, request.onto));
  }
}

Work Group::all_to_all(std::span<const Tensor> outputs, std::span<const Tensor> inputs,
                       const CollectiveOptions& options) {
  Request request{.operation = Operation::kAllToAll, .count = -1};
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(outputs) == size() && std::ssize(inputs) == size(), "all_to_all",
             "needs an input and an output for each of ", size(), " ranks; given ", inputs.size(),
             " and ", outputs.size());
    check_tensors(inputs, inputs[0], backend_.get(), "all_to_all");
    check_tensors(outputs, inputs[0], backend_.get(), "all_to_all");
    check_own(outputs, inputs[static_cast<size_t>(rank_)], "all_to_all", "output", "input");
  });
  request.dtype = inputs[0].dtype();
  const NoGradGuard no_grad;
  for (const Tensor& input : inputs) {
    request.sends.push_back(part_of(request.input(input)));
    request.bytes += input.nbytes();
  }
  for (const Tensor& output : outputs) {
    request.receives.push_back(part_of(request.output(output)));
  }
  return start(std::move(request), options);
}

Work Group::gather(std::span<const Tensor> outputs, const Tensor& input, int root,
                   const CollectiveOptions& options) {
  Request request{.operation = Operation::kGather, .root = root, .count = -1};
  checked(request.operation, options, [&] {
    check_rank(root, "gather: root");
    TS_CHECK(std::ssize(outputs) == (rank_ == root ? size() : 0), "gather",
             "needs an output for each of ", size(), " ranks at root ", root,
             " and none elsewhere; rank ", rank_, " gives ", outputs.size());
    check_tensors(outputs, input, backend_.get(), "gather");
    if (rank_ == root) check_own(outputs, input, "gather", "output", "input");
  });
  request.dtype = input.dtype();
  request.bytes = input.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  request.sends[static_cast<size_t>(root)] = part_of(request.input(input));
  for (size_t r = 0; r < outputs.size(); ++r) {
    request.receives[r] = part_of(request.output(outputs[r]));
  }
  return start(std::move(request), options);
}

Work Group::scatter(const Tensor& output, std::span<const Tensor> inputs, int root,
                    const CollectiveOptions& options) {
  Request request{.operation = Operation::kScatter, .root = root, .count = -1};
  checked(request.operation, options, [&] {
    check_rank(root, "scatter: root");
    TS_CHECK(std::ssize(inputs) == (rank_ == root ? size() : 0), "scatter",
             "needs an input for each of ", size(), " ranks at root ", root,
             " and none elsewhere; rank ", rank_, " gives ", inputs.size());
    check_tensors(inputs, output, backend_.get(), "scatter");
    if (rank_ == root) check_own(inputs, output, "scatter", "input", "output");
  });
  request.dtype = output.dtype();
  request.bytes = output.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  for (size_t r = 0; r < inputs.size(); ++r) {
    request.sends[r] = part_of(request.input(inputs[r]));
  }
  request.receives[static_cast<size_t>(root)] = part_of(request.output(output));
  return start(std::move(request), options);
}

Work Group::permute(const Tensor& output, const Tensor& input, std::span<const int> targets,
                    const CollectiveOptions& options) {
  Request request{.operation = Operation::kPermute, .count = -1};
  const auto self = static_cast<size_t>(rank_);
  size_t source = 0;  // whose target this rank is
  checked(request.operation, options, [&] {
    TS_CHECK(std::ssize(targets) == size(), "permute", "needs a target for each of ", size(),
             " ranks; given ", targets.size());
    std::vector<int> sources(ranks_.size(), -1);
    for (int r = 0; r < size(); ++r) {
      const int target = targets[static_cast<size_t>(r)];
      check_rank(target, "permute: target");
      int& from = sources[static_cast<size_t>(target)];
      TS_CHECK(from < 0, "permute", "rank ", target, " is the target of ranks ", from, " and ", r,
               "; each rank is the target of one");
      from = r;
    }
    source = static_cast<size_t>(sources[self]);
    check_tensors({&output, 1}, input, backend_.get(), "permute");
    TS_CHECK_SHAPE(source != self || output.numel() == input.numel(), "permute", "rank ", rank_,
                   " is its own target, with input ", input, " and output ", output,
                   "; they need the same number of elements");
    TS_CHECK(source == self ? !clashes(output, input, 0) : !overlap(output, input), "permute",
             "the output ", output, " overlaps the input ", input, "; give it memory of its own");
  });
  request.dtype = input.dtype();
  request.bytes = input.nbytes();
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  request.sends[static_cast<size_t>(targets[self])] = part_of(request.input(input));
  request.receives[source] = part_of(request.output(output));
  return start(std::move(request), options);
}

void Group::check_message(std::string_view name, const Tensor& tensor, int peer, int tag) const {
  const std::string call(name);
  check_rank(peer, call + ": peer");
  TS_CHECK(peer != rank_, name_, call, ": rank ", rank_, " is not its own peer");
  TS_CHECK(tag >= 0 && tag < kMaxTag, name_, call, ": a tag is in [0, 2^29); given ", tag);
  check_tensors({&tensor, 1}, tensor, backend_.get(), call);
}

// Tells the peer of a message, if there can be one, that it will not come.
void Group::refuse(Operation operation, int peer, int tag, const std::string& mistake,
                   const CollectiveOptions& options) {
  if (peer < 0 || peer >= size() || peer == rank_ || tag < 0 || tag >= kMaxTag) return;
  Request request{.operation = operation, .root = peer, .tag = tag};
  request.mistake = detail::concatenate("rank ", rank_, ": ", mistake);
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  start(std::move(request), options);
}

Group::Request Group::message(Operation operation, const Tensor& tensor, int peer, int tag) const {
  Request request{.operation = operation,
                  .dtype = tensor.dtype(),
                  .root = peer,
                  .tag = tag,
                  .count = tensor.numel(),
                  .bytes = tensor.nbytes()};
  request.sends.resize(ranks_.size());
  request.receives.resize(ranks_.size());
  const NoGradGuard no_grad;
  if (operation == Operation::kSend) {
    request.sends[static_cast<size_t>(peer)] = part_of(request.input(tensor));
  } else {
    request.receives[static_cast<size_t>(peer)] = part_of(request.output(tensor));
  }
  return request;
}

Work Group::send_or_recv(Operation operation, const Tensor& tensor, int peer, int tag,
                         const CollectiveOptions& options) {
  try {
    check_message(name_of(operation), tensor, peer, tag);
  } catch (...) {
    const std::exception_ptr mistake = std::current_exception();
    refuse(operation, peer, tag, describe_mistake(name_of(operation)), options);
    std::rethrow_exception(mistake);
  }
  return start(message(operation, tensor, peer, tag), options);
}

Work Group::send(const Tensor& tensor, int peer, int tag, const CollectiveOptions& options) {
  return send_or_recv(Operation::kSend, tensor, peer, tag, options);
}

Work Group::recv(const Tensor& tensor, int peer, int tag, const CollectiveOptions& options) {
  return send_or_recv(Operation::kRecv, tensor, peer, tag, options);
}

namespace {

// What is received would change what is sent, or what another message puts there.
void check_apart(std::span<const PeerTensor> sends, std::span<const PeerTensor> receives) {
  for (size_t i = 0; i < receives.size(); ++i) {
    const PeerTensor& to = receives[i];
    for (const std::span others : {sends, receives.subspan(i + 1)}) {
      for (const PeerTensor& other : others) {
        TS_CHECK(!overlap(to.tensor, other.tensor), "exchange", "what comes from rank ", to.peer,
                 " would be written over the message ", other.tag, " with rank ", other.peer, ", ",
                 other.tensor, "; give it memory of its own");
      }
    }
  }
}

}  // namespace

Work Group::exchange(const std::vector<PeerTensor>& sends, const std::vector<PeerTensor>& receives,
                     const CollectiveOptions& options) {
  TS_CHECK_AS(DistributedError, !shut_down_, name_,
              "the group was shut down; no exchange may follow");
  const TimelineRange range("exchange");
  try {
    for (const auto* list : {&sends, &receives}) {
      for (const auto& [peer, tensor, tag] : *list) check_message("exchange", tensor, peer, tag);
    }
    check_apart(sends, receives);
  } catch (...) {
    const std::exception_ptr mistake = std::current_exception();
    const std::string text = describe_mistake("exchange");
    for (const auto& one : sends) refuse(Operation::kSend, one.peer, one.tag, text, options);
    for (const auto& one : receives) refuse(Operation::kRecv, one.peer, one.tag, text, options);
    std::rethrow_exception(mistake);
  }
  if (sends.empty() && receives.empty()) return {};
  raise_unseen(options);
  // All are made before one is issued: what is issued has to start, or peers wait for it.
  std::vector<Request> requests;
  for (const auto& [peer, tensor, tag] : sends) {
    requests.push_back(message(Operation::kSend, tensor, peer, tag));
  }
  for (const auto& [peer, tensor, tag] : receives) {
    requests.push_back(message(Operation::kRecv, tensor, peer, tag));
  }
  std::vector<Issue> issued;
  std::vector<CallPtr> calls;
  for (Request& request : requests) {
    issued.push_back(issue(std::move(request), options));
    calls.push_back(issued.back().call);
  }
  backend_->start_together(calls);
  std::vector<Work> works;
  for (Issue& one : issued) works.push_back(one.started());
  return join(std::move(works), {});
}

}  // namespace tessera::distributed
