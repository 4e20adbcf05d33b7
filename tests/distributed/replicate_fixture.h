// What the tests of data-parallel training share: small models, batches, and one process that does
// the work of all ranks.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/parallel.h>
#include <nlohmann/json.hpp>

#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/distributed/transport/process_group.h>
#include <tessera/nn/container.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"

namespace tessera::distributed {

inline bool ranks_are_threads() { return std::getenv("TESSERA_TEST_MPI") == nullptr; }
inline bool has_ranks(int size) {
  return ranks_are_threads() || std::atoi(std::getenv("TESSERA_TEST_MPI")) == size;
}
#define NEEDS_RANKS(size) \
  if (!has_ranks(size)) GTEST_SKIP() << "needs " << (size) << " ranks"
// For what looks at all ranks from one place; the same program runs so without mpirun.
#define NEEDS_THREADS \
  if (!ranks_are_threads()) GTEST_SKIP() << "its ranks are threads of one process"

// The world of processes under mpirun: made at its first use, left after the last test.
class ProcessWorld : public testing::Environment {
 public:
  static std::unique_ptr<ProcessGroup>& group() {
    static std::unique_ptr<ProcessGroup> instance;
    return instance;
  }
  void TearDown() override { group().reset(); }
};
inline const testing::Environment* const kProcessWorld =
    testing::AddGlobalTestEnvironment(new ProcessWorld);

// Under mpirun the processes are the ranks; there only bodies for as many ranks as there are
// processes run. Native reductions are then MPI's own, however few the ranks.
inline void on_ranks(int size, const std::function<void(int rank)>& body) {
  if (ranks_are_threads()) return compared_ranks(size, body);
  if (!has_ranks(size)) return;
  std::unique_ptr<ProcessGroup>& group = ProcessWorld::group();
  if (!group) {
    group = std::make_unique<ProcessGroup>(ProcessGroupOptions{.backend = {.exchange_ranks = 1}});
  }
  set_num_threads(1);
  const CommTrace::Scope scope(*rank_context().trace);
  body(rank());
  check_equal_traces(scope);
}
// Whether this thread keeps what a test looks at after on_ranks: of threads one does, of processes
// each.
inline bool keeps_results(int rank) { return rank == 0 || !ranks_are_threads(); }

// Collectives for gradients that this rank has issued so far and the trace keeps.
inline Traffic gradient_traffic() {
  Traffic traffic;
  for (const CommRecord& record : rank_context().trace->records()) {
    if (record.channel == Channel::kGradient) traffic += {1, record.bytes};
  }
  return traffic;
}
inline int64_t gradient_collectives() { return gradient_traffic().collectives; }

// Elements of every parameter's gradient, by name; nothing where there is none.
struct Gradients {
  std::vector<std::string> names;
  std::vector<std::vector<float>> values;
  friend bool operator==(const Gradients&, const Gradients&) = default;
};
inline Gradients gradients_of(const nn::ModuleBase& model) {
  Gradients result;
  for (const auto& [name, tensor] : model.named_parameters()) {
    result.names.push_back(name);
    result.values.push_back(tensor.grad().defined() ? tensor.grad().to_vector<float>()
                                                    : std::vector<float>());
  }
  return result;
}
inline std::vector<std::vector<float>> values_of(const nn::ModuleBase& model) {
  std::vector<std::vector<float>> result;
  for (const auto& [name, tensor] : model.named_parameters()) {
    result.push_back(tensor.to_vector<float>());
  }
  return result;
}

// Bits, with one 0: a rank without a gradient adds zeros, which turns -0 into 0.
inline void expect_same_bits(const Gradients& a, const Gradients& b) {
  ASSERT_EQ(a.names, b.names);
  for (size_t i = 0; i < a.values.size(); ++i) {
    ASSERT_EQ(a.values[i].size(), b.values[i].size()) << a.names[i];
    for (size_t j = 0; j < a.values[i].size(); ++j) {
      ASSERT_EQ(a.values[i][j], b.values[i][j]) << a.names[i] << " element " << j;
    }
  }
}

// Three layers of 3180 parameters in all.
struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 8, 32)),
        second(add<nn::Linear>("second", 32, 64)),
        third(add<nn::Linear>("third", 64, 12)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))); }
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& third;
};

// Eight layers; each rank may call the two of a pair in its own order.
struct Pairs : nn::Module<Pairs> {
  Pairs() {
    for (int i = 0; i < 8; ++i) layers.push_back(&add<nn::Linear>("l" + std::to_string(i), 8, 8));
  }
  Tensor forward(const Tensor& x, unsigned swapped, unsigned skipped) {
    Tensor y = x;
    for (size_t pair = 0; pair < 4; ++pair) {
      const size_t first = 2 * pair + (swapped >> pair & 1), second = 4 * pair + 1 - first;
      Tensor sum = y + (*layers[first])(y);
      if (!(skipped >> pair & 1)) sum = sum + (*layers[second])(y);
      y = tanh(sum);
    }
    return y;
  }
  std::vector<nn::Linear*> layers;
};

// The loss of batch number `index`: a pure function, the same on any rank.
template <class Model>
Tensor loss_of(Model& model, int64_t index, int64_t rows = 5) {
  const Tensor x = randn({rows, 8}, {}, RandomStream{7, static_cast<uint64_t>(index)});
  const Tensor y = model(x);
  return (y * y).mean();
}

// Buckets small enough that a few thousand parameters make several.
inline ReplicateOptions small_buckets() {
  return {.first_bucket_bytes = 1024, .bucket_bytes = 6000};
}

// What one process calculates, beside the ranks of a test: with a thread and a seed of its own.
inline void in_one_process(const std::function<void()>& body) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  manual_seed(3);
  body();
}

// One process: batches first, first + 1... one backward each, added up, multiplied once at the end.
template <class Model>
Gradients accumulate_in_one_process(Model& model, int64_t first, int64_t count, double divisor) {
  model.zero_grad();
  for (int64_t i = 0; i < count; ++i) loss_of(model, first + i).backward();
  const NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) mul_(parameter.grad(), Scalar(1 / divisor));
  }
  return gradients_of(model);
}

}  // namespace tessera::distributed
