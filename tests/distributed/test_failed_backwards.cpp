// A rank that fails in the midst of a training, and how the others learn of it: at once, with its
// name and what it says, in every mode. Where all of them know, they may go on.
// ctest labels: threads
#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/batch_size.h>
#include <tessera/core/error.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::test_failed_backwards {
namespace {

using accelerate::Sharding;
using distributed::failing_ranks;
using distributed::whole_values;

constexpr Sharding kModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                               Sharding::kFsdp};
const char* name_of(Sharding sharding) {
  static const char* const names[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
  return names[static_cast<int>(sharding)];
}

struct Layer : nn::Module<Layer> {
  Layer() : linear(add<nn::Linear>("linear", 6, 6)) {}
  Tensor forward(const Tensor& x) {
    if (in_forward) in_forward();
    const Tensor y = tanh(linear(x));
    if (in_backward && y.requires_grad()) {
      register_hook(y, [this](const Tensor&) {
        in_backward();
        return Tensor();
      });
    }
    return y;
  }
  std::function<void()> in_forward, in_backward;
  nn::Linear& linear;
};

struct Tower : nn::Module<Tower> {
  Tower() {
    for (int i = 0; i < 5; ++i) layers.push_back(&add<Layer>("layer" + std::to_string(i)));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Layer* layer : layers) y = (*layer)(y);
    return y;
  }
  std::vector<Layer*> layers;
};

AcceleratorOptions in_mode(Sharding sharding) {
  AcceleratorOptions options{.seed = 5, .sharding = sharding, .config_file = ""};
  if (sharding == Sharding::kFsdp || sharding == Sharding::kZero3) {
    options.fsdp.wrap_modules = {{"Layer"}};
  }
  return options;
}

Tensor loss_of(Tower& model, int64_t batch, int64_t rows = 4) {
  const Tensor y = model(randn({rows, 6}, {}, RandomStream{7, static_cast<uint64_t>(batch)}));
  return (y * y).mean();
}

using Numbers = std::map<std::string, std::vector<float>>;

constexpr int kRanks = 3;
// Three steps of which the second one fails on rank 1, in the backward of a layer; -1: the second
// one is not made.
Numbers train(Sharding sharding, int rank, int failing_layer) {
  manual_seed(5);
  Accelerator accelerator(in_mode(sharding));
  Tower model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
  accelerator.prepare(model, optimizer);
  const auto step = [&](int64_t number) {
    const Tensor loss = loss_of(model, number * kRanks + rank);
    accelerator.backward(loss);
    optimizer.step(), optimizer.zero_grad();
  };
  step(0);
  if (failing_layer >= 0) {
    Layer& layer = *model.layers[static_cast<size_t>(failing_layer)];
    if (rank == 1) {
      layer.in_backward = [] { TS_THROW(ValueError, "here", "no luck"); };
      message_of<ValueError>([&] { step(1); });
      layer.in_backward = {};
    } else {
      const std::string message = message_of<DistributedError>([&] { step(1); });
      EXPECT_TRUE(mentions(message, "rank 1")) << message;
      EXPECT_TRUE(mentions(message, "no luck")) << message;
      EXPECT_FALSE(mentions(message, "waited")) << message;
    }
    optimizer.zero_grad();
  }
  step(2);
  return whole_values(model);
}

TEST(FailedBackwards, AreToldToAllRanksWhichGoOnWithTheValuesThatTheyHad) {
  for (const Sharding sharding : kModes) {
    Numbers expected;
    distributed::compared_ranks(kRanks, [&](int rank) {
      const Numbers values = train(sharding, rank, -1);
      if (rank == 0) expected = values;
    });
    for (const int layer : {4, 2, 0}) {
      SCOPED_TRACE(testing::Message() << name_of(sharding) << " layer " << layer);
      const auto body = [&](int rank) { EXPECT_EQ(train(sharding, rank, layer), expected); };
      // Where nothing is gathered it makes what it owes the others, with zeros.
      if (sharding == Sharding::kZero3 || sharding == Sharding::kFsdp) {
        failing_ranks("one fails in its backward", kRanks, body, {.timeout_seconds = 20});
      } else {
        distributed::compared_ranks(kRanks, body, {.timeout_seconds = 20});
      }
    }
  }
}

// Of replicas of shards: who shares no group with it hears of it by those that do.
TEST(FailedBackwards, AreToldFromGroupToGroup) {
  for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
    for (const size_t layer : {size_t{4}, size_t{2}, size_t{0}}) {
      SCOPED_TRACE(testing::Message() << name_of(sharding) << " layer " << layer);
      failing_ranks("one fails in its backward", 4,
                    [&](int rank) {
                      manual_seed(5);
                      AcceleratorOptions options = in_mode(sharding);
                      options.dp_replicate_size = 2;
                      Accelerator accelerator(options);
                      Tower model;
                      optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
                      accelerator.prepare(model, optimizer);
                      const auto run = [&] {
                        accelerator.backward(loss_of(model, rank));
                        optimizer.step(), optimizer.zero_grad();
                      };
                      if (rank == 1) {
                        model.layers[layer]->in_backward = [] {
                          TS_THROW(ValueError, "here", "no luck");
                        };
                        message_of<ValueError>(run);
                        model.layers[layer]->in_backward = {};
                      } else {
                        const std::string message = message_of<DistributedError>(run);
                        EXPECT_TRUE(mentions(message, "no luck")) << message;
                        EXPECT_FALSE(mentions(message, "waited")) << message;
                      }
                      optimizer.zero_grad();
                      run();
                    },
                    {.timeout_seconds = 20});
    }
  }
}

// Also in a micro-batch that is not reduced.
TEST(FailedBackwards, WithoutAReductionAreToldToRanksThatGather) {
  for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
    SCOPED_TRACE(name_of(sharding));
    failing_ranks("one fails in its backward", kRanks,
                  [&](int rank) {
                    manual_seed(5);
                    Accelerator accelerator(in_mode(sharding));
                    Tower model;
                    optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
                    accelerator.prepare(model, optimizer);
                    if (rank == 1) {
                      model.layers[4]->in_backward = [] {
                        TS_THROW(ValueError, "here", "no luck");
                      };
                    }
                    const auto run = [&] {
                      const auto alone = accelerator.no_sync(model);
                      accelerator.backward(loss_of(model, rank));
                    };
                    if (rank == 1) {
                      message_of<ValueError>(run);
                    } else {
                      const std::string message = message_of<DistributedError>(run);
                      EXPECT_TRUE(mentions(message, "no luck")) << message;
                    }
                  },
                  {.timeout_seconds = 20});
  }
}

// Where rank 1 has no room.
enum class Where { kForward, kBackward, kAfterBackward, kStep };

TEST(FailedBackwards, ForWantOfMemoryOnOneRankLetAllTryASmallerBatch) {
  for (const Sharding sharding : kModes) {
    for (const Where where :
         {Where::kForward, Where::kBackward, Where::kAfterBackward, Where::kStep}) {
      for (const size_t layer : {size_t{3}, size_t{1}}) {
        SCOPED_TRACE(testing::Message() << name_of(sharding) << " where " << static_cast<int>(where)
                                        << " layer " << layer);
        failing_ranks("one of them runs out of memory", kRanks,
                      [&](int rank) {
                        Accelerator accelerator(in_mode(sharding));
                        const int64_t found =
                            find_executable_batch_size(accelerator, 16, [&](int64_t size) {
                              accelerator.free_memory();
                              manual_seed(5);
                              Tower model;
                              optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
                              accelerator.prepare(model, optimizer);
                              for (int64_t step = 0; step < 3; ++step) {
                                const bool fails = rank == 1 && size > 12 && step == 1;
                                const auto run_out = [] { throw OutOfMemory("allocate: no room"); };
                                Layer& own = *model.layers[layer];
                                own.in_forward = own.in_backward = {};
                                if (fails && where == Where::kForward) own.in_forward = run_out;
                                if (fails && where == Where::kBackward) own.in_backward = run_out;
                                const Tensor loss = loss_of(model, step * kRanks + rank, size);
                                accelerator.backward(loss);
                                if (fails && where == Where::kAfterBackward) run_out();
                                accelerator.clip_grad_norm(model.parameters(), 1.0);
                                if (fails && where == Where::kStep) run_out();
                                optimizer.step(), optimizer.zero_grad();
                              }
                              return size;
                            });
                        EXPECT_EQ(found, 12);
                      },
                      {.timeout_seconds = 20});
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test_failed_backwards
