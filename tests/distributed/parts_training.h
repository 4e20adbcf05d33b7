// One small training whose parameters lie as DTensors in any way, or are plain: its arithmetic is
// element by element, so that every way has the same bits. For tests of checkpoints of parts.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/accelerate/state/state_io.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/checkpoint/parts.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/module.h>
#include <tessera/optim/optimizers.h>

namespace tessera {

struct Lying {
  enum class Way { kPlain, kReplicate, kRows, kColumns, kFlat, kBlocks };
  int ranks = 1;
  Way way = Way::kPlain;
  bool two_axes = false;  // (ranks / 2) x 2: copied along the first, blocks cut once more

  std::string describe() const {
    static const char* const kNames[] = {"plain",     "Replicate", "Shard(0)",
                                         "Shard(-1)", "FlatShard", "BlockShard(-1)"};
    return std::string(kNames[static_cast<int>(way)]) + (two_axes ? " of 2 columns" : "") + " on " +
           std::to_string(ranks);
  }
};

struct PartsNet : nn::Module<PartsNet> {
  using Place = std::function<Tensor(const std::string& name, const Tensor& whole)>;
  // `rows`: of the table; for nets that a state does not fit.
  explicit PartsNet(const Place& place, int64_t rows = 5) {
    int64_t first = 0;
    const auto make = [&](const std::string& name, const Shape& shape) -> const Tensor& {
      const int64_t numel = numel_of(shape);
      const Tensor values =
          (arange(numel).to(kF32) + Scalar(static_cast<double>(first))) * Scalar(0.0625);
      first += numel;
      return parameter(name, place(name, reshape(values, shape)));
    };
    make("table", {rows, 3}), make("cube", {2, 3, 4}), make("bias", {7});
    make("scale", {}), make("tiny", {1});
    share_parameter("again", make("last", {3, 2}));
    buffer("count", arange(3).to(kI64));
  }
  Tensor forward(const Tensor& x) { return x; }
};

class PartsTraining {
 public:
  static constexpr int64_t kElements = 15 + 24 + 7 + 1 + 1 + 6;

  explicit PartsTraining(const Lying& lying, int64_t rows = 5, DType dtype = kF32)
      : lying_(lying),
        dtype_(dtype),
        mesh(make_mesh(lying)),
        model([this](const std::string&, const Tensor& whole) { return placed(whole.to(dtype_)); },
              rows),
        optimizer(model.named_parameters(), {.lr = 0.01, .weight_decay = 0.1}) {
    manual_seed(7);
  }

  accelerate::TrainingState state() { return {.models = {&model}, .optimizers = {&optimizer}}; }

  void train(int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      Tensor loss = scalar_tensor(0, kF32);
      for (const Tensor& parameter : model.parameters()) {
        const Tensor w =
            distributed::is_dtensor(parameter) ? distributed::full_tensor(parameter) : parameter;
        loss = loss + sum(square(w - Scalar(0.5)) * w);
      }
      loss.backward();
      optimizer.step();
    }
  }

  // Of all values, whole; the same for every way. Collective.
  std::string bits() const {
    std::string bits;
    for (const StateDict& state : {model.state_dict(), optimizer.state_dict()}) {
      for (const auto& [name, tensor] : state) {
        const NoGradGuard no_grad;
        const Tensor whole =
            (distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor)
                .contiguous();
        bits += name + "=";
        bits.append(static_cast<const char*>(whole.data()), static_cast<size_t>(whole.nbytes()));
      }
    }
    return bits;
  }

 private:
  static std::unique_ptr<distributed::Mesh> make_mesh(const Lying& lying) {
    using distributed::Mesh;
    using distributed::world;
    if (lying.way == Lying::Way::kPlain) return nullptr;
    if (!lying.two_axes) return std::make_unique<Mesh>(world());
    return std::make_unique<Mesh>(
        world(), std::vector<distributed::MeshAxis>{{"dp_replicate", -1}, {"dp_shard", 2}});
  }
  Tensor placed(const Tensor& whole) {
    using namespace distributed;
    if (!mesh) return whole;
    const int64_t ranks = mesh->axes().back().size;
    Placement placement = Replicate();
    if (lying_.way == Lying::Way::kRows && whole.dim() > 0) placement = Shard(0);
    if (lying_.way == Lying::Way::kColumns && whole.dim() > 0) placement = Shard(-1);
    if (lying_.way == Lying::Way::kFlat) {
      placement = FlatShard{unit_, (kElements + ranks - 1) / ranks};
      unit_ += whole.numel();
    }
    Placements placements(mesh->axes().size(), Replicate());
    if (lying_.way == Lying::Way::kBlocks && whole.dim() > 0) {
      const int dim = static_cast<int>(whole.dim()) - 1;
      int blocks = 1;
      while (whole.size(dim) > 1 && whole.size(dim) % ++blocks != 0) {
      }
      placement = BlockShard(dim, blocks);
      if (lying_.two_axes) {
        placements[0] = dim > 0 ? Placement(Shard(0)) : StridedShard(dim, static_cast<int>(ranks));
      }
    }
    placements.back() = placement;
    return distribute_tensor(whole, *mesh, placements);
  }

  const Lying lying_;
  const DType dtype_;
  int64_t unit_ = 0;  // elements of the unit so far

 public:
  std::unique_ptr<distributed::Mesh> mesh;  // none for plain tensors
  PartsNet model;
  optim::AdamW optimizer;
};

}  // namespace tessera
