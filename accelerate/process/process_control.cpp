#include <tessera/accelerate/process/process_control.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/process_group.h>

namespace tessera {
namespace {

using distributed::Channel;
using distributed::Group;
using distributed::ProcessGroup;
using Json = nlohmann::json;

// The ranks that this Context has joined through a ProcessControl.
struct JoinedProcesses {
  std::weak_ptr<ProcessGroup> group;
  std::shared_ptr<ProcessGroup> kept;  // until end_processes()
  bool keep = false;
};

std::shared_ptr<ProcessGroup> join_processes(const ProcessControl::ChooseDevice& device) {
  JoinedProcesses& joined = Context::current().slot<JoinedProcesses>();
  std::shared_ptr<ProcessGroup> group = joined.group.lock();
  if (group || distributed::rank_context().world_size > 1) return group;
  const distributed::LaunchInfo info = distributed::detect();
  if (info.world_size == 1) return nullptr;
  group = std::make_shared<ProcessGroup>(distributed::ProcessGroupOptions{
      .device = device({info.rank, info.local_rank, info.local_world_size})});
  joined.group = group;
  if (joined.keep) joined.kept = group;
  return group;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

// The ranks of this node. Launchers number them block by block as a rule; where they do not, hosts
// tell them apart.
std::shared_ptr<Group> node_of(const std::shared_ptr<Group>& world, int local_rank, int local_ranks,
                               int rank) {
  if (local_ranks == world->size()) return world;
  const std::vector<Json> all = distributed::all_gather_objects(
      *world,
      Json{{"first", rank - local_rank}, {"local_ranks", local_ranks}, {"host", host_name()}},
      {.channel = Channel::kControl, .tag = "nodes"});
  std::map<int, int> sizes;
  for (const Json& one : all) ++sizes[one.at("first").get<int>()];
  const bool in_blocks = std::ranges::all_of(all, [&](const Json& one) {
    return sizes.at(one.at("first").get<int>()) == one.at("local_ranks").get<int>();
  });
  int color = rank - local_rank;
  if (!in_blocks) {
    const Json& own = all[static_cast<size_t>(rank)].at("host");
    color = static_cast<int>(
        std::ranges::find_if(all, [&](const Json& one) { return one.at("host") == own; }) -
        all.begin());
  }
  return world->split(color, local_rank, {.channel = Channel::kControl, .tag = "nodes"});
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

RankPart part_of(int64_t length, int rank, int ranks, bool apply_padding) {
  const int64_t each = length / ranks, more = length % ranks;
  RankPart part;
  part.begin = rank * each + std::min<int64_t>(rank, more);
  part.end = part.begin + each + (rank < more ? 1 : 0);
  if (apply_padding) {
    part.repeats = each + (more > 0 ? 1 : 0) - (part.end - part.begin);
    TS_CHECK(length > 0 || ranks == 1, "split_between_processes",
             "padding repeats the last row, and there is none; split without padding");
  }
  return part;
}

namespace detail {

Tensor take_rows(const Tensor& tensor, const RankPart& part) {
  const Tensor own = raw::narrow(tensor, 0, part.begin, part.end - part.begin);
  if (part.repeats == 0) return own;
  Shape shape = tensor.shape();
  shape[0] = own.size(0) + part.repeats;
  const NoGradGuard no_grad;
  const Tensor padded = raw::empty(shape, tensor.dtype(), tensor.device());
  copy_(raw::narrow(padded, 0, 0, own.size(0)), own);
  const Tensor last = raw::narrow(tensor, 0, tensor.size(0) - 1, 1);
  for (int64_t i = own.size(0); i < shape[0]; ++i) copy_(raw::narrow(padded, 0, i, 1), last);
  return padded;
}

void check_rows(std::string_view name, int64_t rows, int64_t expected) {
  TS_CHECK(rows == expected, "split_between_processes", "all values must have equally many rows; '",
           name, "' has ", rows, ", the first value has ", expected);
}

void keep_processes() { Context::current().slot<JoinedProcesses>().keep = true; }
void end_processes() {
  JoinedProcesses& joined = Context::current().slot<JoinedProcesses>();
  joined.keep = false;
  joined.kept.reset();
}

}  // namespace detail

ProcessControl::ProcessControl()
    : ProcessControl([](const accelerate::RankPlace&) { return kCpu; }) {}

ProcessControl::ProcessControl(const ChooseDevice& device) : processes_(join_processes(device)) {
  const distributed::RankContext& context = distributed::rank_context();
  world_ = context.world;
  rank_ = context.rank;
  ranks_ = context.world_size;
  local_rank_ = context.local_rank;
  local_ranks_ = context.local_world_size;
  local_ = node_of(world_, local_rank_, local_ranks_, rank_);
}

ProcessControl::~ProcessControl() = default;

void ProcessControl::wait_for_everyone(const SourceLocation& where) const {
  world_->barrier({.where = where});
}

// Two rounds: the first rank tells how its body ended, then all do.
void ProcessControl::run_first(Group& ranks, const std::function<void()>& body,
                               const SourceLocation& where) {
  const distributed::CollectiveOptions options{
      .channel = Channel::kControl, .tag = "main_process_first", .where = where};
  if (ranks.size() == 1) return body();
  std::exception_ptr own;
  const auto run = [&] {
    try {
      body();
    } catch (...) {
      own = std::current_exception();
    }
  };
  const auto status = [&] { return own ? Json(text_of(own)) : Json(); };
  const bool is_first = ranks.rank() == 0;
  if (is_first) run();
  const Json main = distributed::broadcast_object(status(), 0, ranks, options);
  if (!is_first) {
    TS_CHECK_AS(DistributedError, main.is_null(), "main_process_first",
                "the body threw on the main rank: ", main.get<std::string>());
    run();
  } else if (own) {
    std::rethrow_exception(own);
  }
  const std::vector<Json> all = distributed::all_gather_objects(ranks, status(), options);
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TS_CHECK_AS(DistributedError, all[rank].is_null(), "main_process_first",
                "the body threw on rank ", ranks.ranks()[rank], ": ", all[rank].get<std::string>());
  }
}

bool ProcessControl::check_trigger(const SourceLocation& where) {
  const Tensor flag = raw::zeros({1}, kU8);
  flag.data_as<uint8_t>()[0] = std::exchange(trigger_, false);
  world_
      ->all_reduce(flag, distributed::ReduceOp::kMax,
                   {.channel = Channel::kControl, .tag = "trigger", .where = where})
      .wait();
  return flag.data_as<uint8_t>()[0] != 0;
}

void ProcessControl::check_index(std::string_view where, int index, int ranks) {
  TS_CHECK(index >= 0 && index < ranks, where, "there are ", ranks, " ranks, 0 to ", ranks - 1,
           "; got ", index);
}

void ProcessControl::print_line(const std::string& line) {
  const std::string whole = line + "\n";
  std::fwrite(whole.data(), 1, whole.size(), stdout);
  std::fflush(stdout);
}

}  // namespace tessera
