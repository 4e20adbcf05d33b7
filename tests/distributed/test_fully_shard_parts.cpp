// Parameters that are parts along other axes before fully_shard() cuts them: trained, saved and
// loaded with the bits of one process.
// ctest labels: threads
#include <fstream>
#include <sstream>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/init.h>
#include <tessera/nn/materialise.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/muon.h>

#include "distributed/dtensor_fixture.h"
#include "distributed/sharded_fixture.h"
#include "finished_process.h"

namespace tessera::distributed::test_fully_shard_parts {
namespace {

// How a parameter lies along the other axes before it is sharded.
struct Row {
  const char* name;
  Shape shape;
  Placement placement;
};
const std::vector<Row> kAttention = {
    {"c_attn", {12, 8}, BlockShard(0, 3)},
    {"c_attn_bias", {12}, BlockShard(0, 3)},
    {"c_proj", {8, 12}, Shard(1)},
    {"norm", {7}, Replicate()},
};
const std::vector<Row> kMlp = {
    {"gate_up", {5, 12}, BlockShard(1, 2)},
    {"fc_bias", {10}, Shard(0)},
    {"odd", {7, 5}, Shard(0)},  // neither dimension divides
    {"few", {3}, Shard(0)},     // some ranks have none of it
};
const std::vector<Row> kRoot = {{"table", {9, 4}, Shard(0)}};

// tp of 0: whole parameters.
struct Layout {
  int dp_shard = 1, tp = 0, dp_replicate = 1;
  bool tp_first = false;  // the axes in the other order
  Way way = Way::kFully;
  bool even = false;  // only what two ranks along tp cut evenly
  int ranks() const { return dp_shard * std::max(tp, 1) * dp_replicate; }
  std::string describe() const {
    return "dp_replicate " + std::to_string(dp_replicate) + ", dp_shard " +
           std::to_string(dp_shard) + ", tp " + std::to_string(tp) +
           (tp_first ? ", tp first, " : ", ") + name_of(way);
  }
};

// Its arithmetic is element by element: what a rank has of a gradient has the bits of the whole's.
struct Weights : nn::Module<Weights> {
  using Place = std::function<Tensor(const Row& row, const Tensor& whole)>;
  Weights(const std::vector<Row>& rows, const Place& place, bool even) {
    for (const Row& row : rows) {
      const int dim = shard_dim(row.placement);
      if (even && dim >= 0 && row.shape[dim] % (2 * blocks_of(row.placement)) != 0) continue;
      const Tensor values =
          randn(row.shape, {},
                RandomStream{5, static_cast<uint64_t>(row.name[0]) + std::string(row.name).size()});
      own.push_back(&parameter(row.name, place(row, values)));
    }
  }
  Tensor forward(const Tensor& x) {
    if (inside) inside();
    Tensor loss = scalar_tensor(0, kF32);
    for (const Tensor* w : own) loss = loss + sum(square(*w - Scalar(0.5)) * *w) * x;
    return loss;
  }
  std::vector<const Tensor*> own;
  std::function<void()> inside;
};
struct Parts : nn::Module<Parts> {
  Parts(const Weights::Place& place, bool even)
      : attention(add<Weights>("attention", kAttention, place, even)),
        mlp(add<Weights>("mlp", kMlp, place, even)),
        rest(add<Weights>("rest", kRoot, place, even)) {}
  Tensor forward(const Tensor& x) { return attention(x) + mlp(x) + rest(x); }
  Weights &attention, &mlp, &rest;
};

std::string bytes_of(const Tensor& x) {
  const Tensor whole = x.contiguous();
  return {static_cast<const char*>(whole.data()), static_cast<size_t>(whole.nbytes())};
}

struct Training {
  explicit Training(const Layout& layout_in)
      : layout(layout_in),
        mesh(layout.ranks() > 1 ? std::make_unique<Mesh>(world(), axes()) : nullptr),
        model(
            [this](const Row& row, const Tensor& whole) {
              if (layout.tp == 0) return whole;
              return distribute_tensor(whole, (*mesh)["tp"], {row.placement}).set_requires_grad();
            },
            layout.even) {
    if (mesh != nullptr) {
      Mesh& data = layout.dp_replicate > 1 ? mesh->submesh({"dp_replicate", "dp_shard"})
                                           : (*mesh)["dp_shard"];
      parallel = shard_in(layout.way, model, data, {.average = GradientAverage::kNone});
    }
    NamedTensors matrices, vectors;
    for (const NamedTensor& named : model.named_parameters()) {
      (whole_shape(named.tensor).size() == 2 ? matrices : vectors).push_back(named);
    }
    muon = std::make_unique<optim::Muon>(matrices, optim::MuonOptions{.lr = 0.01});
    adamw = std::make_unique<optim::AdamW>(vectors, optim::AdamWOptions{.lr = 0.01});
    average =
        std::make_unique<optim::EMA>(model.named_parameters(), optim::EMAOptions{.decay = 0.5});
  }

  // Four micro-batches a step, dealt to the data ranks in turn.
  void train(int steps) {
    const int ranks = layout.dp_shard * layout.dp_replicate;
    const int own = mesh == nullptr ? 0 : mesh->coordinate("dp_shard");
    for (int step = 0; step < steps; ++step) {
      muon->zero_grad();
      adamw->zero_grad();
      for (int i = own; i < 4; i += ranks) {
        model(scalar_tensor(0.3 + i + step, kF32)).backward();
      }
      norms.push_back(optim::clip_grad_norm(model.parameters(), 1.0).to_vector()[0]);
      muon->step();
      adamw->step();
      average->update();
    }
  }

  accelerate::TrainingState state() {
    return {.models = {&model}, .optimizers = {muon.get(), adamw.get()}};
  }

  // Of all values, whole. Collective.
  std::string bits(bool averages = false) const {
    std::string bits;
    std::vector<StateDict> states = {model.state_dict(), muon->state_dict(), adamw->state_dict()};
    if (averages) states.push_back(average->state_dict());
    for (const StateDict& one : states) {
      for (const auto& [name, tensor] : one) {
        const NoGradGuard no_grad;
        bits += name + "=" + bytes_of(is_dtensor(tensor) ? full_tensor(tensor) : tensor);
      }
    }
    return bits;
  }

  const Layout layout;
  std::unique_ptr<Mesh> mesh;
  Parts model;
  std::unique_ptr<DataParallelModel> parallel;
  std::unique_ptr<optim::Muon> muon;
  std::unique_ptr<optim::AdamW> adamw;
  std::unique_ptr<optim::EMA> average;
  std::vector<double> norms;

 private:
  std::vector<MeshAxis> axes() const {
    std::vector<MeshAxis> axes = {{"dp_shard", layout.dp_shard}};
    if (layout.dp_replicate > 1) axes.insert(axes.begin(), {"dp_replicate", layout.dp_replicate});
    if (layout.tp > 0) {
      axes.insert(layout.tp_first ? axes.begin() : axes.end(), {"tp", layout.tp});
    }
    return axes;
  }
};

const std::vector<Layout> kLayouts = {
    {2, 2}, {1, 4}, {4, 0}, {1, 2}, {2, 3}, {4, 2}, {2, 2, 1, true}, {2, 4, 1, true},
};

TEST(FullyShardParts, AreCutOnceMoreOverBothAxes) {
  on_ranks(4, [](int) {
    Training training({2, 2});
    std::map<std::string, Placements> found;
    for (const auto& [name, tensor] : training.model.named_parameters()) {
      EXPECT_EQ(&mesh_of(tensor), training.mesh.get()) << name;
      EXPECT_EQ(tensor.storage(), raw::alias(tensor).storage());
      found[name] = placements_of(tensor);
    }
    const std::map<std::string, Placements> expected = {
        // Along the dimension that tp leaves, where it divides, else within tp's chunks.
        {"attention.c_attn", {Shard(1), BlockShard(0, 3)}},
        {"attention.c_attn_bias", {StridedShard(0, 2), BlockShard(0, 3)}},
        {"attention.c_proj", {Shard(0), Shard(1)}},
        {"attention.norm", {Shard(0), Replicate()}},
        {"mlp.gate_up", {Shard(0), BlockShard(1, 2)}},
        {"mlp.fc_bias", {StridedShard(0, 2), Shard(0)}},
        {"mlp.odd", {StridedShard(0, 2), Shard(0)}},
        {"mlp.few", {StridedShard(0, 2), Shard(0)}},
        {"rest.table", {Shard(1), Shard(0)}},
    };
    EXPECT_EQ(found, expected);
  });
}

TEST(FullyShardParts, InACallAParameterIsThisRanksPartAlongTheOtherAxes) {
  on_ranks(4, [](int) {
    Training training({2, 2});
    Mesh& tp = (*training.mesh)["tp"];
    int seen = 0;
    training.model.attention.inside = [&] {
      for (size_t i = 0; i < kAttention.size(); ++i) {
        const Tensor& w = *training.model.attention.own[i];
        const Row& row = kAttention[i];
        EXPECT_FALSE(is_dtensor(w));
        EXPECT_EQ(w.shape(), (DTensorSpec{&tp, {row.placement}, row.shape}.local_shape()));
        ++seen;
      }
    };
    training.model(scalar_tensor(1, kF32)).backward();
    EXPECT_EQ(seen, 4);
    const Tensor gradient = training.model.attention.own[0]->grad();
    EXPECT_EQ(describe(gradient), describe(*training.model.attention.own[0]));
  });
}

TEST(FullyShardParts, TrainWithTheBitsOfOneProcess) {
  Training alone({});
  alone.train(3);
  const std::string expected = alone.bits(true);
  for (const Layout& layout : kLayouts) {
    compared_ranks(layout.ranks(), [&](int) {
      Training training(layout);
      EXPECT_EQ(training.bits(true) == expected, false);
      training.train(3);
      EXPECT_EQ(training.norms, alone.norms) << layout.describe();
      EXPECT_TRUE(training.bits(true) == expected) << layout.describe();
    });
  }
}

TEST(FullyShardParts, RunsOfPartsTrainWithTheBitsOfOneProcess) {
  Layout whole;
  whole.even = true;
  Training alone(whole);
  alone.train(3);
  const std::string expected = alone.bits(true);
  const TestFolder folder;
  for (const Layout& layout :
       {Layout{4, 2, 1, false, Way::kZero1, true}, Layout{2, 2, 1, false, Way::kZero2, true},
        Layout{2, 2, 1, true, Way::kZero2, true}, Layout{1, 2, 1, false, Way::kZero2, true}}) {
    compared_ranks(layout.ranks(), [&](int) {
      Training training(layout);
      const Tensor c_attn = *training.model.attention.own[0];
      EXPECT_EQ(c_attn.dim(), 1);
      EXPECT_EQ(placements_of(c_attn)[layout.tp_first ? 0 : 1], Placement(BlockShard(0, 3)));
      training.train(3);
      EXPECT_EQ(training.norms, alone.norms) << layout.describe();
      EXPECT_TRUE(training.bits(true) == expected) << layout.describe();
      accelerate::StateIo().save_state(training.state(), folder.path("state"));
    });
    // And from their parts into others.
    for (const Layout& to : {Layout{2, 2, 1, false, Way::kZero2, true}, whole,
                             Layout{2, 2, 1, true, Way::kFully, true}}) {
      compared_ranks(to.ranks(), [&](int) {
        Training training(to);
        accelerate::StateIo().load_state(training.state(), folder.path("state"));
        EXPECT_TRUE(training.bits() == alone.bits()) << layout.describe() << to.describe();
      });
    }
  }
}

TEST(FullyShardParts, ANormIsReducedOnceForEachSetOfAxesThatCut) {
  compared_ranks(4, [](int) {
    Training training({2, 2});
    training.model(scalar_tensor(1, kF32)).backward();
    const CommTrace::Scope scope(*rank_context().trace);
    optim::clip_grad_norm(training.model.parameters(), 1.0);
    std::map<std::string, int> calls;
    for (const CommRecord& record : scope.records()) ++calls[record.group];
    // Cut over both, and over dp_shard alone.
    EXPECT_EQ(calls.size(), 2u);
    for (const auto& [group, count] : calls) EXPECT_EQ(count, 1) << group;
  });
}

// The weight of a norm, whose ranks along tp have tokens of their own.
struct Scale : nn::Module<Scale> {
  explicit Scale(const Tensor& own, const Tensor& other)
      : weight(parameter("weight", own)), cut(parameter("cut", other)) {}
  Tensor forward(const Tensor& x) { return sum(weight * x) + sum(cut * x); }
  const Tensor &weight, &cut;
};

TEST(FullyShardParts, OfACopyWhoseGradientIsASummandAllRanksAddItUpAtOnce) {
  for (const bool tp_first : {false, true}) {
    compared_ranks(6, [&](int) {
      std::vector<MeshAxis> axes = {{"dp", 2}, {"tp", 3}};
      if (tp_first) std::swap(axes[0], axes[1]);
      Mesh mesh(world(), axes);
      Mesh& tp = mesh["tp"];
      Scale model(distribute_tensor(numbered({7, 2}), tp, {Replicate()}),
                  distribute_tensor(numbered({6, 2}), tp, {Shard(0)}));
      set_grad_placements(model.weight, {Partial()});
      EXPECT_EQ(*grad_placements_of(model.weight), Placements{Partial()});
      fully_shard(model, mesh["dp"], {.average = GradientAverage::kNone});
      EXPECT_EQ(mesh_of(model.weight).axes(), (std::vector<MeshAxis>{{"dp_tp", 6}}));
      EXPECT_EQ(placements_of(model.weight), Placements{Shard(0)});
      EXPECT_EQ(grad_placements_of(model.weight), nullptr);
      EXPECT_EQ(&mesh_of(model.cut), &mesh);
      const int dp = mesh.coordinate("dp"), t = mesh.coordinate("tp");
      const auto sums = [](const CommTrace::Scope& scope) {
        int calls = 0;
        for (const CommRecord& record : scope.records()) {
          calls +=
              record.channel == Channel::kGradient && record.operation == Operation::kReduceScatter;
        }
        return calls;
      };
      for (int step = 1; step <= 2; ++step) {  // the second goes on with the sum
        const Tensor loss = model(scalar_tensor(1 + dp + 10 * t, kF32));
        const CommTrace::Scope scope(*rank_context().trace);
        loss.backward();
        EXPECT_EQ(sums(scope), 2) << "one over all, one along dp";
        // Of all ranks 1 + dp + 10 t; of a chunk along tp its own alone.
        expect_equal(full_tensor(model.weight.grad()), full({7, 2}, step * 69.0), "weight");
        expect_equal(to_local(model.cut.grad()),
                     full(model.cut.grad().shape(), step * (3.0 + 20 * t)), "cut");
      }
      const double norm = optim::clip_grad_norm(model.parameters(), 1e9).to_vector()[0];
      double squares = 14 * 138.0 * 138;
      for (int c = 0; c < 3; ++c) squares += 4 * std::pow(6.0 + 40 * c, 2);
      EXPECT_FLOAT_EQ(norm, std::sqrt(squares));
    });
  }
}

TEST(FullyShardParts, AStatedGradientIsThatOfTheLocalPart) {
  compared_ranks(2, [](int rank) {
    Mesh mesh(world());
    const Tensor copy = distribute_tensor(numbered({3}), mesh, {Replicate()}).set_requires_grad();
    set_grad_placements(copy, {Partial()});
    sum(to_local(copy) * Scalar(rank + 1.0)).backward();
    expect_equal(to_local(copy.grad()), full({3}, 3.0), "summed");
    EXPECT_THROW(set_grad_placements(copy, {Shard(0)}), ConfigError);
    EXPECT_EQ(grad_placements_of(copy.detach()), nullptr);
    EXPECT_EQ(grad_placements_of(ones({3})), nullptr);
    const Tensor shard = distribute_tensor(numbered({4}), mesh, {Shard(0)});
    EXPECT_THROW(set_grad_placements(shard, {Partial()}), ConfigError);
  });
}

class SavedParts : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  TestFolder folder_;
};

TEST_F(SavedParts, LoadIntoEveryOtherLayoutAndGoOn) {
  Training alone({});
  alone.train(2);
  const std::string saved = alone.bits();
  alone.train(1);
  const std::string expected = alone.bits();
  std::vector<Layout> all = kLayouts;
  all.push_back({});
  all.push_back({2, 2, 2});
  for (size_t i = 0; i < all.size(); ++i) {
    const Layout& from = all[i];
    // What copies add up in another order is to tolerance: there the saved bits are loaded first.
    const bool hybrid = from.dp_replicate > 1;
    compared_ranks(from.ranks(), [&](int) {
      Training training(from);
      if (hybrid) {
        accelerate::StateIo().load_state(training.state(), path(std::to_string(i - 1)));
      } else {
        training.train(2);
      }
      accelerate::StateIo().save_state(training.state(), path(std::to_string(i)));
    });
    for (size_t j = i % 3; j < all.size(); j += 3) {
      const Layout& to = all[j];
      compared_ranks(to.ranks(), [&](int) {
        Training training(to);
        accelerate::StateIo().load_state(training.state(), path(std::to_string(i)));
        const std::string what = from.describe() + " to " + to.describe();
        EXPECT_TRUE(training.bits() == saved) << what;
        if (to.dp_replicate > 1) return;
        training.train(1);
        EXPECT_TRUE(training.bits() == expected) << what;
      });
    }
  }
}

std::string file_in(const std::string& folder) {
  std::ifstream file(folder + "/model.safetensors", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_F(SavedParts, AreExportedAsOneProcessDoesAndLoadedFromThere) {
  Training alone({});
  alone.train(1);
  accelerate::save_model(alone.model, path("alone"), {}, world());
  const std::string expected = file_in(path("alone"));
  ASSERT_FALSE(expected.empty());
  for (const Layout& layout : kLayouts) {
    compared_ranks(layout.ranks(), [&](int) {
      Training training(layout);
      training.train(1);
      accelerate::save_model(training.model, path("parts"), {}, world());
      accelerate::StateIo().save_state(training.state(), path("state"));
      Training fresh(layout);
      for (const bool first_rank_reads : {false, true}) {
        fresh.train(1 + first_rank_reads);
        accelerate::load_model(fresh.model, path("alone"), {.first_rank_reads = first_rank_reads},
                               world());
        EXPECT_EQ(whole_values(fresh.model), whole_values(training.model)) << layout.describe();
      }
    });
    EXPECT_TRUE(file_in(path("parts")) == expected) << layout.describe();
    accelerate::export_checkpoint(path("state"), path("exported"), {.prefix = "model.0."});
    EXPECT_TRUE(file_in(path("exported")) == expected) << layout.describe();
  }
}

TEST(FullyShardParts, WholeParametersInAScopeSayThatTheyArePartsAlongTheOtherAxes) {
  compared_ranks(4, [](int) {
    Training training({2, 2});
    const auto before = whole_values(training.model);
    {
      const auto scope = full_parameters(training.model, {.writes = true});
      for (const auto& [name, tensor] : training.model.named_parameters()) {
        ASSERT_TRUE(is_dtensor(tensor)) << name;
        EXPECT_EQ(mesh_of(tensor).describe(), "mesh(tp=2) of mesh(dp_shard=2, tp=2)");
        EXPECT_THROW(sum(tensor), UnsupportedError) << name;
      }
      EXPECT_EQ(whole_values(training.model), before);
      const NoGradGuard no_grad;
      for (const Tensor& tensor : training.model.parameters()) {
        mul_(to_local(tensor, {.grad_placements = placements_of(tensor)}), Scalar(2.0));
      }
    }
    auto doubled = before;
    for (auto& [name, values] : doubled) {
      for (float& value : values) value *= 2;
    }
    EXPECT_EQ(whole_values(training.model), doubled);
    training.train(1);
  });
}

// Made without memory, cut along tp, cut again: each rank then fills its own elements.
TEST(FullyShardParts, AreInitialisedWithTheBitsOfOneProcess) {
  struct Net : nn::Module<Net> {
    Net() {
      for (const std::vector<Row>* rows : {&kAttention, &kMlp, &kRoot}) {
        for (const Row& row : *rows) {
          nn::init::normal(parameter(row.name, row.shape), 0, 1, initial_stream(row.name));
        }
      }
    }
    Tensor forward(const Tensor& x) { return x; }
  };
  manual_seed(3);
  const auto expected = whole_values(Net());
  for (const bool tp_first : {false, true}) {
    compared_ranks(6, [&](int) {
      std::vector<MeshAxis> axes = {{"dp_shard", 2}, {"tp", 3}};
      if (tp_first) std::swap(axes[0], axes[1]);
      Mesh mesh(world(), axes);
      manual_seed(3);
      std::optional<Net> net;
      {
        const nn::ParameterDefaultsGuard guard({.device = kMeta});
        net.emplace();
      }
      for (const std::vector<Row>* rows : {&kAttention, &kMlp, &kRoot}) {
        for (const Row& row : *rows) {
          const NamedTensors all = net->named_parameters();
          const Tensor whole = std::ranges::find(all, row.name, &NamedTensor::name)->tensor;
          const Tensor part = distribute_tensor(whole, mesh["tp"], {row.placement});
          copy_guard(part, whole);
          whole.set_data(part);
        }
      }
      fully_shard(*net, mesh["dp_shard"]);
      nn::materialise(*net);
      EXPECT_EQ(whole_values(*net), expected);
    });
  }
}

TEST(FullyShardParts, OfAxesThatDoNotFitAreErrorsThatNameTheParameter) {
  compared_ranks(4, [](int) {
    struct Net : nn::Module<Net> {
      explicit Net(const Tensor& w) : weight(parameter("weight", w)) {}
      Tensor forward(const Tensor& x) { return x; }
      const Tensor& weight;
    };
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}}), other(world(), {{"dp", 2}, {"x", 2}});
    {
      Net net(distribute_tensor(ones({4, 4}), mesh["tp"], {Shard(0)}));
      EXPECT_EQ(
          message_of<ConfigError>([&] { fully_shard(net, mesh); }),
          "fully_shard: 'weight': Mesh: joined: mesh(dp=2, tp=2) and mesh(tp=2) of mesh(dp=2, "
          "tp=2) share 'tp'; take sub-meshes of other axes");
      EXPECT_THROW(fully_shard(net, other["dp"]), ConfigError);
      fully_shard(net, mesh["dp"]);
      EXPECT_THROW(fully_shard(net, mesh["dp"]), ConfigError);
    }
    Net uneven(distribute_tensor(ones({5, 4}), mesh["tp"], {Shard(0)}));
    EXPECT_EQ(message_of<UnsupportedError>([&] { zero(uneven, mesh["dp"], {}); }),
              "zero: cuts parts of one size, and 'weight' is " + uneven.weight.describe() +
                  ", of which ranks hold more than others; take fully_shard()");
    Net frozen(distribute_tensor(ones({4, 4}), mesh["tp"], {Shard(0)}));
    frozen.weight.set_requires_grad(false);
    EXPECT_THROW(zero(frozen, mesh["dp"], {}), UnsupportedError);
    Net summand(from_local(ones({4, 4}), mesh["tp"], {Partial()}));
    EXPECT_EQ(message_of<UnsupportedError>([&] { fully_shard(summand, mesh["dp"]); }),
              "fully_shard: 'weight' is " + summand.weight.describe() +
                  ", and what is cut once more is a chunk or a copy along other axes; "
                  "redistribute() it first");
  });
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_parts
