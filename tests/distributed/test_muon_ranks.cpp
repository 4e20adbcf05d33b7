// Muon, and states in bf16, where ranks hold parts of the parameters: the bits of whole ones, and
// what travels.
// ctest labels: threads
#include <tessera/core/tensor/placement.h>
#include <tessera/distributed/checkpoint/full_state.h>
#include <tessera/distributed/fully_shard/update_report.h>
#include <tessera/distributed/mesh/matrix_exchange.h>
#include <tessera/optim/muon.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_muon_ranks {
namespace {

using optim::AdamW;
using optim::Muon;

Tensor noise(const Shape& shape, uint64_t stream, DType dtype = kF32) {
  return randn(shape, {}, RandomStream{78, stream}).to(dtype);
}
using Values = std::map<std::string, std::vector<double>>;

// ---- DTensors beside whole tensors -------------------------------------------------------------

// Odd widths, fewer rows than ranks, one row, one column, and one that is nobody's twice.
const std::vector<Shape> kShapes = {{90, 7}, {2, 33}, {5, 5}, {1, 9}, {24, 1}, {13, 90}};

struct Stepped {
  Values values, states;
  friend bool operator==(const Stepped&, const Stepped&) = default;
};

// Three steps of matrices, which make(whole) cuts or leaves.
template <class Optimizer>
Stepped stepped(const typename Optimizer::Options& options, DType dtype, const auto& make) {
  NamedTensors parameters;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    parameters.push_back({"w" + std::to_string(i), make(noise(kShapes[i], i, dtype), i)});
    parameters.back().tensor.set_requires_grad();
  }
  Optimizer optimizer(parameters, options);
  for (uint64_t step = 0; step < 3; ++step) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      parameters[i].tensor.set_grad(make(noise(kShapes[i], 100 * (step + 1) + i, dtype), i));
    }
    EXPECT_TRUE(optimizer.step());
  }
  Stepped result;
  const NoGradGuard no_grad;
  const auto whole = [](const Tensor& x) {
    return (is_dtensor(x) ? full_tensor(x) : x).template to_vector<double>();
  };
  for (const auto& [name, parameter] : parameters) result.values[name] = whole(parameter);
  for (const auto& [name, state] : optimizer.state_dict()) result.states[name] = whole(state);
  return result;
}
const auto kWhole = [](const Tensor& x, size_t) { return x; };

struct Lying {
  const char* what;
  std::vector<MeshAxis> axes;
  std::function<Placements(size_t)> placements;
};

// Of each matrix in a unit in which they lie one behind the other.
FlatShard flat_place(size_t at, int ranks) {
  int64_t before = 0, all = 0;
  for (size_t i = 0; i < kShapes.size(); ++i) {
    if (i < at) before += numel_of(kShapes[i]);
    all += numel_of(kShapes[i]);
  }
  return {before, (all + ranks - 1) / ranks};
}

template <class Optimizer>
void expect_the_bits_of_whole_ones(const typename Optimizer::Options& options, DType dtype) {
  const Stepped expected = stepped<Optimizer>(options, dtype, kWhole);
  const auto check = [&](int ranks, const Lying& lying) {
    SCOPED_TRACE(std::string(lying.what) + " on " + std::to_string(ranks));
    compared_ranks(ranks, [&](int) {
      Mesh mesh(world(), lying.axes);
      const Stepped got = stepped<Optimizer>(options, dtype, [&](const Tensor& x, size_t i) {
        return distribute_tensor(x, mesh, lying.placements(i));
      });
      EXPECT_TRUE(got == expected) << lying.what;
    });
  };
  for (const int ranks : {1, 2, 3, 8}) {
    const std::vector<MeshAxis> line = {{"dp", ranks}};
    check(ranks, {"rows", line, [](size_t) { return Placements{Shard(0)}; }});
    check(ranks, {"runs", line, [&](size_t i) { return Placements{flat_place(i, ranks)}; }});
  }
  const std::vector<MeshAxis> grid = {{"a", 2}, {"b", 2}};
  check(3, {"columns", {{"dp", 3}}, [](size_t) { return Placements{Shard(1)}; }});
  check(2, {"copies", {{"dp", 2}}, [](size_t) { return Placements{Replicate()}; }});
  check(4, {"hybrid", grid, [](size_t) { return Placements{Replicate(), Shard(0)}; }});
  check(4, {"blocks", grid, [](size_t) { return Placements{Shard(0), Shard(1)}; }});
  // Where they divide: of the first dimension, or of the second.
  const auto in_blocks = [](size_t i) -> Placement {
    const int64_t rows = kShapes[i][0], columns = kShapes[i][1];
    if (rows % 3 == 0) return BlockShard(0, 3);
    return columns % 3 == 0 ? Placement(BlockShard(1, 3)) : Shard(1);
  };
  check(2, {"c_attn", {{"tp", 2}}, [&](size_t i) { return Placements{in_blocks(i)}; }});
  check(4, {"c_attn beside rows", grid, [&](size_t i) -> Placements {
              const Placement cut = in_blocks(i);
              return {Shard(1 - shard_dim(cut)), cut};
            }});
  check(4, {"strided", grid, [](size_t) { return Placements{StridedShard(0, 2), Shard(0)}; }});
  // Matrices of one list that different ranks hold.
  check(4, {"mixed", grid, [](size_t i) -> Placements {
              const Placements kinds[] = {{Replicate(), Shard(0)},
                                          {Shard(1), Replicate()},
                                          {Shard(0), Shard(1)},
                                          {Replicate(), Replicate()}};
              return kinds[i % 4];
            }});
}

TEST(MuonRanks, MatricesThatAreCutHaveTheBitsOfWholeOnes) {
  expect_the_bits_of_whole_ones<Muon>({.lr = 0.1}, kF32);
  expect_the_bits_of_whole_ones<Muon>({.lr = 0.1, .state_dtype = kBF16}, kBF16);
}

TEST(MuonRanks, StatesThatAreRoundedDoNotKnowHowTheyAreCut) {
  expect_the_bits_of_whole_ones<AdamW>({.lr = 0.1, .state_dtype = kBF16}, kF32);
}

TEST(MuonRanks, ASummandIsRefused) {
  compared_ranks(2, [](int) {
    Mesh mesh(world());
    const Tensor w = from_local(noise({4, 4}, 1), mesh, {Partial()}).set_requires_grad();
    Muon muon({{"w", w}}, {});
    w.set_grad(noise({4, 4}, 2));
    EXPECT_THROW(muon.step(), UnsupportedError);
  });
}

TEST(MuonRanks, WhatIsNoMatrixAsAWholeIsRefusedHoweverItIsCut) {
  compared_ranks(2, [](int) {
    Mesh mesh(world());
    // A run of a matrix has one dimension, and a part of three may look like anything.
    const Tensor matrix = distribute_tensor(noise({4, 6}, 1), mesh, {FlatShard{0, 12}});
    EXPECT_EQ(matrix.dim(), 1);
    EXPECT_NO_THROW(Muon({{"w", matrix.set_requires_grad()}}));
    const Tensor vector = distribute_tensor(noise({6}, 1), mesh, {Shard(0)});
    EXPECT_THROW(Muon({{"b", vector.set_requires_grad()}}), ShapeError);
  });
}

// ---- Owners ------------------------------------------------------------------------------------

TEST(MatrixExchange, OwnersAreBalancedByBytesAndKeepWhatTheyHave) {
  compared_ranks(4, [](int) {
    Mesh mesh(world());
    std::vector<DTensorSpec> specs;
    int64_t all = 0, largest = 0;
    for (int64_t i = 0; i < 40; ++i) {
      const Shape shape = {8 + i % 7, 5 + 3 * (i % 11)};
      specs.push_back(DTensorSpec{&mesh, {Shard(0)}, shape}.checked("test"));
      all += numel_of(shape);
      largest = std::max(largest, numel_of(shape));
    }
    const MatrixExchange cut(specs, world());
    for (int r = 0; r < 4; ++r) {  // the largest first: nobody is above the mean by more than one
      EXPECT_LE(cut.elements_owned_by(r), all / 4 + largest);
      EXPECT_GE(cut.elements_owned_by(r), all / 4 - largest);
    }
    EXPECT_EQ(cut.cut(), 40);
    // The second matrix lies on rank 1 alone, whatever else that rank has.
    const MatrixExchange uncut({DTensorSpec{&mesh, {FlatShard{0, 30}}, {5, 5}}.checked("test"),
                                DTensorSpec{&mesh, {FlatShard{30, 30}}, {6, 5}}.checked("test")},
                               world());
    EXPECT_EQ(uncut.owner(0), 0);
    EXPECT_EQ(uncut.owner(1), 1);
    EXPECT_EQ(uncut.rounds(), 0);
    EXPECT_EQ(uncut.gathers() + uncut.scatters(), 0);
  });
}

// ---- Modes -------------------------------------------------------------------------------------

struct Uneven : nn::Module<Uneven> {
  Uneven()
      : wide(add<nn::Linear>("wide", 8, 90)),
        inner(add<nn::Linear>("inner", 90, 90)),
        narrow(add<nn::Linear>("narrow", 90, 2)),
        one(add<nn::Linear>("one", 2, 1)) {}
  Tensor forward(const Tensor& x) { return one(narrow(relu(inner(relu(wide(x)))))); }
  nn::Linear& wide;
  nn::Linear& inner;
  nn::Linear& narrow;
  nn::Linear& one;
};

struct Setting {
  DType dtype = kF32, state = kF32;
};

struct Optimizers {
  Optimizers(const nn::ModuleBase& model, const Setting& setting)
      : split(optim::split_for_muon(model.named_parameters(), {"one"})),
        muon(split.matrices, {.lr = 0.05, .state_dtype = setting.state}),
        adamw(split.others, {.lr = 0.01, .state_dtype = setting.state}) {}
  void step() { muon.step(), adamw.step(), muon.zero_grad(), adamw.zero_grad(); }
  optim::MuonParameters split;
  Muon muon;
  AdamW adamw;
};

// A backward with batches of the rank's own, in bits that do not depend on the mode.
void backward_of(Uneven& model, uint64_t step, DType dtype) {
  const auto stream = 1000 * (step + 1) + static_cast<uint64_t>(rank());
  const Tensor y = model(noise({4, 8}, stream, dtype));
  (y * y).sum().backward();
}

void in_mode(Way way, int ranks, const Setting& setting, const auto& body) {
  compared_ranks(ranks, [&](int) {
    manual_seed(9);
    Mesh mesh(world());
    Uneven model;
    model.to(setting.dtype);
    Optimizers optimizers(model, setting);
    const auto parallel = shard_in(way, model, mesh);
    body(model, optimizers);
  });
}

std::map<std::string, std::vector<float>> learned(Way way, int ranks, const Setting& setting) {
  std::map<std::string, std::vector<float>> result;
  in_mode(way, ranks, setting, [&](Uneven& model, Optimizers& optimizers) {
    for (uint64_t step = 0; step < 3; ++step) {
      backward_of(model, step, setting.dtype);
      optim::clip_grad_norm(model.parameters(), 1);
      optimizers.step();
    }
    const auto values = whole_values(model);
    if (rank() == 0) result = values;
  });
  return result;
}

TEST(MuonRanks, EveryModeLearnsTheBitsOfReplicas) {
  for (const DType state : {kF32, kBF16}) {
    for (const int ranks : {2, 3, 4}) {
      const auto expected = learned(Way::kReplicate, ranks, {kF32, state});
      for (const Way way : {Way::kZero1, Way::kZero2, Way::kZero3, Way::kFully}) {
        EXPECT_TRUE(learned(way, ranks, {kF32, state}) == expected)
            << name_of(way) << " on " << ranks << ", states " << state;
      }
    }
  }
}

// Beside the model one of whole parameters, which gets the gradients that came of the reduction: a
// mean in 16 bits is not that of replicas where it does not divide by a power of two.
void expect_steps_of_whole_parameters(int ranks, const std::vector<MeshAxis>& axes, Way way,
                                      const Setting& setting) {
  SCOPED_TRACE(testing::Message() << name_of(way) << " on " << ranks << ", " << setting.dtype);
  compared_ranks(ranks, [&](int) {
    manual_seed(9);
    Mesh mesh(world(), axes);
    Uneven model, twin;
    model.to(setting.dtype), twin.to(setting.dtype);
    Optimizers optimizers(model, setting), whole(twin, setting);
    const auto parallel = shard_in(way, model, mesh);
    for (uint64_t step = 0; step < 3; ++step) {
      backward_of(model, step, setting.dtype);
      const auto named = model.named_parameters();
      for (size_t i = 0; i < named.size(); ++i) {
        twin.parameters()[i].set_grad(full_tensor(named[i].tensor.grad()));
      }
      optimizers.step(), whole.step();
    }
    EXPECT_TRUE(whole_values(model) == whole_values(twin));
  });
}

TEST(MuonRanks, InEveryModeAStepIsThatOfWholeParameters) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kZero3, Way::kFully}) {
    for (const int ranks : {2, 3, 4}) {
      expect_steps_of_whole_parameters(ranks, {{"dp", ranks}}, way, {kBF16, kBF16});
    }
  }
}

TEST(MuonRanks, OnAHybridMeshAStepIsThatOfWholeParameters) {
  const std::vector<MeshAxis> grid = {{"dp_replicate", 2}, {"dp_shard", 2}};
  for (const DType dtype : {kF32, kBF16}) {
    expect_steps_of_whole_parameters(4, grid, Way::kFully, {dtype, kBF16});
  }
}

TEST(MuonRanks, TheReportIsWhatTheTraceCounts) {
  for (const int ranks : {2, 3, 8}) {
    for (const Way way : {Way::kReplicate, Way::kZero1, Way::kZero2, Way::kFully}) {
      SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(ranks));
      in_mode(way, ranks, {}, [&](Uneven& model, Optimizers& optimizers) {
        const UpdateReport report = report_update(optimizers.muon);
        backward_of(model, 0, kF32);
        const CommTrace::Scope scope(*rank_context().trace);
        optimizers.step();
        Traffic seen;
        for (const CommRecord& record : scope.records()) {
          EXPECT_EQ(record.operation, Operation::kAllToAll);
          EXPECT_EQ(record.channel, Channel::kParameter);
          seen += {1, record.bytes};
        }
        EXPECT_EQ(report.traffic(), seen);
        EXPECT_EQ(report.tensors, 3);
        if (way == Way::kReplicate) {
          EXPECT_EQ(seen, Traffic());
        } else {
          EXPECT_EQ(seen.collectives, 2);  // one round: in and out
        }
        EXPECT_FALSE(report.describe().empty());
        EXPECT_TRUE(report_update(optimizers.adamw).exchanges.empty());
      });
    }
  }
}

TEST(MuonRanks, StateMovesFromOneModeAndNumberOfRanksToAnother) {
  const Setting setting{kF32, kBF16};
  StateDict weights, muon, adamw;
  in_mode(Way::kFully, 3, setting, [&](Uneven& model, Optimizers& optimizers) {
    for (uint64_t step = 0; step < 2; ++step) {
      backward_of(model, step, kF32);
      optimizers.step();
    }
    const StateDict states[] = {full_state_dict(model.state_dict()),
                                full_state_dict(optimizers.muon.state_dict()),
                                full_state_dict(optimizers.adamw.state_dict())};
    if (rank() == 0) {
      weights = states[0].clone(), muon = states[1].clone(), adamw = states[2].clone();
    }
  });
  EXPECT_EQ(muon.at("state.inner.weight.momentum_buffer").dtype(), kBF16);
  const auto go_on = [&](Way way, int ranks) {
    std::map<std::string, std::vector<float>> result;
    in_mode(way, ranks, setting, [&](Uneven& model, Optimizers& optimizers) {
      model.load_state_dict(weights);
      optimizers.muon.load_state_dict(muon);
      optimizers.adamw.load_state_dict(adamw);
      for (uint64_t step = 0; step < 2; ++step) {
        for (const auto& [name, parameter] : model.named_parameters()) {
          const Tensor gradient = noise(whole_shape(parameter), 500 + step);
          if (!is_dtensor(parameter)) {
            parameter.set_grad(gradient);
          } else {
            parameter.set_grad(
                distribute_tensor(gradient, mesh_of(parameter), placements_of(parameter)));
          }
        }
        optimizers.step();
      }
      const auto values = whole_values(model);
      if (rank() == 0) result = values;
    });
    return result;
  };
  const auto expected = go_on(Way::kReplicate, 1);
  EXPECT_TRUE(go_on(Way::kZero1, 2) == expected);
  EXPECT_TRUE(go_on(Way::kFully, 4) == expected);
}

}  // namespace
}  // namespace tessera::distributed::test_muon_ranks
