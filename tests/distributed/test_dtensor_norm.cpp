// Norms and clipping of gradients that are DTensors: those of one process with the whole ones.
// ctest labels: threads
#include <cmath>
#include <limits>

#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/tensor/raw_views.h>

#include "distributed/dtensor_fixture.h"
#include "distributed/sharded_fixture.h"

namespace tessera::distributed::test_dtensor_norm {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kQuietNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kNormTypes[] = {2, 1, 3, kInf};
constexpr int64_t kSquareSumBytes = kernels::kNumSquareSum * 8;

// Even, uneven and empty parts, also of no elements at all; more than a block of the kernels.
const Shape kShapes[] = {{8, 6}, {7, 3}, {2, 5}, {1, 1}, {0, 4}, {150, 131}};

Tensor whole_gradient(size_t i, DType dtype = kF32) {
  return randn(kShapes[i], {}, RandomStream{17, i}).to(dtype);
}

// A parameter whose gradient lies so; plain where there is no mesh.
Tensor parameter_with(const Tensor& gradient, Mesh* mesh = nullptr, const Placements& by = {}) {
  const auto lie = [&](const Tensor& x) {
    return mesh == nullptr ? x.clone() : distribute_tensor(x, *mesh, by);
  };
  const Tensor parameter = lie(zeros_like(gradient)).set_requires_grad();
  parameter.set_grad(lie(gradient));
  return parameter;
}

TensorList parameters_with_all(Mesh* mesh = nullptr, const Placements& by = {}) {
  TensorList parameters;
  for (size_t i = 0; i < std::size(kShapes); ++i) {
    parameters.push_back(parameter_with(whole_gradient(i), mesh, by));
  }
  return parameters;
}

Tensor whole_of(const Tensor& x) { return is_dtensor(x) ? full_tensor(x) : x; }

// Clips both, and compares norm and gradients. Exact where the norm is: of squares, and a maximum.
// Others are f64 sums of about 20000 terms in another order: 20000 * 2^-53; as the factor is then
// another f64, a gradient may be rounded to the neighbour.
void expect_equal_clipping(const TensorList& parts, const TensorList& whole, double p,
                           const std::string& what) {
  const double norm = optim::clip_grad_norm(parts, 0.5, {.norm_type = p}).item();
  const double expected = optim::clip_grad_norm(whole, 0.5, {.norm_type = p}).item();
  const bool exact = p == 2 || p == kInf;
  EXPECT_NEAR(norm, expected, exact ? 0 : expected * 20000 * 0x1p-53) << what << ", p = " << p;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto got = whole_of(parts[i].grad()).to_vector();
    const auto wanted = whole[i].grad().to_vector();
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t j = 0; j < got.size(); ++j) {
      ASSERT_NEAR(got[j], wanted[j], exact ? 0 : std::abs(wanted[j]) * 0x1p-23)
          << what << ", p = " << p << ", parameter " << i;
    }
  }
}

// The all_reduces of a norm of these parameters, and nothing else, once groups are there.
std::vector<CommRecord> norm_calls(const TensorList& parameters, double p) {
  const CommTrace::Scope scope(*rank_context().trace);
  optim::clip_grad_norm(parameters, 1e9, {.norm_type = p});
  const auto records = scope.records();
  EXPECT_EQ(count(records, Operation::kAllReduce, Channel::kControl), std::ssize(records));
  return records;
}

TEST(DTensorNorm, IsThatOfTheWholeGradientsForAnyPlacement) {
  for (const int size : {1, 2, 3, 4}) {
    compared_ranks(size, [&](int) {
      Mesh mesh(world());
      for (const Placements& by : {Placements{Shard(0)}, {Shard(1)}, {Replicate()}}) {
        for (const double p : kNormTypes) {
          expect_equal_clipping(parameters_with_all(&mesh, by), parameters_with_all(), p,
                                mesh.describe() + " " + describe(by));
        }
        const auto calls = norm_calls(parameters_with_all(&mesh, by), 2);
        const bool is_cut = size > 1 && by != Placements{Replicate()};
        ASSERT_EQ(calls.size(), is_cut ? 1u : 0u) << describe(by);
        if (is_cut) {
          EXPECT_EQ(calls[0].bytes, kSquareSumBytes);
        }
      }
    });
  }
}

TEST(DTensorNorm, CountsReplicatedAxesOnceOnMeshesOfTwoAxes) {
  compared_ranks(4, [](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const Placements ways[] = {{Replicate(), Shard(0)},        {Shard(0), Replicate()},
                               {Shard(0), Shard(1)},           {Shard(0), Shard(0)},
                               {StridedShard(0, 2), Shard(0)}, {Replicate(), Replicate()}};
    for (const Placements& by : ways) {
      for (const double p : kNormTypes) {
        expect_equal_clipping(parameters_with_all(&mesh, by), parameters_with_all(), p,
                              describe(by));
      }
    }
  });
}

TEST(DTensorNorm, TakesOneCallForEachSetOfRanksAndCountsWholeGradientsOnce) {
  compared_ranks(8, [](int) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}, {"c", 2}});
    Mesh& rows = mesh.submesh({"a", "b"});
    // By axis: a b | a | none (and a plain one) | a b of the sub-mesh | b c | a b of one dimension.
    const std::pair<Mesh*, Placements> ways[] = {
        {&mesh, {Shard(0), Shard(1), Replicate()}},
        {&mesh, {Shard(1), Replicate(), Replicate()}},
        {nullptr, {}},
        {&rows, {Shard(1), Shard(0)}},
        {&mesh, {Replicate(), Shard(0), Shard(0)}},
        {&mesh, {Shard(0), Shard(0), Replicate()}},
    };
    const auto mixed = [&] {
      TensorList parameters;
      for (size_t i = 0; i < std::size(ways); ++i) {
        parameters.push_back(parameter_with(whole_gradient(i), ways[i].first, ways[i].second));
      }
      parameters.push_back(
          parameter_with(whole_gradient(0), &mesh, {Replicate(), Replicate(), Replicate()}));
      return parameters;
    };
    const auto whole = [] {
      TensorList parameters = parameters_with_all();
      parameters.push_back(parameter_with(whole_gradient(0)));
      return parameters;
    };
    for (const double p : kNormTypes) {
      expect_equal_clipping(mixed(), whole(), p, "mixed");
      const auto calls = norm_calls(mixed(), p);
      ASSERT_EQ(calls.size(), 3u);  // a b, a, b c, in the order of the parameters
      EXPECT_EQ(calls[0].group_size, 4);
      EXPECT_EQ(calls[1].group_size, 2);
      EXPECT_EQ(calls[2].group_size, 4);
      for (const CommRecord& call : calls) EXPECT_EQ(call.bytes, p == 2 ? kSquareSumBytes : 8);
    }
  });
}

TEST(DTensorNorm, OfRunsOfAUnitIsThatOfTheWhole) {
  int64_t numel = 0;
  for (const Shape& shape : kShapes) numel += numel_of(shape);
  for (const int size : {1, 2, 3, 4}) {
    compared_ranks(size, [&](int) {
      Mesh mesh(world());
      const auto runs = [&] {
        TensorList parameters;
        FlatShard flat{0, (numel + size - 1) / size};
        for (size_t i = 0; i < std::size(kShapes); ++i) {
          parameters.push_back(parameter_with(whole_gradient(i), &mesh, {flat}));
          flat.offset += numel_of(kShapes[i]);
        }
        return parameters;
      };
      for (const double p : kNormTypes) {
        expect_equal_clipping(runs(), parameters_with_all(), p, mesh.describe());
      }
      EXPECT_EQ(norm_calls(runs(), 2).size(), size > 1 ? 1u : 0u);
    });
  }
}

// The norms and the weights after a few clipped steps, of batches dealt to the ranks.
struct Clipped {
  std::vector<double> norms;
  std::map<std::string, std::vector<float>> weights;
};
Clipped clipped_training(Net& model, int rank, int size, DataParallelModel* parallel, bool fold) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  Clipped result;
  for (int step = 0; step < 3; ++step) {
    if (parallel != nullptr) {
      parallel->set_plan(StepPlan::of(0, 1));
      loss_of(model, step * size + rank).backward();
    } else {
      for (int r = 0; r < size; ++r) loss_of(model, step * size + r).backward();
      const double mean = 1.0 / size;
      for (const Tensor& parameter : model.parameters()) {
        const NoGradGuard no_grad;
        mul_(parameter.grad(), Scalar(mean));
      }
    }
    result.norms.push_back(
        optim::clip_grad_norm(model.parameters(), 0.01, {.fold_into = fold ? &optimizer : nullptr})
            .item());
    optimizer.step();
    optimizer.zero_grad();
  }
  result.weights = whole_values(model);
  return result;
}

TEST(DTensorNorm, OfShardedTrainingIsThatOfOneProcess) {
  constexpr int kRanks = 3;
  for (const bool fold : {false, true}) {
    Clipped expected;
    compared_ranks(1, [&](int) {
      manual_seed(3);
      Net model;
      expected = clipped_training(model, 0, kRanks, nullptr, fold);
    });
    for (const Way way :
         {Way::kReplicate, Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
      compared_ranks(kRanks, [&](int rank) {
        manual_seed(3);
        Net model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        const Clipped own = clipped_training(model, rank, kRanks, parallel.get(), fold);
        EXPECT_EQ(own.norms, expected.norms) << name_of(way);
        EXPECT_EQ(own.weights, expected.weights) << name_of(way);
      });
    }
  }
}

// Keeps the gathered weight that it saw.
struct Keeper : nn::Module<Keeper> {
  Keeper() : layer(add<nn::Linear>("layer", 8, 4)) {}
  Tensor forward(const Tensor& x) {
    seen = layer.weight;
    return layer(x);
  }
  nn::Linear& layer;
  Tensor seen;
};

TEST(DTensorNorm, AReleasedParameterIsNoPart) {
  compared_ranks(2, [](int) {
    Keeper model;
    Mesh mesh(world());
    fully_shard(model, mesh, {.reshard_after_forward = true});
    model(ones({2, 8}));
    const std::string message =
        message_of<UnsupportedError>([&] { optim::clip_grad_norm({model.seen}, 1); });
    EXPECT_NE(message.find("clip_grad_norm: no rank has a part of what is given; gathered"),
              std::string::npos)
        << message;
    EXPECT_EQ(optim::clip_grad_norm(model.parameters(), 1).item(), 0) << "of shards";
  });
}

TEST(DTensorNorm, OfNarrowGradientsHasTheSameBits) {
  compared_ranks(3, [](int) {
    Mesh mesh(world());
    for (const DType dtype : {kBF16, kF16, kF64}) {
      const Tensor gradient = whole_gradient(5, dtype);
      expect_equal_clipping({parameter_with(gradient, &mesh, {Shard(0)})},
                            {parameter_with(gradient)}, 2, std::string(name_of(dtype)));
    }
  });
}

TEST(DTensorNorm, WhatIsNotFiniteOnOneRankReachesAll) {
  compared_ranks(4, [](int rank) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    for (const double p : kNormTypes) {
      for (const double bad : {kQuietNaN, -kQuietNaN, kInf, -kInf}) {
        for (const int where : {0, 2}) {  // of the first axis's first or second coordinate
          const Tensor w = parameter_with(whole_gradient(0), &mesh, {Shard(0), Replicate()});
          if (mesh.coordinate("dp_replicate") == where / 2) raw::alias(w.grad()).fill_(bad);
          const Tensor other = parameter_with(whole_gradient(1), &mesh, {Shard(0), Shard(0)});
          EXPECT_THROW(
              optim::clip_grad_norm({other, w}, 1, {.norm_type = p, .error_if_nonfinite = true}),
              ValueError);
          const double norm = optim::clip_grad_norm({other, w}, 1, {.norm_type = p}).item();
          EXPECT_TRUE(std::isnan(bad) ? std::isnan(norm) : norm == kInf)
              << "rank " << rank << ", p = " << p << ": " << norm;
        }
      }
    }
    // A NaN beside an infinity that another rank has.
    for (const double p : kNormTypes) {
      const Tensor w = parameter_with(whole_gradient(0), &mesh, {Shard(0), Shard(0)});
      if (rank == 1) raw::alias(w.grad()).fill_(kQuietNaN);
      if (rank == 2) raw::alias(w.grad()).fill_(kInf);
      EXPECT_TRUE(std::isnan(optim::clip_grad_norm({w}, 1, {.norm_type = p}).item())) << p;
    }
  });
}

TEST(DTensorNorm, FoldsIntoAStepAndCountsTheScaleOfGradients) {
  compared_ranks(4, [](int) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const auto step = [](const TensorList& parameters) {
      NamedTensors named;
      for (const Tensor& parameter : parameters) {
        named.push_back({"p" + std::to_string(named.size()), parameter});
      }
      optim::AdamW optimizer(named, {.lr = 0.1});
      optimizer.scale_next_step(0.25);
      const double norm = optim::clip_grad_norm(parameters, 0.5, {.fold_into = &optimizer}).item();
      optimizer.step();
      return norm;
    };
    const TensorList parts = parameters_with_all(&mesh, {Replicate(), Shard(0)});
    const TensorList whole = parameters_with_all();
    EXPECT_EQ(step(parts), step(whole));
    for (size_t i = 0; i < parts.size(); ++i) {
      expect_equal(full_tensor(parts[i]).detach(), whole[i].detach(), "stepped");
      expect_equal(full_tensor(parts[i].grad()), whole_gradient(i), "gradients keep their values");
    }
    const auto scaled_norm = [](const TensorList& parameters) {
      return optim::clip_grad_norm(parameters, 0.5, {.gradient_scale = 0.125}).item();
    };
    EXPECT_EQ(scaled_norm(parts), scaled_norm(whole));
    for (size_t i = 0; i < parts.size(); ++i) {
      expect_equal(full_tensor(parts[i].grad()), whole[i].grad(), "scaled");
    }
  });
}

TEST(DTensorNorm, ARankWithoutAGradientTakesPart) {
  compared_ranks(3, [](int rank) {
    Mesh mesh(world());
    for (const double p : {2.0, kInf}) {
      const Tensor gradient = whole_gradient(1), w = parameter_with(gradient, &mesh, {Shard(0)});
      if (rank != 1) w.zero_grad();
      const double norm = optim::clip_grad_norm({w}, 1, {.norm_type = p}).item();
      const Tensor of_rank_1 = parameter_with(gradient.slice(0, 3, 6));
      EXPECT_EQ(norm, optim::clip_grad_norm({of_rank_1}, 1, {.norm_type = p}).item());
    }
    // Frozen parameters have none anywhere.
    const Tensor frozen = distribute_tensor(zeros({6}), mesh, {Shard(0)});
    EXPECT_TRUE(norm_calls({frozen}, 2).empty());
    EXPECT_EQ(optim::clip_grad_norm({frozen}, 1).item(), 0);
  });
}

TEST(DTensorNorm, APlainGradientOfAPartIsAPart) {
  compared_ranks(2, [](int) {
    Mesh mesh(world());
    const Tensor gradient = whole_gradient(0);
    const Tensor w = distribute_tensor(zeros({8, 6}), mesh, {Shard(0)}).set_requires_grad();
    w.set_grad(to_local(distribute_tensor(gradient, mesh, {Shard(0)})));
    const Tensor plain = parameter_with(gradient);
    EXPECT_EQ(optim::clip_grad_norm({w}, 1).item(), optim::clip_grad_norm({plain}, 1).item());
  });
}

TEST(DTensorNorm, ASummandHasNone) {
  compared_ranks(2, [](int) {
    Mesh mesh(world());
    const Tensor w = zeros({4}).set_requires_grad();
    w.set_grad(from_local(ones({4}), mesh, {Partial()}));
    const std::string message =
        message_of<UnsupportedError>([&] { optim::clip_grad_norm({w}, 1); });
    EXPECT_NE(message.find("clip_grad_norm: "), std::string::npos) << message;
    EXPECT_NE(message.find("[Partial(sum)], a summand; redistribute() it"), std::string::npos)
        << message;
  });
}

TEST(DTensorNorm, WithoutPartsNothingIsCommunicated) {
  compared_ranks(2, [](int) {
    for (const double p : kNormTypes) EXPECT_TRUE(norm_calls(parameters_with_all(), p).empty());
  });
}

}  // namespace
}  // namespace tessera::distributed::test_dtensor_norm
