// A composition trained twice: by the facade on its ranks, and by one process with a plain loop that
// knows neither facade nor ranks. What came of both, and where they differ.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "compositions/composition.h"

namespace tessera::compositions {

struct Outcome {
  std::map<int64_t, double> losses;  // by micro-batch
  std::map<int64_t, double> norms;   // by window, where it was clipped and stepped
  std::map<int64_t, double> rates;   // after each window
  std::map<int64_t, double> looks;   // by window, of the model as it was evaluated
  std::map<int64_t, bool> skipped;   // windows whose step was left out
  // By name, at the end; of parameters the greatest way that an element of it went.
  std::map<std::string, std::vector<double>> values, averages;
  std::map<std::string, double> moved;
  std::string refusal;  // a typed error that says that this cannot be; nothing else counts then
};

Outcome train_plainly(const Composition& composition);
// `folder`: for checkpoints, removed afterwards. Throws what is no refusal: any error but
// UnsupportedError and ConfigError.
Outcome train_by_facade(const Composition& composition, const std::string& folder);

// Empty where they agree, within bounds that follow from the numbers' epsilon.
std::string difference(const Composition& composition, const Outcome& facade, const Outcome& plain);

}  // namespace tessera::compositions
