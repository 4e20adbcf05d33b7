#include <tessera/distributed/backward/broadcast.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/buckets.h>

namespace tessera::distributed {
namespace {

BucketList messages_of(const NamedTensors& tensors, int64_t limit) {
  std::vector<BucketItem> items;
  for (const auto& [name, tensor] : tensors) {
    items.push_back({tensor.nbytes(), tensor.dtype(), tensor.device()});
  }
  return assign_buckets(items, {&limit, 1});
}

int64_t numel_of(const NamedTensors& tensors, const std::vector<size_t>& message) {
  int64_t numel = 0;
  for (const size_t i : message) numel += tensors[i].tensor.numel();
  return numel;
}

}  // namespace

void broadcast_tensors(const NamedTensors& tensors, Group& ranks, int root, std::string_view tag,
                       int64_t limit) {
  if (ranks.size() == 1) return;
  const NoGradGuard no_grad;
  struct Message {
    Tensor flat;
    Work work;
  };
  const BucketList messages = messages_of(tensors, limit);
  // Calls f(tensor, its part of the message).
  const auto for_each_part = [&](const std::vector<size_t>& message, const Tensor& flat, auto&& f) {
    int64_t offset = 0;
    for (const size_t i : message) {
      const Tensor& tensor = tensors[i].tensor;
      f(tensor, raw::view(raw::narrow(flat, 0, offset, tensor.numel()), tensor.shape()));
      offset += tensor.numel();
    }
  };
  std::vector<Message> under_way;
  for (const auto& message : messages) {
    const Tensor& first = tensors[message.front()].tensor;
    const MemoryCategoryGuard category(MemoryCategory::kCommunication);
    Tensor flat = raw::empty({numel_of(tensors, message)}, first.dtype(), first.device());
    if (ranks.rank() == root) {
      for_each_part(message, flat,
                    [](const Tensor& tensor, const Tensor& part) { copy_(part, tensor); });
    }
    Work work = ranks.broadcast(flat, root, {.channel = Channel::kParameter, .tag = tag});
    under_way.push_back({std::move(flat), std::move(work)});
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    under_way[i].work.wait();
    if (ranks.rank() == root) continue;
    for_each_part(messages[i], under_way[i].flat,
                  [](const Tensor& tensor, const Tensor& part) { copy_(tensor, part); });
  }
}

Traffic broadcast_traffic(const NamedTensors& tensors, const Group& ranks, int64_t limit) {
  Traffic traffic;
  if (ranks.size() == 1) return traffic;
  for (const auto& message : messages_of(tensors, limit)) {
    const DType dtype = tensors[message.front()].tensor.dtype();
    traffic += {1, numel_of(tensors, message) * size_of(dtype)};
  }
  return traffic;
}

}  // namespace tessera::distributed
