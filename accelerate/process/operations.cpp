#include <tessera/accelerate/process/operations.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::accelerate {
namespace {

using distributed::CoalescedScope;
using distributed::CollectiveOptions;
using distributed::Group;
using distributed::ReduceOp;

CollectiveOptions tagged(std::string_view tag, const OperationOptions& options) {
  return {.tag = tag, .where = options.where};
}

// Numbers travel on the device of the tensors that they describe: a group may carry no other.
Device device_of(const detail::Leaves& leaves) {
  return leaves.empty() ? kCpu : leaves.front()->device();
}

// Row r: the numbers of rank r. All give equally many.
std::vector<std::vector<int64_t>> numbers_of_all(const std::vector<int64_t>& own, Group& group,
                                                 const Device& device,
                                                 const CollectiveOptions& options) {
  const NoGradGuard no_grad;
  const Tensor input = tensor(std::span(own), {static_cast<int64_t>(own.size())}).to(device);
  const Tensor all = distributed::all_gather(input, group, options).to(kCpu);
  const int64_t* values = all.data_as<int64_t>();
  std::vector<std::vector<int64_t>> rows;
  for (int rank = 0; rank < group.size(); ++rank, values += own.size()) {
    rows.emplace_back(values, values + own.size());
  }
  return rows;
}

// "f32[2, 3], i64[4]"
std::string shapes_of(const detail::Leaves& leaves) {
  PlainText<std::ostringstream> out;
  for (size_t i = 0; i < leaves.size(); ++i) {
    out << (i == 0 ? "" : ", ") << name_of(leaves[i]->dtype()) << '[';
    for (int d = 0; d < leaves[i]->dim(); ++d) out << (d == 0 ? "" : ", ") << leaves[i]->size(d);
    out << ']';
  }
  return leaves.empty() ? "no tensor" : out.str();
}

// On every rank before anything is sent: a part of a sharded tensor is no value of this rank.
void check_whole_leaves(std::string_view operation, const detail::Leaves& leaves) {
  for (const Tensor* leaf : leaves) check_whole(*leaf, operation);
}

void check_shapes(std::string_view operation, const detail::Leaves& leaves, Group& group,
                  const OperationOptions& options) {
  if (!options.debug) return;
  detail::check_equal_on_all_ranks(
      operation, shapes_of(leaves),
      "make them equal, pad_across_processes() for lengths that differ", group, options);
}

[[noreturn]] void throw_mismatch(std::string_view operation,
                                 const std::vector<std::string>& descriptions,
                                 std::string_view remedy, const OperationOptions& options) {
  PlainText<std::ostringstream> out;
  out << operation << ": the tensors of the ranks do not fit together (called at "
      << options.where.file_name() << ':' << options.where.line() << ");";
  for (size_t rank = 0; rank < descriptions.size(); ++rank) {
    out << "\n  rank " << rank << ": " << descriptions[rank];
  }
  out << "\n  " << remedy << '.';
  throw OperationMismatch(out.str());
}

std::vector<std::string> descriptions_of_all(const std::string& own, Group& group,
                                             const CollectiveOptions& options) {
  std::vector<std::string> all;
  for (const auto& object : distributed::all_gather_objects(group, own, options)) {
    all.push_back(object.get<std::string>());
  }
  return all;
}

}  // namespace

namespace detail {

void check_equal_on_all_ranks(std::string_view operation, const std::string& description,
                              std::string_view remedy, Group& group,
                              const OperationOptions& options) {
  if (group.size() == 1) return;
  const std::vector<std::string> all =
      descriptions_of_all(description, group, tagged("debug shapes", options));
  for (const std::string& other : all) {
    if (other != all[0]) throw_mismatch(operation, all, remedy, options);
  }
}

void gather(const Leaves& leaves, Group& group, const OperationOptions& options) {
  check_whole_leaves("gather", leaves);
  const NoGradGuard no_grad;
  if (group.size() > 1) check_shapes("gather", leaves, group, options);
  CoalescedScope calls(group, tagged("gather", options));
  std::vector<Tensor> results;
  for (const Tensor* leaf : leaves) {
    const Tensor own = leaf->dim() == 0 ? raw::view(leaf->detach(), {1}) : leaf->detach();
    if (group.size() == 1) {
      results.push_back(own);
      continue;
    }
    Shape shape = own.shape();
    shape[0] *= group.size();
    results.push_back(raw::empty(shape, own.dtype(), own.device()));
    calls.all_gather(results.back(), own);
  }
  if (group.size() > 1) calls.finish().wait();
  for (size_t i = 0; i < leaves.size(); ++i) *leaves[i] = results[i];
}

void reduce(const Leaves& leaves, RankReduction reduction, Group& group,
            const OperationOptions& options) {
  // [Trap: reduce("none") sums] Each rank keeps what it has.
  if (reduction == RankReduction::kNone) return;
  check_whole_leaves("reduce", leaves);
  for (const Tensor* leaf : leaves) {
    // One rank refuses what several would.
    TS_CHECK_DTYPE(reduction != RankReduction::kMean || is_floating(leaf->dtype()), "reduce",
                   "the mean of integers is none; got ", *leaf,
                   "; take the sum, or convert to a floating dtype first");
  }
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  check_shapes("reduce", leaves, group, options);
  const ReduceOp op = reduction == RankReduction::kSum    ? ReduceOp::kSum
                      : reduction == RankReduction::kMean ? ReduceOp::kMean
                                                          : ReduceOp::kMax;
  CoalescedScope calls(group, tagged("reduce", options));
  std::vector<Tensor> results;
  for (const Tensor* leaf : leaves) {
    results.push_back(leaf->detach().clone());
    calls.all_reduce(results.back(), op);
  }
  calls.finish().wait();
  for (size_t i = 0; i < leaves.size(); ++i) *leaves[i] = results[i];
}

void broadcast(const Leaves& leaves, int from, Group& group, const OperationOptions& options) {
  TS_CHECK(from >= 0 && from < group.size(), "broadcast", "rank ", from, " is outside the ",
           group.size(), " ranks of the group.");
  check_whole_leaves("broadcast", leaves);
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  check_shapes("broadcast", leaves, group, options);
  CoalescedScope calls(group, tagged("broadcast", options));
  std::vector<Tensor> results;
  for (const Tensor* leaf : leaves) {
    results.push_back(group.rank() == from
                          ? leaf->detach()
                          : raw::empty(leaf->shape(), leaf->dtype(), leaf->device()));
    calls.broadcast(results.back(), from);
  }
  calls.finish().wait();
  for (size_t i = 0; i < leaves.size(); ++i) *leaves[i] = results[i];
}

void pad(const Leaves& leaves, const PadOptions& pad, Group& group,
         const OperationOptions& options) {
  check_whole_leaves("pad_across_processes", leaves);
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  // The number of tensors, and of each: dimensions, dtype, size along the dimension (-1: none).
  std::vector<int64_t> own;
  for (const Tensor* leaf : leaves) {
    const int64_t dim = pad.dim < 0 ? pad.dim + leaf->dim() : pad.dim;
    own.push_back(leaf->dim());
    own.push_back(static_cast<int64_t>(leaf->dtype()));
    own.push_back(dim >= 0 && dim < leaf->dim() ? leaf->size(dim) : -1);
  }
  const auto counts = numbers_of_all({static_cast<int64_t>(own.size())}, group, device_of(leaves),
                                     tagged("pad_across_processes: number of tensors", options));
  bool fits = std::ranges::all_of(counts, [&](const auto& row) { return row[0] == counts[0][0]; });
  std::vector<std::vector<int64_t>> all;
  if (fits && !own.empty()) {
    all = numbers_of_all(own, group, device_of(leaves),
                         tagged("pad_across_processes: sizes", options));
    for (size_t i = 0; i < own.size(); ++i) {
      for (const auto& row : all) fits &= i % 3 == 2 || row[i] == all[0][i];
    }
  }
  if (!fits) {
    throw_mismatch("pad_across_processes",
                   descriptions_of_all(shapes_of(leaves), group, tagged("shapes", options)),
                   "give tensors of one number of dimensions and one dtype on all ranks", options);
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Tensor& leaf = *leaves[i];
    const int64_t size = own[3 * i + 2];
    int64_t longest = size;
    for (const auto& row : all) longest = std::max(longest, row[3 * i + 2]);
    if (longest == size) continue;
    const int64_t dim = pad.dim < 0 ? pad.dim + leaf.dim() : pad.dim;
    Shape shape = leaf.shape();
    shape[static_cast<int>(dim)] = longest;
    const Tensor padded = raw::full(shape, pad.pad_index, leaf.dtype(), leaf.device());
    raw::narrow(padded, dim, pad.pad_first ? longest - size : 0, size).copy_(leaf.detach());
    *leaves[i] = padded;
  }
}

nlohmann::json gather_lists(const nlohmann::json& own, Group& group,
                            const OperationOptions& options) {
  nlohmann::json all = nlohmann::json::array();
  const CollectiveOptions collective = tagged("gather_object", options);
  for (auto& list : distributed::all_gather_objects(group, own, collective)) {
    for (auto& element : list) all.push_back(std::move(element));
  }
  return all;
}

nlohmann::json broadcast_json(const nlohmann::json& object, int from, Group& group,
                              const OperationOptions& options) {
  return distributed::broadcast_object(object, from, group, tagged("broadcast_object", options));
}

}  // namespace detail

Tensor copy_from_owner(const Tensor& tensor, Group& group, const Device& device) {
  if (group.size() == 1) {
    TS_CHECK_AS(DistributedError, tensor.defined(), "copy_from_owner",
                "one rank must have a tensor; none has.");
    return tensor;
  }
  const NoGradGuard no_grad;
  const OperationOptions options;
  const Device place = tensor.defined() ? tensor.device() : device;
  std::vector<int64_t> own(3 + kMaxDims, 0);  // has one, dtype, dimensions, sizes
  if (tensor.defined()) {
    own[0] = 1, own[1] = static_cast<int64_t>(tensor.dtype()), own[2] = tensor.dim();
    for (int d = 0; d < tensor.dim(); ++d) own[static_cast<size_t>(3 + d)] = tensor.size(d);
  }
  const auto all = numbers_of_all(own, group, place, tagged("copy_from_owner: shape", options));
  const auto owners = std::ranges::count_if(all, [](const auto& row) { return row[0] != 0; });
  if (owners != 1) {
    PlainText<std::ostringstream> who;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][0] != 0) who << (who.str().empty() ? "" : ", ") << rank;
    }
    TS_THROW(DistributedError, "copy_from_owner", "exactly one rank must have a tensor; ", owners,
             " have", owners == 0 ? "" : " (ranks ", who.str(), owners == 0 ? "" : ")",
             "; pass an undefined Tensor on the others.");
  }
  const auto owner = std::ranges::find_if(all, [](const auto& row) { return row[0] != 0; });
  const int from = static_cast<int>(owner - all.begin());
  Shape shape;
  for (int64_t d = 0; d < (*owner)[2]; ++d) shape.push_back((*owner)[static_cast<size_t>(3 + d)]);
  const Tensor result = group.rank() == from
                            ? tensor.detach()
                            : raw::empty(shape, static_cast<DType>((*owner)[1]), place);
  distributed::broadcast(result, from, group, tagged("copy_from_owner", options));
  return result;
}

}  // namespace tessera::accelerate
