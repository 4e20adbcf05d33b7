// Accuracy and F1 of a classifier, from predicted and true classes.
#pragma once

#include <cstdint>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::examples {

class ClassificationScore {
 public:
  explicit ClassificationScore(int64_t classes)
      : hits_(static_cast<size_t>(classes)), predicted_(hits_), actual_(hits_) {}

  // Integers of equal length in [0, classes).
  void add(const Tensor& predictions, const Tensor& labels);

  int64_t samples() const { return samples_; }
  double accuracy() const;
  // 2 * hits / (predicted + actual) of a class; 0 where it was neither predicted nor there.
  double f1(int64_t positive) const;
  double macro_f1() const;  // mean over classes

 private:
  std::vector<int64_t> hits_, predicted_, actual_;  // by class
  int64_t samples_ = 0;
};

}  // namespace tessera::examples
