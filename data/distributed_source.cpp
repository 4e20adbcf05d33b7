#include <tessera/data/distributed_source.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::data {
namespace {

constexpr std::string_view kDistributedSource = "DistributedBatchSource";

void check_share(const RankShare& share, std::string_view where) {
  TS_CHECK(share.world_size >= 1 && share.rank >= 0 && share.rank < share.world_size, where,
           "the rank must lie in [0, world size); got rank ", share.rank, " of ", share.world_size,
           ".");
}

RankShare with_tail_of(const BatchSource& source, RankShare share) {
  if (source.drop_last()) share.tail = Tail::kDrop;
  return share;
}

}  // namespace

DistributedBatchSource::DistributedBatchSource(std::shared_ptr<const Sampler> sampler,
                                               int64_t batch_size, const RankShare& share)
    : sampler_(std::move(sampler)), batch_size_(batch_size), share_(share) {
  TS_CHECK(sampler_ != nullptr, kDistributedSource, "needs a sampler; got none.");
  TS_CHECK(batch_size >= 1, kDistributedSource, "the batch size of a rank must be at least 1; got ",
           batch_size, ".");
  check_share(share, kDistributedSource);
}

DistributedBatchSource::DistributedBatchSource(const BatchSource& source, RankShare share)
    : DistributedBatchSource(source.sampler(), source.batch_size(), with_tail_of(source, share)) {}

int64_t DistributedBatchSource::count_at(int64_t position) const {
  const int64_t left = size() - position;
  if (left <= 0) return 0;
  if (left >= global_batch_size()) return batch_size_;
  switch (share_.tail) {
    case Tail::kDrop:
      return 0;
    case Tail::kWrapAround:
      return share_.deal == Deal::kBatches ? batch_size_
                                           : (left + share_.world_size - 1) / share_.world_size;
    case Tail::kUneven:
      break;
  }
  return share_.deal == Deal::kBatches
             ? std::clamp<int64_t>(left - share_.rank * batch_size_, 0, batch_size_)
             : (left - share_.rank + share_.world_size - 1) / share_.world_size;
}

std::optional<int64_t> DistributedBatchSource::next_position(int64_t position) const {
  if (count_at(position) == 0) return std::nullopt;
  return position + std::min(size() - position, global_batch_size());
}

std::vector<int64_t> DistributedBatchSource::batch(int64_t epoch, int64_t position) const {
  std::vector<int64_t> indices(static_cast<size_t>(count_at(position)));
  const int64_t first = position + share_.rank * batch_size_;
  if (share_.deal == Deal::kBatches && first + std::ssize(indices) <= size()) {
    sampler_->indices(epoch, first, indices);
    return indices;
  }
  for (size_t i = 0; i < indices.size(); ++i) {
    indices[i] = sampler_->index(epoch, order_position(position, static_cast<int64_t>(i)));
  }
  return indices;
}

int64_t DistributedBatchSource::order_position(int64_t position, int64_t row) const {
  const bool batches = share_.deal == Deal::kBatches;
  const int64_t first = position + share_.rank * (batches ? batch_size_ : 1);
  // Beyond the end: the epoch's first samples again, as often as it takes.
  return (first + row * (batches ? 1 : share_.world_size)) % size();
}

int64_t DistributedBatchSource::batches_after(int64_t position) const {
  const int64_t left = std::max<int64_t>(size() - position, 0);
  const int64_t full = left / global_batch_size();
  return full + (count_at(position + full * global_batch_size()) > 0 ? 1 : 0);
}

int64_t DistributedBatchSource::position_after(int64_t position, int64_t batches) const {
  return batches > batches_after(position)
             ? size()
             : std::min(size(), position + batches * global_batch_size());
}

int64_t DistributedBatchSource::valid(int64_t position) const {
  const int64_t left = std::max<int64_t>(size() - position, 0);
  if (share_.deal == Deal::kBatches) {
    return std::clamp<int64_t>(left - share_.rank * batch_size_, 0, batch_size_);
  }
  const int64_t own = (left - share_.rank + share_.world_size - 1) / share_.world_size;
  return std::clamp<int64_t>(own, 0, batch_size_);
}

int64_t DistributedBatchSource::ranks_at(int64_t position) const {
  const int64_t left = size() - position;
  if (share_.tail != Tail::kUneven || left <= 0 || left >= global_batch_size()) return kAllRanks;
  const int64_t each = share_.deal == Deal::kBatches ? batch_size_ : 1;
  return std::min<int64_t>((left + each - 1) / each, share_.world_size);
}

RoundRobinSource::RoundRobinSource(std::shared_ptr<const IndexSource> batches,
                                   const RankShare& share)
    : batches_(std::move(batches)), share_(share) {
  TS_CHECK(batches_ != nullptr, "RoundRobinSource", "needs a source of batches; got none.");
  check_share(share, "RoundRobinSource");
}

int64_t RoundRobinSource::in_turn(int64_t position) const {
  return std::min<int64_t>(batches_->batches_after(position), share_.world_size);
}

int64_t RoundRobinSource::ranks_at(int64_t position) const {
  const int64_t there = in_turn(position);
  return share_.tail == Tail::kUneven && there > 0 ? there : kAllRanks;
}

std::optional<int64_t> RoundRobinSource::next_position(int64_t position) const {
  const int64_t there = in_turn(position);
  if (there == 0) return std::nullopt;
  if (there < share_.world_size) {
    if (share_.tail == Tail::kDrop) return std::nullopt;
    if (share_.tail == Tail::kUneven && share_.rank >= there) return std::nullopt;
  }
  return batches_->position_after(position, there);
}

int64_t RoundRobinSource::own_batch(int64_t position) const {
  const int64_t there = in_turn(position);
  if (share_.rank < there) return batches_->position_after(position, share_.rank);
  return batches_->position_after(0, (share_.rank - there) % batches_->batches_after(0));
}

std::vector<int64_t> RoundRobinSource::batch(int64_t epoch, int64_t position) const {
  return batches_->batch(epoch, own_batch(position));
}

int64_t RoundRobinSource::order_position(int64_t position, int64_t row) const {
  return batches_->order_position(own_batch(position), row);
}

int64_t RoundRobinSource::batches_after(int64_t position) const {
  const int64_t left = batches_->batches_after(position), over = left % share_.world_size;
  const bool takes_part = over > 0 && (share_.tail == Tail::kWrapAround ||
                                       (share_.tail == Tail::kUneven && share_.rank < over));
  return left / share_.world_size + (takes_part ? 1 : 0);
}

int64_t RoundRobinSource::position_after(int64_t position, int64_t batches) const {
  return batches > batches_after(position)
             ? size()
             : batches_->position_after(position, std::min(batches * share_.world_size,
                                                           batches_->batches_after(position)));
}

int64_t RoundRobinSource::valid(int64_t position) const {
  return share_.rank < in_turn(position) ? kAllValid : 0;
}

}  // namespace tessera::data
