#include <tessera/distributed/transport/collectives.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {
namespace {

Shape with_rows(const Shape& shape, int64_t rows) {
  if (shape.size() == 0) return {rows};
  Shape result = shape;
  result[0] = rows;
  return result;
}

Tensor bytes_of(const std::vector<uint8_t>& bytes) {
  const Tensor tensor = raw::empty({static_cast<int64_t>(bytes.size())}, kU8);
  if (!bytes.empty()) std::memcpy(tensor.data(), bytes.data(), bytes.size());
  return tensor;
}

nlohmann::json object_of(const Tensor& bytes) {
  const auto* begin = static_cast<const uint8_t*>(bytes.data());
  try {
    return nlohmann::json::from_cbor(begin, begin + bytes.numel());
  } catch (const nlohmann::json::exception& error) {
    TS_THROW(FormatError, "objects", "what came is no CBOR: ", error.what());
  }
}

CollectiveOptions waiting(CollectiveOptions options) {
  options.waits = true;
  return options;
}

CollectiveOptions tagged(CollectiveOptions options, std::string_view tag) {
  if (options.tag.empty()) options.tag = tag;
  return waiting(options);
}

// Each rank's number, by rank.
std::vector<int64_t> all_numbers(int64_t own, Group& group, const CollectiveOptions& options) {
  const Tensor input = raw::empty({1}, kI64), output = raw::empty({group.size()}, kI64);
  *input.data_as<int64_t>() = own;
  group.all_gather(output, input, waiting(options)).wait();
  return {output.data_as<int64_t>(), output.data_as<int64_t>() + group.size()};
}

}  // namespace

void all_reduce(const Tensor& tensor, ReduceOp op, Group& group, const CollectiveOptions& options) {
  group.all_reduce(tensor, op, waiting(options)).wait();
}

bool any_rank(bool own, Group& group) {
  if (group.size() == 1) return own;
  const Tensor flag = raw::empty({1}, kI64);
  *flag.data_as<int64_t>() = own ? 1 : 0;
  all_reduce(flag, ReduceOp::kMax, group, {.tag = "any_rank"});
  return *flag.data_as<int64_t>() != 0;
}

void broadcast(const Tensor& tensor, int root, Group& group, const CollectiveOptions& options) {
  group.broadcast(tensor, root, waiting(options)).wait();
}

Tensor all_gather(const Tensor& input, Group& group, const CollectiveOptions& options) {
  const int64_t rows = input.dim() == 0 ? 1 : input.size(0);
  const Tensor output =
      raw::empty(with_rows(input.shape(), rows * group.size()), input.dtype(), input.device());
  group.all_gather(output, input, waiting(options)).wait();
  return output;
}

std::vector<Tensor> all_gather_ragged(const Tensor& input, Group& group,
                                      const CollectiveOptions& options) {
  TS_CHECK_SHAPE(input.dim() >= 1, "all_gather_ragged", "needs rows; given ", input);
  std::vector<Tensor> outputs;
  for (const int64_t rows : all_numbers(input.size(0), group, tagged(options, "rows"))) {
    outputs.push_back(raw::empty(with_rows(input.shape(), rows), input.dtype(), input.device()));
  }
  group.all_gather(outputs, input, waiting(options)).wait();
  return outputs;
}

Tensor reduce_scatter(const Tensor& input, ReduceOp op, Group& group,
                      const CollectiveOptions& options) {
  const int64_t rows = input.dim() == 0 ? 1 : input.size(0);
  TS_CHECK_SHAPE(rows % group.size() == 0, "reduce_scatter", "the rows of ", input,
                 " do not divide among ", group.size(), " ranks; use the form with lists");
  const Tensor output =
      raw::empty(with_rows(input.shape(), rows / group.size()), input.dtype(), input.device());
  group.reduce_scatter(output, input, op, waiting(options)).wait();
  return output;
}

Tensor permute_ranks(const Tensor& input, std::span<const int> targets, Group& group,
                     const CollectiveOptions& options) {
  const Tensor output = raw::empty(input.shape(), input.dtype(), input.device());
  group.permute(output, input, targets, waiting(options)).wait();
  return output;
}

void barrier(Group& group, const CollectiveOptions& options) { group.barrier(options); }

// ---- Objects ------------------------------------------------------------------------------------

nlohmann::json broadcast_object(const nlohmann::json& object, int root, Group& group,
                                const CollectiveOptions& options) {
  const CollectiveOptions named = tagged(options, "object");
  Tensor bytes;
  const Tensor size = raw::empty({1}, kI64);
  if (group.rank() == root) {
    bytes = bytes_of(nlohmann::json::to_cbor(object));
    *size.data_as<int64_t>() = bytes.numel();
  }
  group.broadcast(size, root, named).wait();
  if (group.rank() != root) bytes = raw::empty({*size.data_as<int64_t>()}, kU8);
  group.broadcast(bytes, root, named).wait();
  return object_of(bytes);
}

std::vector<nlohmann::json> all_gather_objects(Group& group, const nlohmann::json& object,
                                               const CollectiveOptions& options) {
  const Tensor own = bytes_of(nlohmann::json::to_cbor(object));
  std::vector<nlohmann::json> objects;
  for (const Tensor& bytes : all_gather_ragged(own, group, tagged(options, "object"))) {
    objects.push_back(object_of(bytes));
  }
  return objects;
}

// ---- After a failure ---------------------------------------------------------------------------

namespace {

constexpr Channel kToldChannels[] = {Channel::kUser, Channel::kGradient, Channel::kParameter,
                                     Channel::kModule, Channel::kControl};

}  // namespace

std::vector<std::shared_ptr<Group>> groups_of_rank() {
  RankContext& context = rank_context();
  std::erase_if(context.parts, [](const auto& part) { return part.expired(); });
  std::vector<std::shared_ptr<Group>> groups{context.world};
  for (const auto& part : context.parts) {
    if (auto group = part.lock()) groups.push_back(std::move(group));
  }
  return groups;
}

void tell_groups(Group& meeting, std::span<const std::shared_ptr<Group>> groups,
                 const std::string& reason) noexcept {
  for (const auto& group : groups) {
    if (!group->compares_calls()) continue;
    for (const Channel channel : kToldChannels) {
      if (channel == Channel::kControl && group.get() == &meeting) continue;
      group->tell(channel, reason);
    }
  }
}

void resume_calls(Group& meeting, std::span<const std::shared_ptr<Group>> groups) {
  if (!meeting.compares_calls()) return;
  nlohmann::json own = nlohmann::json::object();
  for (const auto& group : groups) {
    if (!group->compares_calls()) continue;
    for (const Channel channel : kToldChannels) {
      own[group->name()].push_back(group->issued(channel));
    }
  }
  // A rank may come to this in the midst of what others have told it before.
  constexpr int kMeetings = 8;
  std::vector<nlohmann::json> all;
  for (int i = 1; all.empty(); ++i) {
    try {
      all = all_gather_objects(meeting, own, {.channel = Channel::kControl, .tag = "resume calls"});
    } catch (const DistributedError&) {
      if (i == kMeetings) throw;
    }
  }
  for (const auto& group : groups) {
    if (!group->compares_calls()) continue;
    for (size_t c = 0; c < std::size(kToldChannels); ++c) {
      if (kToldChannels[c] == Channel::kControl && group.get() == &meeting) continue;
      int64_t most = 0;
      for (const nlohmann::json& issued : all) {
        if (issued.contains(group->name())) {
          most = std::max(most, issued.at(group->name()).at(c).get<int64_t>());
        }
      }
      while (group->issued(kToldChannels[c]) < most) {
        group->tell(kToldChannels[c], "a call that was left out after a failure");
      }
    }
  }
}

std::vector<nlohmann::json> gather_objects(const nlohmann::json& object, int root, Group& group,
                                           const CollectiveOptions& options) {
  const CollectiveOptions named = tagged(options, "object");
  const Tensor own = bytes_of(nlohmann::json::to_cbor(object));
  const std::vector<int64_t> sizes = all_numbers(own.numel(), group, named);
  std::vector<Tensor> outputs;
  if (group.rank() == root) {
    for (const int64_t size : sizes) outputs.push_back(raw::empty({size}, kU8));
  }
  group.gather(outputs, own, root, named).wait();
  std::vector<nlohmann::json> objects;
  for (const Tensor& bytes : outputs) objects.push_back(object_of(bytes));
  return objects;
}

nlohmann::json scatter_objects(const std::vector<nlohmann::json>& objects, int root, Group& group,
                               const CollectiveOptions& options) {
  const CollectiveOptions named = tagged(options, "object");
  std::vector<Tensor> sizes, inputs;
  if (group.rank() == root) {
    for (const nlohmann::json& object : objects) {
      inputs.push_back(bytes_of(nlohmann::json::to_cbor(object)));
      sizes.push_back(raw::full({1}, inputs.back().numel(), kI64));
    }
  }
  const Tensor size = raw::empty({1}, kI64);
  group.scatter(size, sizes, root, named).wait();
  const Tensor bytes = raw::empty({*size.data_as<int64_t>()}, kU8);
  group.scatter(bytes, inputs, root, named).wait();
  return object_of(bytes);
}

// ---- Several calls as few -----------------------------------------------------------------------

struct CoalescedScope::Item {
  Operation operation;
  Tensor output, input;  // the same tensor where a call is in place
  ReduceOp op = ReduceOp::kSum;
  int root = -1;

  // Rows divide as the call needs it. Others are issued alone, where Group says what is wrong.
  bool packs(int ranks) const {
    if (operation == Operation::kAllReduce || operation == Operation::kBroadcast) return true;
    const bool gathers = operation == Operation::kAllGather;
    const Tensor &whole = gathers ? output : input, &part = gathers ? input : output;
    return whole.dim() >= 1 && whole.size(0) % ranks == 0 &&
           whole.numel() == part.numel() * ranks && whole.dtype() == part.dtype() &&
           whole.device() == part.device();
  }
  bool joins(const Item& other, int ranks) const {
    return operation == other.operation && op == other.op && root == other.root &&
           input.dtype() == other.input.dtype() && input.device() == other.input.device() &&
           packs(ranks) && other.packs(ranks);
  }
};

CoalescedScope::CoalescedScope(Group& group, const CollectiveOptions& options)
    : group_(group), options_(options) {}
CoalescedScope::~CoalescedScope() = default;

void CoalescedScope::all_reduce(const Tensor& tensor, ReduceOp op) {
  items_.push_back({Operation::kAllReduce, tensor, tensor, op});
}
void CoalescedScope::broadcast(const Tensor& tensor, int root) {
  items_.push_back({Operation::kBroadcast, tensor, tensor, ReduceOp::kSum, root});
}
void CoalescedScope::all_gather(const Tensor& output, const Tensor& input) {
  items_.push_back({Operation::kAllGather, output, input});
}
void CoalescedScope::reduce_scatter(const Tensor& output, const Tensor& input, ReduceOp op) {
  items_.push_back({Operation::kReduceScatter, output, input, op});
}

Work CoalescedScope::issue(const Item& item) {
  switch (item.operation) {
    case Operation::kAllReduce:
      return group_.all_reduce(item.output, item.op, options_);
    case Operation::kBroadcast:
      return group_.broadcast(item.output, item.root, options_);
    case Operation::kAllGather:
      return group_.all_gather(item.output, item.input, options_);
    default:
      return group_.reduce_scatter(item.output, item.input, item.op, options_);
  }
}

namespace {

// The r-th of `sections` equal parts of dimension 0; with one, the tensor itself.
Tensor section(const Tensor& tensor, int64_t r, int64_t sections) {
  if (sections == 1) return detach(tensor);
  const int64_t rows = tensor.size(0) / sections;
  return raw::narrow(detach(tensor), 0, r * rows, rows);
}

}  // namespace

Work CoalescedScope::issue(std::span<const Item> items,
                           std::vector<std::pair<Tensor, Tensor>>* copy_back) {
  // A message has a section for each rank on the side where the call has one, and every section
  // holds the tensors in their order.
  const Item& model = items.front();
  const bool in_place =
      model.operation == Operation::kAllReduce || model.operation == Operation::kBroadcast;
  const int64_t sections_in = model.operation == Operation::kReduceScatter ? group_.size() : 1;
  const int64_t sections_out = model.operation == Operation::kAllGather ? group_.size() : 1;
  int64_t length = 0;
  for (const Item& item : items) length += item.input.numel() / sections_in;
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  const auto message = [&](int64_t sections) {
    return raw::empty({sections * length}, model.input.dtype(), model.input.device());
  };
  const Tensor input = message(sections_in), output = in_place ? input : message(sections_out);
  int64_t offset = 0;
  for (const Item& item : items) {
    const int64_t numel = item.input.numel() / sections_in;
    for (int64_t r = 0; r < sections_in; ++r) {
      const Tensor from = section(item.input, r, sections_in);
      copy_(raw::view(raw::narrow(input, 0, r * length + offset, numel), from.shape()), from);
    }
    for (int64_t r = 0; r < sections_out; ++r) {
      const Tensor to = section(item.output, r, sections_out);
      copy_back->emplace_back(
          to, raw::view(raw::narrow(output, 0, r * length + offset, numel), to.shape()));
    }
    offset += numel;
  }
  return issue({model.operation, output, input, model.op, model.root});
}

Work CoalescedScope::finish() {
  const std::vector<Item> items = std::move(items_);
  items_.clear();
  if (items.empty()) return {};
  std::vector<Work> works;
  std::vector<std::pair<Tensor, Tensor>> copy_back;  // tensor, its part of a message
  const NoGradGuard no_grad;
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin + 1;
    while (end < items.size() && items[end].joins(items[begin], group_.size())) ++end;
    works.push_back(end - begin == 1
                        ? issue(items[begin])
                        : issue(std::span(items).subspan(begin, end - begin), &copy_back));
    begin = end;
  }
  return group_.join(std::move(works), std::move(copy_back));
}

// ---- Equal traces -------------------------------------------------------------------------------

void check_equal_traces(const CommTrace::Scope& scope, Group& group) {
  // One line for each call, under "group channel"; a group is compared among the ranks that have
  // it.
  nlohmann::json own = nlohmann::json::object();
  for (const CommRecord& record : scope.records()) {
    if (is_message(record.operation)) continue;
    const std::string key = record.group + " " + std::string(name_of(record.channel));
    own[key]["members"] = record.group_size;
    // What a rank says in the place of a call is its own.
    own[key]["calls"].push_back(record.operation == Operation::kInvalid
                                    ? std::string(name_of(record.operation))
                                    : record.describe());
  }
  const auto all =
      all_gather_objects(group, own, {.channel = Channel::kControl, .tag = "equal traces"});
  std::set<std::string> keys;
  for (const auto& trace : all) {
    for (const auto& [key, calls] : trace.items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const nlohmann::json* first = nullptr;
    size_t first_rank = 0;
    int callers = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      if (!all[r].contains(key)) continue;
      ++callers;
      const nlohmann::json& calls = all[r].at(key).at("calls");
      if (first == nullptr) {
        first = &calls;
        first_rank = r;
        continue;
      }
      for (size_t i = 0; i < std::max(first->size(), calls.size()); ++i) {
        const std::string a = i < first->size() ? first->at(i).get<std::string>() : "nothing more";
        const std::string b = i < calls.size() ? calls.at(i).get<std::string>() : "nothing more";
        TS_CHECK_AS(DistributedError, a == b, "check_equal_traces", "on '", key, "' rank ",
                    first_rank, " called ", a, " where rank ", r, " called ", b);
      }
    }
    // Who is in a group but called nothing has no entry; only the world sees all its members.
    const int members = all[first_rank].at(key).at("members").get<int>();
    TS_CHECK_AS(DistributedError, group.size() < world_size() || callers == members,
                "check_equal_traces", "on '", key, "' rank ", first_rank, " called ",
                first->at(0).get<std::string>(), " where ", members - callers, " of ", members,
                " ranks called nothing");
  }
}

}  // namespace tessera::distributed
