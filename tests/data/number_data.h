// The numbers 0, 1, 2... as a data set, and what batches of them hold.
#pragma once

#include <numeric>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/dataset.h>

namespace tessera::data {

// Example i is i.
class Numbers : public Dataset<int64_t> {
 public:
  explicit Numbers(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  int64_t get(int64_t index) const override { return index; }

 private:
  int64_t size_;
};

inline std::vector<int64_t> values_of(const Tensor& batch) { return batch.to_vector<int64_t>(); }

template <class Loader>
std::vector<std::vector<int64_t>> epoch_of(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  for (Tensor& batch : loader) batches.push_back(values_of(batch));
  return batches;
}

inline std::vector<int64_t> flatten(const std::vector<std::vector<int64_t>>& batches) {
  std::vector<int64_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

inline std::vector<int64_t> range(int64_t count) {
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace tessera::data
