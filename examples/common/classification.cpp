#include "classification.h"

#include <numeric>

#include <tessera/core/error.h>

namespace tessera::examples {

void ClassificationScore::add(const Tensor& predictions, const Tensor& labels) {
  const auto guessed = predictions.to_vector<int64_t>(), right = labels.to_vector<int64_t>();
  TS_CHECK_SHAPE(guessed.size() == right.size(), "ClassificationScore",
                 "needs a prediction for each label; got ", predictions, " and ", labels);
  const auto classes = static_cast<int64_t>(hits_.size());
  for (size_t i = 0; i < right.size(); ++i) {
    for (const int64_t value : {guessed[i], right[i]}) {
      TS_CHECK_INDEX(value >= 0 && value < classes, "ClassificationScore", "knows classes 0 to ",
                     classes - 1, "; got ", value);
    }
    hits_[static_cast<size_t>(right[i])] += guessed[i] == right[i];
    ++predicted_[static_cast<size_t>(guessed[i])];
    ++actual_[static_cast<size_t>(right[i])];
  }
  samples_ += static_cast<int64_t>(right.size());
}

double ClassificationScore::accuracy() const {
  const int64_t hits = std::accumulate(hits_.begin(), hits_.end(), int64_t{0});
  return samples_ > 0 ? static_cast<double>(hits) / static_cast<double>(samples_) : 0;
}

double ClassificationScore::f1(int64_t positive) const {
  const auto i = static_cast<size_t>(positive);
  const int64_t both = predicted_.at(i) + actual_[i];
  return both > 0 ? 2.0 * static_cast<double>(hits_[i]) / static_cast<double>(both) : 0;
}

double ClassificationScore::macro_f1() const {
  double sum = 0;
  for (size_t i = 0; i < hits_.size(); ++i) sum += f1(static_cast<int64_t>(i));
  return sum / static_cast<double>(hits_.size());
}

}  // namespace tessera::examples
