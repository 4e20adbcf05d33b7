// What compositions are tried on: a model, its parts, and a loss of each micro-batch. words.cpp has the
// one of CI; -DTESSERA_COMPOSITION_SUBJECT=FILE puts a file of one's own in its place, which defines
// make_subject().
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/nn/module.h>

namespace tessera::compositions {

struct MicroLoss {
  Tensor loss;        // one element: the mean over what counts, 0 where nothing does
  double weight = 1;  // how much counts: samples, tokens
};

// Each rank makes one, alike: values come from the seed of the Context. No dropout: a loop without the
// facade draws other random numbers.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual nn::ModuleBase& model() = 0;
  // Of micro-batch `index` of the whole training, the same on any rank. `share`: the part of it that
  // counts, 1 for all, 0 for nothing; a subject without such weights takes it for 1.
  virtual MicroLoss loss(int64_t index, double share) = 0;
  // Dotted names of modules that may be frozen and that may be computed twice.
  virtual std::vector<std::string> parts() = 0;
  // Ends of the names of layers that take adapters.
  virtual std::vector<std::string> adapted() { return {"all-linear"}; }
};

std::unique_ptr<Subject> make_subject();

}  // namespace tessera::compositions
