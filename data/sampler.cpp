#include <tessera/data/sampler.h>

#include <algorithm>
#include <cmath>

#include <tessera/core/error.h>
#include <tessera/core/random.h>

namespace tessera::data {
namespace {

void check_size(int64_t size, std::string_view where) {
  TS_CHECK(size >= 0, where, "the number of samples must not be negative; got ", size, ".");
}

void check_position(int64_t position, int64_t size, std::string_view where) {
  TS_CHECK_INDEX(position >= 0 && position < size, where, "position ", position,
                 " is outside the epoch's ", size, " samples.");
}

void check_weights(std::span<const double> weights, std::string_view where) {
  TS_CHECK(!weights.empty(), where, "needs a weight for each example; got none.");
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    TS_CHECK(std::isfinite(weights[i]) && weights[i] >= 0, where,
             "weights must be finite and not negative; weight ", i, " is ", weights[i], ".");
    sum += weights[i];
  }
  TS_CHECK(sum > 0 && std::isfinite(sum), where, "weights must have a positive, finite sum; it is ",
           sum, ".");
}

// Mixes all bits of x into all bits of the result (the finaliser of MurmurHash3).
uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCD;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53;
  return x ^ x >> 33;
}

// A number in [0, limit) from 64 even bits.
uint64_t below(uint64_t bits, uint64_t limit) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * limit >> 64);
}

}  // namespace

void Sampler::indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const {
  for (int64_t& value : out) value = index(epoch, begin++);
}

SequentialSampler::SequentialSampler(int64_t size) : size_(size) {
  check_size(size, "SequentialSampler");
}

int64_t SequentialSampler::index(int64_t, int64_t position) const {
  check_position(position, size_, "SequentialSampler");
  return position;
}

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t stream) {
  check_size(size, "Permutation");
  size_ = static_cast<uint64_t>(size);
  columns_ = static_cast<uint64_t>(std::sqrt(static_cast<double>(size_)));
  while (columns_ * columns_ < size_) ++columns_;
  rows_ = columns_ == 0 ? 0 : (size_ + columns_ - 1) / columns_;
  rounds_ = size < 1024 ? kMaxRounds : 8;
  for (int round = 0; round < rounds_; round += 2) {
    const auto bits = philox4x32(seed, stream, static_cast<uint64_t>(round / 2));
    keys_[round] = uint64_t{bits[0]} << 32 | bits[1];
    keys_[round + 1] = uint64_t{bits[2]} << 32 | bits[3];
  }
}

int64_t Permutation::operator[](int64_t position) const {
  check_position(position, size(), "Permutation");
  uint64_t value = static_cast<uint64_t>(position);
  do {  // a cell beyond the end leads on: the walk comes back into [0, size) before it repeats
    uint64_t row = value / columns_, column = value % columns_;
    for (int round = 0; round < rounds_; round += 2) {
      row += below(mix(column ^ keys_[round]), rows_);
      if (row >= rows_) row -= rows_;
      column += below(mix(row ^ keys_[round + 1]), columns_);
      if (column >= columns_) column -= columns_;
    }
    value = row * columns_ + column;
  } while (value >= size_);
  return static_cast<int64_t>(value);
}

RandomSampler::RandomSampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
  check_size(size, "RandomSampler");
}

int64_t RandomSampler::index(int64_t epoch, int64_t position) const {
  check_position(position, size_, "RandomSampler");
  return Permutation(size_, seed_, static_cast<uint64_t>(epoch))[position];
}

void RandomSampler::indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const {
  const Permutation permutation(size_, seed_, static_cast<uint64_t>(epoch));
  for (int64_t& value : out) value = permutation[begin++];
}

WeightedSampler::WeightedSampler(std::span<const double> weights, int64_t size, uint64_t seed)
    : size_(size), seed_(seed) {
  check_size(size, "WeightedSampler");
  check_weights(weights, "WeightedSampler");
  double sum = 0;
  cumulative_.reserve(weights.size());
  for (const double weight : weights) cumulative_.push_back(sum += weight);
}

int64_t WeightedSampler::index(int64_t epoch, int64_t position) const {
  check_position(position, size_, "WeightedSampler");
  const auto bits =
      philox4x32(seed_, static_cast<uint64_t>(epoch), static_cast<uint64_t>(position));
  const double target = uniform_from_bits64(bits[0], bits[1]) * cumulative_.back();
  // The first sum above the target belongs to an example whose weight is not 0.
  auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), target);
  // Rounding of the product may reach the total: take the last example with a weight.
  if (found == cumulative_.end()) {
    found = std::lower_bound(cumulative_.begin(), cumulative_.end(), cumulative_.back());
  }
  return found - cumulative_.begin();
}

WeightedOrderSampler::WeightedOrderSampler(std::span<const double> weights, int64_t size,
                                           uint64_t seed)
    : weights_(weights.begin(), weights.end()), size_(size), seed_(seed) {
  check_size(size, "WeightedOrderSampler");
  check_weights(weights, "WeightedOrderSampler");
  const auto zeros = std::count(weights_.begin(), weights_.end(), 0.0);
  const auto drawable = static_cast<int64_t>(weights_.size()) - zeros;
  TS_CHECK(size <= drawable, "WeightedOrderSampler", "can draw each of the ", drawable,
           " examples with a weight above 0 once; got size ", size,
           "; lower it or take WeightedSampler, which repeats.");
}

WeightedOrderSampler::Order WeightedOrderSampler::order_of(int64_t epoch) const {
  const std::lock_guard lock(mutex_);  // threads that need the order wait for the one that makes it
  for (const Kept& kept : kept_) {
    if (kept.epoch == epoch) return kept.order;
  }
  // The example that an exponential clock of its weight's rate rings first for is the next.
  std::vector<std::pair<double, int64_t>> rings;
  rings.reserve(weights_.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] == 0) continue;
    const auto bits = philox4x32(seed_, static_cast<uint64_t>(epoch), i);
    rings.emplace_back(-std::log1p(-uniform_from_bits64(bits[0], bits[1])) / weights_[i],
                       static_cast<int64_t>(i));
  }
  std::partial_sort(rings.begin(), rings.begin() + size_, rings.end());
  auto order = std::make_shared<std::vector<int64_t>>();
  order->reserve(static_cast<size_t>(size_));
  for (int64_t i = 0; i < size_; ++i) order->push_back(rings[static_cast<size_t>(i)].second);
  if (kept_.size() == 2) kept_.erase(kept_.begin());
  kept_.push_back({epoch, order});
  return order;
}

int64_t WeightedOrderSampler::index(int64_t epoch, int64_t position) const {
  check_position(position, size_, "WeightedOrderSampler");
  return (*order_of(epoch))[static_cast<size_t>(position)];
}

void WeightedOrderSampler::indices(int64_t epoch, int64_t begin, std::span<int64_t> out) const {
  if (out.empty()) return;
  check_position(begin, size_, "WeightedOrderSampler");
  check_position(begin + static_cast<int64_t>(out.size()) - 1, size_, "WeightedOrderSampler");
  const Order order = order_of(epoch);
  std::copy_n(order->begin() + begin, out.size(), out.begin());
}

int64_t IndexSource::position_after(int64_t position, int64_t batches) const {
  for (; batches > 0; --batches) {
    const std::optional<int64_t> next = next_position(position);
    if (!next) return size();
    position = *next;
  }
  return position;
}

BatchSource::BatchSource(std::shared_ptr<const Sampler> sampler, int64_t batch_size, bool drop_last)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last) {
  TS_CHECK(sampler_ != nullptr, "BatchSource", "needs a sampler; got none.");
  TS_CHECK(batch_size >= 1, "BatchSource", "the batch size must be at least 1; got ", batch_size,
           ".");
}

std::optional<int64_t> BatchSource::next_position(int64_t position) const {
  const int64_t left = size() - position;
  if (left <= 0 || (drop_last_ && left < batch_size_)) return std::nullopt;
  return position + std::min(left, batch_size_);
}

std::vector<int64_t> BatchSource::batch(int64_t epoch, int64_t position) const {
  const int64_t end = next_position(position).value_or(position);
  std::vector<int64_t> indices(static_cast<size_t>(end - position));
  sampler_->indices(epoch, position, indices);
  return indices;
}

int64_t BatchSource::batches_after(int64_t position) const {
  const int64_t left = std::max<int64_t>(size() - position, 0);
  return drop_last_ ? left / batch_size_ : left / batch_size_ + (left % batch_size_ != 0);
}

int64_t BatchSource::position_after(int64_t position, int64_t batches) const {
  return batches > batches_after(position) ? size()
                                           : std::min(size(), position + batches * batch_size_);
}

std::vector<int64_t> BatchList::batch(int64_t /*epoch*/, int64_t number) const {
  check_position(number, size(), "BatchList");
  return batches_[static_cast<size_t>(number)];
}

BatchSamplerSource::BatchSamplerSource(std::shared_ptr<const BatchSampler> sampler)
    : sampler_(std::move(sampler)) {
  TS_CHECK(sampler_ != nullptr, "BatchSamplerSource", "needs a batch sampler; got none.");
}

std::optional<int64_t> BatchSamplerSource::next_position(int64_t position) const {
  if (position >= size()) return std::nullopt;
  return position + 1;
}

std::vector<int64_t> BatchSamplerSource::batch(int64_t epoch, int64_t position) const {
  return sampler_->batch(epoch, position);
}

int64_t BatchSamplerSource::batches_after(int64_t position) const {
  return std::max<int64_t>(size() - position, 0);
}

int64_t BatchSamplerSource::position_after(int64_t position, int64_t batches) const {
  return batches > batches_after(position) ? size() : position + batches;
}

}  // namespace tessera::data
