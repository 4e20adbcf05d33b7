// A small training that is the same arithmetic for any number of ranks: an update takes `micro`
// batches, dealt to the ranks in order, which sum up to the bits of one process (micro = ranks).
// What the tests of checkpoints save, end, load and go on with.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <tessera/accelerate/state/state_io.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/distributed_source.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

namespace tessera {

struct CheckpointNet : nn::Module<CheckpointNet> {
  CheckpointNet() : first(add<nn::Linear>("first", 6, 10)), last(add<nn::Linear>("last", 10, 1)) {}
  Tensor forward(const Tensor& x) { return last(tanh(first(x))); }
  nn::Linear& first;
  nn::Linear& last;
};

// An object of the user's.
struct EarlyStopping {
  double best = 1e9;
  int64_t bad_epochs = 0;
  StateDict state_dict() const {
    StateDict state;
    state.set("best", scalar_tensor(best, kF64));
    state.set("bad_epochs", scalar_tensor(bad_epochs, kI64));
    return state;
  }
  void load_state_dict(const StateDict& state) {
    best = state.scalar("best");
    bad_epochs = state.at("bad_epochs").item<int64_t>();
  }
};

class CheckpointTraining {
 public:
  static constexpr int64_t kSamples = 48, kBatch = 3;

  // `micro` batches an update, a multiple of the number of ranks. `parts`: ranks hold parts of what
  // others are replicas of.
  explicit CheckpointTraining(int micro, bool parts = false)
      : micro_(micro / distributed::world_size()),
        inputs_(randn({kSamples, 6}, {}, RandomStream{5, 1})),
        dataset_(inputs_),
        optimizer(model.named_parameters(), {.lr = 0.02, .weight_decay = 0.1}),
        schedule(optimizer, {.warmup = 3, .total = 60}),
        loader(dataset_, {.batch_size = kBatch, .shuffle = true, .seed = 9}) {
    if (distributed::world_size() > 1) {
      mesh_ = std::make_unique<distributed::Mesh>(distributed::world());
      if (parts) {
        fully_shard(model.last, *mesh_);
        fully_shard(model, *mesh_, {.average = distributed::GradientAverage::kNone});
        parallel_ = std::make_unique<distributed::ShardedModel>(distributed::sharded_model(model));
      } else {
        parallel_ = std::make_unique<distributed::Replica>(distributed::replicate(
            model, *mesh_, {.average = distributed::GradientAverage::kNone}));
      }
      loader.set_source(std::make_shared<data::DistributedBatchSource>(
          std::make_shared<data::RandomSampler>(kSamples, 9), kBatch,
          data::RankShare{.rank = distributed::rank(), .world_size = distributed::world_size()}));
    }
  }

  accelerate::TrainingState state() {
    accelerate::TrainingState state;
    state.models = {&model};
    state.optimizers = {&optimizer};
    state.schedules = {schedule};
    state.loaders = {&loader};
    state.counters = accelerate::Stateful(
        [this] {
          StateDict counters;
          counters.set("updates", scalar_tensor(updates, kI64));
          return counters;
        },
        [this](const StateDict& counters) { updates = counters.at("updates").item<int64_t>(); });
    return state;
  }

  // Until `end` updates in all were made. Batches come over the borders of epochs.
  void train(int64_t end) {
    while (updates < end) {
      for (int i = 0; i < micro_; ++i) {
        auto batch = loader.next();
        if (!batch) batch = loader.next();  // of the next epoch
        std::unique_ptr<distributed::NoSync> no_sync;
        if (parallel_ && i + 1 < micro_) {
          no_sync.reset(new distributed::NoSync(parallel_->no_sync()));
        }
        const Tensor y = model((*batch)[0]);
        mean(square(y - 0.5)).backward();
      }
      {
        const NoGradGuard no_grad;
        const int micro = micro_ * distributed::world_size();
        for (const Tensor& parameter : model.parameters()) {
          const Tensor gradient = parameter.grad();
          mul_(distributed::is_dtensor(gradient) ? distributed::to_local(gradient) : gradient,
               Scalar(1.0 / micro));
        }
      }
      optimizer.step(), schedule.step(), optimizer.zero_grad();
      next_random_stream();  // what dropout would take
      ++updates;
    }
  }

  // The bits of everything that a checkpoint holds, of parts the whole: collective.
  std::string bits() const {
    std::string bits;
    const auto add = [&](const StateDict& state) {
      const NoGradGuard no_grad;
      for (const auto& [name, tensor] : state) {
        const Tensor whole =
            distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor;
        bits += name + "=";
        bits.append(static_cast<const char*>(whole.data()), static_cast<size_t>(whole.nbytes()));
      }
    };
    add(model.state_dict()), add(optimizer.state_dict()), add(schedule.state_dict());
    add(loader.state_dict());
    bits += std::to_string(updates) + "," + std::to_string(random_state().seed) + "," +
            std::to_string(random_state().next_stream);
    return bits;
  }

  // All else than it was.
  void perturb() {
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) add_(parameter, Scalar(1.5));
    for (const auto& [name, tensor] : optimizer.state_dict()) {
      if (name.ends_with("exp_avg")) fill_(tensor, 3);
    }
    manual_seed(12345);
    loader.set_cursor({7, 3});
    schedule.step();
  }

 private:
  const int micro_;  // of this rank
  Tensor inputs_;
  data::TensorDataset<1> dataset_;

 public:
  CheckpointNet model;
  optim::AdamW optimizer;
  optim::CosineSchedule schedule;
  data::DataLoader<std::array<Tensor, 1>> loader;
  int64_t updates = 0;

 private:
  std::unique_ptr<distributed::Mesh> mesh_;
  std::unique_ptr<distributed::DataParallelModel> parallel_;
};

}  // namespace tessera
