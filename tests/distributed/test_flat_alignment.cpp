// What lies with others in one piece of memory begins where a GPU moves 16 bytes at once, in every
// mode and dtype; what fills up is 0 and nobody's.
// ctest labels: threads
#include <cstdint>
#include <cstring>
#include <set>

#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/data_parallel/communication_hook.h>

#include "distributed/sharded_fixture.h"

namespace tessera::distributed::test_flat_alignment {
namespace {

constexpr Way kModes[] = {Way::kReplicate, Way::kZero1,     Way::kZero2,
                          Way::kFully,     Way::kFullyKept, Way::kZero3};
constexpr uintptr_t kBytes = 16;

// Biases of 1, 2, 3 and 10 elements, in front of other parameters.
struct Uneven : nn::Module<Uneven> {
  Uneven()
      : first(add<nn::Linear>("first", 8, 10)),
        second(add<nn::Linear>("second", 10, 3)),
        third(add<nn::Linear>("third", 3, 2)),
        fourth(add<nn::Linear>("fourth", 2, 1)),
        fifth(add<nn::Linear>("fifth", 1, 10)) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = third(relu(second(relu(first(x.to(first.weight.dtype()))))));
    seen.clear();
    for (const Tensor& parameter : parameters()) seen.push_back(raw::alias(parameter));
    return fifth(fourth(h)).to(kF32);
  }
  TensorList seen;  // the parameters in the last call
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& third;
  nn::Linear& fourth;
  nn::Linear& fifth;
};

// Memory that is handed out next holds no zeros.
void spoil_memory() {
  TensorList spoilt;
  for (int64_t bytes = 16; bytes <= 16384; bytes *= 2) {
    for (int i = 0; i < 4; ++i) spoilt.push_back(raw::full({bytes}, 255, kU8));
  }
}

// The elements that lie here, of a DTensor too.
Tensor local_of(const Tensor& tensor) { return raw::alias(tensor); }

void expect_aligned(const Tensor& tensor, const std::string& name) {
  if (tensor.numel() == 0) return;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data()) % kBytes, 0u) << name;
}

// Of what lies behind each tensor, up to where the next one may begin.
void expect_zeros_behind(const TensorList& tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const int64_t begin = tensor.offset() * size_of(tensor.dtype()), end = begin + tensor.nbytes();
    const int64_t next =
        std::min<int64_t>((end + 15) / 16 * 16, static_cast<int64_t>(tensor.storage()->bytes()));
    const char* const bytes = static_cast<const char*>(tensor.data()) - begin;
    for (int64_t i = end; i < next; ++i) EXPECT_EQ(bytes[i], 0) << i << " of " << tensor;
  }
}

struct Case {
  const char* name;
  DType dtype = kF32;
  std::optional<DType> gradient_dtype = {};
  MixedPrecisionPolicy precision = {};  // of fully_shard()
};
const Case kCases[] = {
    {"f32"},
    {"f64", kF64},
    {"bf16", kBF16},
    {"f16", kF16},
    {"bf16 with gradients in f32", kBF16, kF32},
};
const Case kMixed[] = {
    {"read in bf16", kF32, {}, {.param_dtype = kBF16}},
    {"read in bf16, reduced in f32", kF32, {}, {.param_dtype = kBF16, .reduce_dtype = kF32}},
    {"reduced in bf16", kF32, {}, {.reduce_dtype = kBF16}},
};

using Values = std::map<std::string, std::vector<float>>;
struct Outcome {
  std::vector<double> losses, norms;
  Values gradients, values;
};
void expect_equal(const Outcome& own, const Outcome& expected) {
  EXPECT_EQ(own.losses, expected.losses);
  EXPECT_EQ(own.norms, expected.norms);
  EXPECT_EQ(own.gradients, expected.gradients);
  EXPECT_EQ(own.values, expected.values);
}

Outcome train(Way way, const Case& one, int rank, int ranks, int micros,
              const std::shared_ptr<CommunicationHook>& hook = nullptr) {
  spoil_memory();
  manual_seed(3);
  Uneven model;
  model.to(one.dtype);
  Mesh mesh(world());
  const auto parallel = shard_in(
      way, model, mesh,
      {.bucket_bytes = 600, .precision = one.precision, .gradient_dtype = one.gradient_dtype});
  if (hook) dynamic_cast<Replica&>(*parallel).set_communication_hook(hook);
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1, .momentum = 0.9});
  Outcome outcome;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      StepPlan plan = StepPlan::of(micro, micros);
      // Sums go on at their owners, of ZeRO-2 always.
      const bool may_go_on = way != Way::kReplicate && way != Way::kZero1;
      if (way == Way::kZero2 || (may_go_on && step == 1)) plan.sync_gradients = true;
      parallel->set_plan(plan);
      const Tensor loss = loss_of(model, (step * micros + micro) * ranks + rank);
      outcome.losses.push_back(loss.item());
      for (const Tensor& tensor : model.seen) expect_aligned(tensor, "read in a call");
      loss.backward();
      for (const Tensor& whole : parallel->wholes()) {
        if (whole.grad().defined()) expect_aligned(whole.grad(), "a whole gradient");
      }
      TensorList parts;
      for (const auto& [name, parameter] : model.named_parameters()) {
        expect_aligned(local_of(parameter), name);
        parts.push_back(local_of(parameter));
        if (!parameter.grad().defined()) continue;
        expect_aligned(local_of(parameter.grad()), "the gradient of " + name);
        parts.push_back(local_of(parameter.grad()));
      }
      expect_zeros_behind(parts);
    }
    if (one.dtype == kF32) {
      outcome.norms.push_back(optim::clip_grad_norm(model.parameters(), 0.5).item());
    }
    outcome.gradients = whole_gradients(model);
    optimizer.step();
    optimizer.zero_grad();
  }
  outcome.values = whole_values(model);
  return outcome;
}

TEST(FlatAlignment, EveryParameterAndGradientBeginsAt16BytesInEveryModeAndDtype) {
  for (const Case& one : kCases) {
    for (const int ranks : {1, 2, 3}) {
      Outcome expected;
      for (const Way way : kModes) {
        SCOPED_TRACE(testing::Message() << one.name << ", " << name_of(way) << ", " << ranks);
        compared_ranks(ranks, [&](int rank) {
          train(way, one, rank, ranks, 2);  // gradients add up here, or there
          const Outcome own = train(way, one, rank, ranks, 1);
          if (rank != 0) return;
          // A mean of 16 bits is rounded once in an all-reduce, and twice by the owner of a part.
          const bool rounds_twice = size_of(one.gradient_dtype.value_or(one.dtype)) == 2;
          if (way == (rounds_twice ? Way::kZero1 : Way::kReplicate)) expected = own;
          if (way == Way::kReplicate) return;
          expect_equal(own, expected);
        });
      }
    }
  }
}

TEST(FlatAlignment, SoDoThoseThatAreReadAndReducedInOtherDtypes) {
  for (const Case& one : kMixed) {
    for (const int ranks : {1, 2, 3}) {
      Outcome expected;
      for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3}) {
        SCOPED_TRACE(testing::Message() << one.name << ", " << name_of(way) << ", " << ranks);
        compared_ranks(ranks, [&](int rank) {
          train(way, one, rank, ranks, 2);  // gradients add up here, or there
          const Outcome own = train(way, one, rank, ranks, 1);
          if (rank != 0) return;
          if (way == Way::kFully) expected = own;
          expect_equal(own, expected);
        });
      }
    }
  }
}

// Whose square matrices are made of all gradients of a bucket, without what fills up.
TEST(FlatAlignment, HooksLeaveZerosBehindEveryGradient) {
  for (const bool batched : {false, true}) {
    SCOPED_TRACE(batched);
    compared_ranks(2, [&](int rank) {
      const auto hook = std::make_shared<PowerSgdHook>(
          PowerSgdOptions{.rank = 1, .start_step = 0, .batched = batched});
      train(Way::kReplicate, kCases[0], rank, 2, 1, hook);
    });
  }
}

}  // namespace
}  // namespace tessera::distributed::test_flat_alignment
