// Buffers, batch norm over ranks, compressed gradients, uneven inputs: on threads as ranks.
// ctest labels: threads
// ctest ranks: 2 4
#include <cmath>
#include <numeric>

#include <tessera/distributed/sync_batch_norm.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/optimizers.h>

#include "distributed/replicate_fixture.h"
#include "golden_files.h"

namespace tessera::distributed::test_replicate_extras {
namespace {

using Json = nlohmann::json;

Json on_all_ranks(const Json& own, int rank) {
  return all_gather_objects(world(), own)[static_cast<size_t>(rank)];
}
void expect_equal_on_all_ranks(const Json& own) {
  const auto all = all_gather_objects(world(), own);
  for (size_t rank = 1; rank < all.size(); ++rank) EXPECT_EQ(all[rank], all[0]) << "rank " << rank;
}

// ---- Buffers -----------------------------------------------------------------------------------

struct Normed : nn::Module<Normed> {
  Normed()
      : in(add<nn::Linear>("in", 8, 6)),
        norm(add<nn::BatchNorm1d>("norm", 6)),
        out(add<nn::Linear>("out", 6, 3)) {}
  Tensor forward(const Tensor& x) { return out(relu(norm(in(x)))); }
  nn::Linear& in;
  nn::BatchNorm1d& norm;
  nn::Linear& out;
};

TEST(Buffers, D10_Rank0sBecomeEverybodysInEverySynchronisedTrainingForward) {
  on_ranks(4, [](int rank) {
    Normed model;
    Mesh mesh(world());
    Replica replica = replicate(model, mesh);
    EXPECT_EQ(replica.report().buffers_per_forward, (Traffic{2, (6 + 6) * 4 + 8}));
    const auto fill = [&] { fill_(model.norm.running_mean, rank + 1.0); };
    const auto forward = [&] { return loss_of(model, rank); };
    fill();
    {
      const NoGradGuard no_grad;
      model.eval();
      forward();
      model.train();
    }
    EXPECT_EQ(model.norm.running_mean.to_vector()[0], rank + 1.0);  // evaluation is a rank's own
    {
      const NoSync local = replica.no_sync();
      forward().backward();
    }
    EXPECT_NEAR(model.norm.running_mean.to_vector()[0], 0.9 * (rank + 1.0), 0.3);
    fill();
    forward().backward();
    EXPECT_NEAR(model.norm.running_mean.to_vector()[0], 0.9, 0.3);
  });
}

TEST(Buffers, D10_AHookMayReplaceTheBroadcastAndItMayBeLeftOut) {
  on_ranks(2, [](int rank) {
    Normed model;
    Mesh mesh(world());
    ReplicateOptions options;
    options.buffer_hook = [](const NamedTensors& buffers, Group& ranks) {
      for (const auto& [name, tensor] : buffers) {
        if (is_floating(tensor.dtype())) ranks.all_reduce(tensor, ReduceOp::kMean).wait();
      }
    };
    {
      const Replica replica = replicate(model, mesh, options);
      fill_(model.norm.running_var, rank * 10.0);
      loss_of(model, 0).backward();
      expect_equal_on_all_ranks(model.norm.running_var.to_vector());
      EXPECT_GT(model.norm.running_var.to_vector()[0], 0.9 * 5);
      EXPECT_LT(model.norm.running_var.to_vector()[0], 0.9 * 5 + 1);
    }
    model.zero_grad();
    options = {.broadcast_buffers = false};
    const Replica replica = replicate(model, mesh, options);
    fill_(model.norm.running_var, rank * 10.0);
    loss_of(model, 0).backward();
    EXPECT_NE(on_all_ranks(model.norm.running_var.to_vector(), 0),
              on_all_ranks(model.norm.running_var.to_vector(), 1));
  });
}

// ---- The report is the trace -------------------------------------------------------------------

TEST(Report, SaysWhatAStepCostsAndTheTraceAgrees) {
  const auto check = [](int size, GradientAverage average) {
    on_ranks(size, [&](int rank) {
      Normed model;
      Mesh mesh(world());
      ReplicateOptions options{.average = average};
      options.first_bucket_bytes = 30, options.bucket_bytes = 60;
      const Replica replica = replicate(model, mesh, options);
      for (int step = 0; step < 3; ++step) {
        const CommTrace::Scope scope(*rank_context().trace);
        loss_of(model, rank).backward();
        model.zero_grad();
        Traffic gradients, used_map, window_weight, buffers, others;
        for (const CommRecord& record : scope.records()) {
          Traffic& traffic = record.channel == Channel::kGradient    ? gradients
                             : record.tag == "used_map"              ? used_map
                             : record.tag == "window_weight"         ? window_weight
                             : record.channel == Channel::kParameter ? buffers
                                                                     : others;
          traffic += {1, record.bytes};
        }
        const ShardReport report = replica.report();
        EXPECT_EQ(gradients, report.gradients);
        EXPECT_EQ(used_map, report.used_map);
        EXPECT_EQ(window_weight, report.window_weight);
        EXPECT_EQ(window_weight.collectives, average == GradientAverage::kWeight && size > 1);
        EXPECT_EQ(buffers, report.buffers_per_forward);
        // Once: the order of rank 0's gradients.
        EXPECT_EQ(others, (step == 0 && size > 1 ? Traffic{1, report.parameters * 8} : Traffic{}));
        EXPECT_EQ(report.gradient_bytes, (8 * 6 + 8 + 8 + 8 + 20 + 4) * 4);
        if (size > 1) {
          EXPECT_EQ(report.gradients.bytes, report.gradient_bytes);
        }
        EXPECT_GE(report.buckets.size(), 3u);
        EXPECT_NE(report.describe().find("replicate over " + std::to_string(size) + " ranks"),
                  std::string::npos)
            << report.describe();
      }
    });
  };
  for (const int size : {1, 2, 4, 8}) {
    for (const auto average : {GradientAverage::kRanks, GradientAverage::kWeight}) {
      check(size, average);
    }
  }
}

TEST(Report, HoldsForAThousandRanksThatAreNotThere) {
  Context context;
  const ContextGuard guard(context);
  constexpr int kRanks = 1024;
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto group = std::make_shared<Group>("world", make_fake_backend(77, kRanks), ranks);
  Mesh mesh(*group);
  Normed model;
  const Replica replica = replicate(model, mesh, small_buckets());
  for (int step = 0; step < 2; ++step) {
    const CommTrace::Scope scope(*rank_context().trace);
    loss_of(model, step).backward();
    model.zero_grad();
    Traffic gradients;
    double on_the_wire = 0;
    for (const CommRecord& record : scope.records()) {
      if (record.channel != Channel::kGradient) continue;
      gradients += {1, record.bytes};
      on_the_wire += record.wire_bytes();
    }
    EXPECT_EQ(gradients, replica.report().gradients);
    // 2 (N - 1) / N bytes for each byte of gradients.
    EXPECT_NEAR(on_the_wire, 2.0 * (kRanks - 1) / kRanks * static_cast<double>(gradients.bytes), 1);
  }
}

// ---- Batch norm over ranks ---------------------------------------------------------------------

struct NormResult {
  std::vector<double> y, dx, weight, bias, mean, variance;
};

// Rows [begin, end) of a fixed batch [rows, C, 3] through the function; loss: weighted sum.
template <class Function>
NormResult run_batch_norm(const Function& function, int64_t begin, int64_t end, DType dtype) {
  constexpr int64_t kRows = 12, kChannels = 5;
  const Tensor all =
      (randn({kRows, kChannels, 3}, {kF64}, RandomStream{1, 1}) * 3.0 + 2.0).to(dtype);
  const Tensor up = randn({kRows, kChannels, 3}, {kF64}, RandomStream{1, 2}).to(dtype);
  const Tensor x = all.narrow(0, begin, end - begin).clone().set_requires_grad();
  const Tensor weight =
      randn({kChannels}, {kF64}, RandomStream{1, 3}).to(dtype).set_requires_grad();
  const Tensor bias = randn({kChannels}, {kF64}, RandomStream{1, 4}).to(dtype).set_requires_grad();
  const Tensor mean = zeros({kChannels}, {dtype}), variance = ones({kChannels}, {dtype});
  const Tensor y = function(nn::BatchNormCall{x, mean, variance, weight, bias, true, 0.1, 1e-5});
  (y * up.narrow(0, begin, end - begin)).sum().backward();
  return {y.to_vector(),           x.grad().to_vector(), weight.grad().to_vector(),
          bias.grad().to_vector(), mean.to_vector(),     variance.to_vector()};
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                 const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << what << " " << i;
}

TEST(SyncBatchNorm, D10_ForwardAndBackwardAreThoseOfTheConcatenatedBatch) {
  const std::vector<std::vector<int64_t>> cuts{
      {0, 6, 12}, {0, 1, 12}, {0, 12, 12}, {0, 0, 5, 9, 12}};
  for (const DType dtype : {kF64, kF32}) {
    const double tolerance = dtype == kF64 ? 1e-12 : 2e-5;
    const NormResult whole = run_batch_norm(
        [](const nn::BatchNormCall& c) {
          return batch_norm(c.x, c.running_mean, c.running_var, c.weight, c.bias, c.training,
                            c.momentum, c.eps);
        },
        0, 12, dtype);
    for (const auto& cut : cuts) {
      on_ranks(static_cast<int>(cut.size()) - 1, [&](int rank) {
        const int64_t begin = cut[static_cast<size_t>(rank)],
                      end = cut[static_cast<size_t>(rank) + 1];
        const NormResult own = run_batch_norm(
            [](const nn::BatchNormCall& call) { return sync_batch_norm(call, world()); }, begin,
            end, dtype);
        const auto part = [&](const std::vector<double>& values) {
          return std::vector<double>(values.begin() + begin * 15, values.begin() + end * 15);
        };
        expect_near(own.y, part(whole.y), tolerance, "y");
        expect_near(own.dx, part(whole.dx), tolerance, "dx");
        expect_near(own.mean, whole.mean, tolerance, "running mean");
        expect_near(own.variance, whole.variance, tolerance * 10, "running variance");
        const Tensor sums = tensor(std::span<const double>(own.weight), {5}, kF64);
        const Tensor biases = tensor(std::span<const double>(own.bias), {5}, kF64);
        world().all_reduce(sums).wait();
        world().all_reduce(biases).wait();
        expect_near(sums.to_vector(), whole.weight, tolerance * 20, "weight");
        expect_near(biases.to_vector(), whole.bias, tolerance * 20, "bias");
        expect_equal_on_all_ranks(Json(own.mean));
      });
    }
  }
}

TEST(SyncBatchNorm, D10_AReplicatedModelTrainsAsOnTheBigBatch) {
  std::vector<double> expected_grad, expected_mean;
  {
    Context context;
    const ContextGuard guard(context);
    manual_seed(3);
    Normed model;
    TensorList parts;
    for (uint64_t i = 0; i < 4; ++i) parts.push_back(randn({5, 8}, {}, RandomStream{7, i}));
    const Tensor y = model(cat(parts));
    (y * y).mean().backward();
    expected_grad = model.in.weight.grad().to_vector();
    expected_mean = model.norm.running_mean.to_vector();
  }
  on_ranks(4, [&](int rank) {
    manual_seed(3);
    Normed model;
    Mesh mesh(world());
    EXPECT_EQ(synchronise_batch_norm(model, mesh.group("dp")), 1);
    const Replica replica = replicate(model, mesh);
    loss_of(model, rank).backward();
    expect_near(model.in.weight.grad().to_vector(), expected_grad, 1e-6, "weight");
    expect_near(model.norm.running_mean.to_vector(), expected_mean, 1e-6, "running mean");
    model.eval();
    const NoGradGuard no_grad;
    loss_of(model, rank);  // evaluation needs nobody else
  });
}

TEST(SyncBatchNorm, OneValuePerChannelOnAllRanksIsRefused) {
  on_ranks(2, [](int rank) {
    const Tensor x = zeros({rank, 3}), none;
    EXPECT_THROW(
        sync_batch_norm(nn::BatchNormCall{x, none, none, none, none, true, 0.1, 1e-5}, world()),
        ShapeError);
  });
}

// ---- Compression -------------------------------------------------------------------------------

// Gradients of rank 0 after each of some steps with a hook; nullptr: none is set.
std::vector<Gradients> gradients_with(
    int size, int steps, const std::function<std::shared_ptr<CommunicationHook>()>& make) {
  std::vector<Gradients> result;
  on_ranks(size, [&](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    if (make) replica.set_communication_hook(make());
    for (int step = 0; step < steps; ++step) {
      const Traffic before = gradient_traffic();
      loss_of(net, step * size + rank).backward();
      const Traffic expected = replica.report().gradients;  // of these buckets
      EXPECT_EQ(gradient_traffic().collectives - before.collectives, expected.collectives);
      EXPECT_EQ(gradient_traffic().bytes - before.bytes, expected.bytes);
      expect_equal_on_all_ranks(Json(gradients_of(net).values));
      if (keeps_results(rank)) result.push_back(gradients_of(net));
      net.zero_grad();
    }
  });
  return result;
}

double largest_difference(const Gradients& a, const Gradients& b) {
  double largest = 0;
  for (size_t i = 0; i < a.values.size(); ++i) {
    for (size_t j = 0; j < a.values[i].size(); ++j) {
      largest = std::max<double>(largest, std::abs(a.values[i][j] - b.values[i][j]));
    }
  }
  return largest;
}
double largest(const Gradients& a) {
  double result = 0;
  for (const auto& values : a.values) {
    for (const float value : values) result = std::max<double>(result, std::abs(value));
  }
  return result;
}

TEST(CommunicationHook, D11_AllReduceSetByHandGivesTheBitsOfTheDefault) {
  NEEDS_RANKS(4);
  const auto plain = gradients_with(4, 3, nullptr);
  const auto hooked = gradients_with(4, 3, [] { return std::make_shared<AllReduceHook>(); });
  for (size_t step = 0; step < 3; ++step) expect_same_bits(plain[step], hooked[step]);
}

TEST(CommunicationHook, D11_SixteenBitsHalveTheBytes) {
  NEEDS_RANKS(4);
  const auto plain = gradients_with(4, 2, nullptr);
  for (const DType dtype : {kF16, kBF16}) {
    const auto cast = gradients_with(4, 2, [&] { return std::make_shared<CastHook>(dtype); });
    // Each of the 4 contributions and the sum are rounded once.
    const double eps = dtype == kF16 ? 0x1p-11 : 0x1p-8;
    for (size_t step = 0; step < 2; ++step) {
      EXPECT_LE(largest_difference(plain[step], cast[step]), 4 * eps * largest(plain[step]));
      EXPECT_GT(largest_difference(plain[step], cast[step]), 0);
    }
  }
  on_ranks(4, [](int) {
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    const Traffic plain = replica.report().gradients;
    replica.set_communication_hook(std::make_shared<CastHook>(kBF16));
    EXPECT_EQ(replica.report().gradients, (Traffic{plain.collectives, plain.bytes / 2}));
    EXPECT_THROW(CastHook{kF32}, DTypeError);
  });
}

TEST(CommunicationHook, D11_OneHookIsSetOnceAndAlikeOnAllRanks) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    {
      Replica replica = replicate(net, mesh);
      EXPECT_THROW(replica.set_communication_hook(nullptr), ValueError);
      replica.set_communication_hook(std::make_shared<AllReduceHook>());
      EXPECT_THROW(replica.set_communication_hook(std::make_shared<AllReduceHook>()), ValueError);
    }
    Replica replica = replicate(net, mesh);
    EXPECT_THROW(
        replica.set_communication_hook(std::make_shared<CastHook>(rank == 0 ? kF16 : kBF16)),
        DistributedError);
    loss_of(net, rank).backward();
    EXPECT_THROW(replica.set_communication_hook(std::make_shared<AllReduceHook>()), ValueError);
  });
}

std::shared_ptr<PowerSgdHook> power_sgd(const PowerSgdOptions& options) {
  return std::make_shared<PowerSgdHook>(options);
}

// The memory that a backward ran out of, a hook may ask for too.
TEST(CommunicationHook, OneThatFailsInAFailedBackwardLeavesNothingBehind) {
  struct Failing : AllReduceHook {
    bool fails = false;
    void start(const GradientBucket& bucket, double divisor) override {
      TS_CHECK_AS(OutOfMemory, !fails, "Failing", "no room");
      AllReduceHook::start(bucket, divisor);
    }
  };
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh);
    const auto hook = std::make_shared<Failing>();
    replica.set_communication_hook(hook);
    HookHandle handle = register_hook(
        net.third.weight, [](const Tensor&) -> Tensor { TS_THROW(ValueError, "hook", "fails"); });
    EXPECT_THROW(loss_of(net, rank).backward(), ValueError);
    hook->fails = true;
    EXPECT_NO_THROW(replica.pass().fail_backward()) << "the caller throws on what came first";
    hook->fails = false;
    handle.remove();
    net.zero_grad();
    EXPECT_NO_THROW(loss_of(net, rank).backward()) << "the ranks are told of no failure";
    const auto all = all_gather_objects(world(), nlohmann::json(gradients_of(net).values));
    EXPECT_EQ(all[0], all[1]);
  });
}

TEST(CommunicationHook, D11_PowerSgdMovesTheBytesOfItsFormula) {
  on_ranks(2, [](int rank) {
    Net net;  // weights [32, 8], [64, 32], [12, 64], biases 32, 64, 12
    Mesh mesh(world());
    Replica replica = replicate(net, mesh);
    replica.set_communication_hook(power_sgd({.rank = 2, .start_step = 1}));
    EXPECT_EQ(replica.report().gradients.bytes, (32 * 8 + 64 * 32 + 12 * 64 + 108) * 4);
    loss_of(net, rank).backward();
    net.zero_grad();
    // [32, 8] is worth it, too: (32 + 8) * 2 * 2 < 256.
    const int64_t factors = ((32 + 8) + (64 + 32) + (12 + 64)) * 2;
    EXPECT_EQ(replica.report().gradients.bytes, (factors + 108) * 4);
    const Traffic expected = replica.report().gradients, before = gradient_traffic();
    loss_of(net, rank).backward();
    EXPECT_EQ(gradient_traffic().bytes - before.bytes, expected.bytes);
    EXPECT_EQ(gradient_traffic().collectives - before.collectives, expected.collectives);
  });
}

TEST(CommunicationHook, D11_PowerSgdOfFullRankGivesTheGradient) {
  NEEDS_RANKS(4);
  const auto plain = gradients_with(4, 3, nullptr);
  const auto full = gradients_with(
      4, 3, [] { return power_sgd({.rank = 1000, .start_step = 0, .min_compression = 0}); });
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_LE(largest_difference(plain[step], full[step]), 1e-5 * largest(plain[step]));
  }
}

// One parameter, whose gradient is what the model is called with.
struct Weighted : nn::Module<Weighted> {
  explicit Weighted(const Shape& shape) : weight(parameter("weight", raw::zeros(shape, kF32))) {}
  Tensor forward(const Tensor& x) { return (weight * x).sum(); }
  const Tensor& weight;
};

TEST(CommunicationHook, D11_PowerSgdHasTheGradientsOfPyTorchs) {
  for (const Json& golden : tests::golden_json("power_sgd.json")) {
    const Shape shape(golden["shape"].get<std::vector<int64_t>>());
    const auto gradients = golden["gradients"].get<std::vector<std::vector<double>>>();
    const auto wrapper = golden["wrapper"].get<std::string>();
    const bool batched = golden["batched"].get<bool>();
    const int64_t rank_of_factors = golden["rank"].get<int64_t>();
    SCOPED_TRACE(golden["name"].get<std::string>());
    on_ranks(2, [&](int rank) {
      Weighted model(shape);
      Mesh mesh(world());
      Replica replica = replicate(model, mesh);
      const auto hook = power_sgd({.rank = rank_of_factors,
                                   .start_step = 0,
                                   .min_compression = 0,
                                   .batched = batched,
                                   .wire = wrapper == "fp16"   ? kF16
                                           : wrapper == "bf16" ? kBF16
                                                               : kF32});
      const int64_t columns = 5;
      std::vector<float> q;
      for (int64_t i = 0; i < columns; ++i) {
        for (int64_t j = 0; j < rank_of_factors; ++j)
          q.push_back(std::cos(0.5 + 1.1 * i + 2.3 * j));
      }
      hook->load_state_dict(StateDict::from_map(
          {{"weight.q", tensor(std::span<const float>(q), {columns, rank_of_factors}, kF32)}}));
      replica.set_communication_hook(hook);
      for (size_t step = 0; step < gradients.size(); ++step) {
        std::vector<float> x;
        for (size_t i = 0; i < gradients[step].size(); ++i) {
          x.push_back(std::sin(1 + 0.7 * i * (rank + 1) + 1.3 * step));
        }
        model.zero_grad();
        model(tensor(std::span<const float>(x), shape, kF32)).backward();
        const std::vector<double> own = model.weight.grad().to_vector();
        const double eps = wrapper == "fp16" ? 0x1p-11 : wrapper == "bf16" ? 0x1p-8 : 0x1p-24;
        for (size_t i = 0; i < own.size(); ++i) {
          EXPECT_NEAR(own[i], gradients[step][i], 16 * eps) << "step " << step << " element " << i;
        }
      }
    });
  }
}

// Minimises a quadratic over ranks with gradients of rank 1; returns the distance from the minimum.
double distance_after(bool error_feedback, bool batched = false, DType wire = kF32) {
  double distance = 0;
  on_ranks(2, [&](int rank) {
    manual_seed(3);
    nn::Linear model(16, 16, {.bias = false});
    const Tensor target = randn({16, 16}, {}, RandomStream{2, static_cast<uint64_t>(rank)});
    Mesh mesh(world());
    Replica replica = replicate(model, mesh);
    const auto hook = power_sgd({.rank = 1,
                                 .start_step = 0,
                                 .error_feedback = error_feedback,
                                 .warm_start = error_feedback,
                                 .batched = batched,
                                 .wire = wire});
    replica.set_communication_hook(hook);
    const auto step = [&](double rate) {
      const Tensor y = model(eye(16));
      const Tensor difference = y - target.t();
      (difference * difference).sum().backward();
      const NoGradGuard no_grad;
      add_(model.weight, model.weight.grad(), Scalar(-rate));
      model.zero_grad();
    };
    for (int i = 0; i < 300; ++i) step(0.02);
    const Tensor mean = target.clone();
    world().all_reduce(mean, ReduceOp::kMean).wait();
    if (keeps_results(rank)) distance = square(model.weight.detach() - mean).sum().item();
  });
  return distance;
}

TEST(CommunicationHook, D11_ErrorFeedbackConvergesToTheMinimumOfAllRanks) {
  NEEDS_RANKS(2);
  EXPECT_LT(distance_after(true), 1e-3);
  EXPECT_GT(distance_after(false), 10);  // directions that rank 1 leaves out never come
  EXPECT_LT(distance_after(true, true), 1e-3);
  EXPECT_GT(distance_after(false, true), 10);
  // What rounding loses is fed back, too: what is left is the last steps' (measured in bf16:
  // 0.022).
  for (const bool batched : {false, true}) {
    EXPECT_LT(distance_after(true, batched, kF16), 1e-3);
    EXPECT_LT(distance_after(true, batched, kBF16), 0.05);
  }
}

TEST(CommunicationHook, D11_BatchedPowerSgdMovesTwoFactorsOfEachBucket) {
  on_ranks(2, [](int rank) {
    Net net;  // 3180 parameters: a square of 57
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, {.first_bucket_bytes = 1 << 20});
    replica.set_communication_hook(power_sgd({.rank = 3, .start_step = 1, .batched = true}));
    EXPECT_EQ(replica.report().gradients, (Traffic{1, 3180 * 4}));
    loss_of(net, rank).backward();
    net.zero_grad();
    EXPECT_EQ(replica.report().gradients, (Traffic{2, 2 * 57 * 3 * 4}));
    const Traffic before = gradient_traffic();
    loss_of(net, rank).backward();
    EXPECT_EQ(gradient_traffic().bytes - before.bytes, 2 * 57 * 3 * 4);
    EXPECT_EQ(gradient_traffic().collectives - before.collectives, 2);
  });
}

TEST(CommunicationHook, D11_BatchedPowerSgdOfFullRankGivesTheGradient) {
  NEEDS_RANKS(4);
  const auto plain = gradients_with(4, 3, nullptr);
  const auto full = gradients_with(
      4, 3, [] { return power_sgd({.rank = 1000, .start_step = 0, .batched = true}); });
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_LE(largest_difference(plain[step], full[step]), 1e-5 * largest(plain[step]));
  }
}

TEST(CommunicationHook, D11_PowerSgdIn16BitsHalvesTheBytes) {
  NEEDS_RANKS(4);
  for (const bool batched : {false, true}) {
    const auto with = [&](DType wire) {
      return gradients_with(4, 3, [&] {
        return power_sgd({.rank = 2, .start_step = 0, .batched = batched, .wire = wire});
      });
    };
    const auto plain = with(kF32);
    for (const DType wire : {kF16, kBF16}) {
      const auto cast = with(wire);
      const double eps = wire == kF16 ? 0x1p-11 : 0x1p-8;
      for (size_t step = 0; step < 3; ++step) {
        EXPECT_LE(largest_difference(plain[step], cast[step]), 16 * eps * largest(plain[step]));
        EXPECT_GT(largest_difference(plain[step], cast[step]), 0);
      }
    }
  }
  on_ranks(4, [](int rank) {
    for (const bool batched : {false, true}) {
      Traffic traffic[2][2];
      for (const bool half : {false, true}) {
        Net net;
        Mesh mesh(world());
        Replica replica = replicate(net, mesh, small_buckets());
        replica.set_communication_hook(power_sgd(
            {.rank = 2, .start_step = 1, .batched = batched, .wire = half ? kBF16 : kF32}));
        for (const bool compressed : {false, true}) {
          traffic[half][compressed] = replica.report().gradients;
          loss_of(net, rank).backward();
          net.zero_grad();
        }
      }
      for (const bool compressed : {false, true}) {
        EXPECT_EQ(traffic[1][compressed].bytes * 2, traffic[0][compressed].bytes);
        EXPECT_EQ(traffic[1][compressed].collectives, traffic[0][compressed].collectives);
      }
    }
    EXPECT_THROW(PowerSgdHook({.wire = kF64}), DTypeError);
  });
}

// A loss scale that is too high: the optimizer leaves the step out, and later ones are as if it had
// not been.
TEST(CommunicationHook, D11_PowerSgdForgetsAGradientThatIsNotFinite) {
  for (const bool batched : {false, true}) {
    const auto run = [&](bool overflows) {
      std::vector<Gradients> result;
      on_ranks(2, [&](int rank) {
        Weighted model({8, 8});
        Mesh mesh(world());
        Replica replica = replicate(model, mesh);
        replica.set_communication_hook(
            power_sgd({.start_step = 0, .min_compression = 0, .batched = batched}));
        const auto step = [&](uint64_t index, double scale) {
          model.zero_grad();
          model(randn({8, 8}, {}, RandomStream{index, static_cast<uint64_t>(rank)}) * scale)
              .backward();
        };
        step(0, 1), step(1, 1);
        if (overflows) {
          step(2, rank == 1 ? 1e39 : 1.0);
          EXPECT_FALSE(std::isfinite(model.weight.grad().to_vector()[0]));
        }
        step(3, 1), step(4, 1);
        if (keeps_results(rank)) result.push_back(gradients_of(model));
      });
      return result;
    };
    const auto plain = run(false), after = run(true);
    ASSERT_EQ(plain.size(), after.size());
    for (size_t i = 0; i < plain.size(); ++i) expect_same_bits(plain[i], after[i]);
  }
}

TEST(CommunicationHook, D11_PowerSgdUsesAllItsRankAfterAGradientOfLess) {
  on_ranks(2, [](int) {
    Weighted model({8, 8});
    Mesh mesh(world());
    Replica replica = replicate(model, mesh);
    replica.set_communication_hook(
        power_sgd({.rank = 2, .start_step = 0, .min_compression = 0, .error_feedback = false}));
    const auto gradient_of = [&](int64_t rank) {
      return matmul(randn({8, rank}, {}, RandomStream{1, 1}),
                    randn({rank, 8}, {}, RandomStream{1, 2}));
    };
    Tensor last;
    for (const int64_t rank : {1, 2, 2}) {
      model.zero_grad();
      last = gradient_of(rank);
      model(last).backward();
    }
    EXPECT_LT(square(model.weight.grad() - last).sum().item(), 1e-8 * square(last).sum().item());
  });
}

// What each kind of PowerSGD is tried with.
std::vector<PowerSgdOptions> kinds_of_power_sgd() {
  std::vector<PowerSgdOptions> kinds;
  for (const bool batched : {false, true}) {
    for (const DType wire : {kF32, kF16, kBF16}) {
      kinds.push_back({.rank = 2, .min_compression = 1, .batched = batched, .wire = wire});
    }
  }
  return kinds;
}

// Gradients come in another order than parameters are registered in: buckets are made anew.
struct Shuffled : nn::Module<Shuffled> {
  Shuffled()
      : third(add<nn::Linear>("third", 64, 12)),
        first(add<nn::Linear>("first", 8, 32)),
        second(add<nn::Linear>("second", 32, 64)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))); }
  nn::Linear& third;
  nn::Linear& first;
  nn::Linear& second;
};

TEST(CommunicationHook, D11_WhatPowerSgdHasNotSentIsInTheErrorsOfTheRanks) {
  for (PowerSgdOptions options : kinds_of_power_sgd()) {
    options.start_step = 0;
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      Shuffled net;
      manual_seed(3);
      Shuffled alone;
      Mesh mesh(world());
      Replica replica = replicate(net, mesh, small_buckets());
      const auto hook = power_sgd(options);
      replica.set_communication_hook(hook);
      constexpr int kSteps = 4;
      std::vector<std::vector<double>> sums;
      for (int step = 0; step < kSteps; ++step) {
        net.zero_grad();
        loss_of(net, 2 * step + rank).backward();
        const Gradients own = gradients_of(net);
        sums.resize(own.values.size());
        for (size_t i = 0; i < sums.size(); ++i) {
          sums[i].resize(own.values[i].size());
          for (size_t j = 0; j < sums[i].size(); ++j) sums[i][j] += own.values[i][j];
        }
      }
      const Gradients expected = accumulate_in_one_process(alone, 0, 2 * kSteps, 2);
      const StateDict state = hook->state_dict();
      const double eps = options.wire == kF16 ? 0x1p-11 : options.wire == kBF16 ? 0x1p-8 : 0x1p-24;
      for (size_t i = 0; i < sums.size(); ++i) {
        std::vector<double> error(sums[i].size());
        const Tensor* kept = state.find(expected.names[i] + ".error");
        if (kept != nullptr) {
          const Tensor mean = kept->clone();
          world().all_reduce(mean, ReduceOp::kMean).wait();
          error = mean.to_vector();
        }
        const double tolerance = kept != nullptr ? 1e-6 : 4 * kSteps * eps;
        for (size_t j = 0; j < error.size(); ++j) {
          ASSERT_NEAR(sums[i][j] + error[j], expected.values[i][j], tolerance)
              << expected.names[i] << " element " << j
              << (options.batched ? ", batched, in " : ", in ") << options.wire;
        }
      }
    });
  }
}

TEST(CommunicationHook, D11_PowerSgdGoesOnFromItsState) {
  for (PowerSgdOptions options : kinds_of_power_sgd()) {
    options.start_step = 1;
    on_ranks(2, [&](int rank) {
      const auto train = [&](int steps, int first, Net& net, PowerSgdHook* from,
                             std::shared_ptr<PowerSgdHook> hook) {
        Mesh mesh(world());
        ReplicateOptions buckets = small_buckets();
        buckets.rebuild_buckets = !options.batched;  // its factors are those of buckets
        Replica replica = replicate(net, mesh, buckets);
        if (from != nullptr) hook->load_state_dict(from->state_dict().clone());
        replica.set_communication_hook(hook);
        for (int step = first; step < first + steps; ++step) {
          net.zero_grad();
          loss_of(net, 10 * step + rank).backward();
        }
      };
      manual_seed(3);
      Net whole, parts;
      const auto one = power_sgd(options), first = power_sgd(options), second = power_sgd(options);
      train(6, 0, whole, nullptr, one);
      train(3, 0, parts, nullptr, first);
      train(3, 3, parts, first.get(), second);
      expect_same_bits(gradients_of(parts), gradients_of(whole));
      EXPECT_THROW(second->load_state_dict(StateDict::from_map({{"weight.what", ones({1})}})),
                   ValueError);
    });
  }
}

// ---- Uneven inputs -----------------------------------------------------------------------------

TEST(Join, D12_RanksMayHaveDifferentNumbersOfBatches) {
  for (const int size : {2, 4}) {
    for (const JoinDivide divide : {JoinDivide::kActiveRanks, JoinDivide::kAllRanks}) {
      // Rank r has 2 + r batches; in step s the ranks from s - 1 on are at work.
      std::vector<std::vector<float>> expected;
      in_one_process([&] {
        Net net;
        optim::SGD optimizer(net.named_parameters(), {.lr = 0.1});
        for (int step = 0; step < size + 1; ++step) {
          const int first = std::max(0, step - 1);
          net.zero_grad();
          for (int rank = first; rank < size; ++rank) loss_of(net, 10 * step + rank).backward();
          const NoGradGuard no_grad;
          const double divisor = divide == JoinDivide::kActiveRanks ? size - first : size;
          for (const Tensor& parameter : net.parameters()) {
            mul_(parameter.grad(), Scalar(1 / divisor));
          }
          optimizer.step();
        }
        expected = values_of(net);
      });
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        Net net;
        Mesh mesh(world());
        Replica replica = replicate(net, mesh, small_buckets());
        optim::SGD optimizer(net.named_parameters(), {.lr = 0.1});
        Join join = replica.join({.divide = divide});
        for (int step = 0; step < 2 + rank; ++step) {
          loss_of(net, 10 * step + rank).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        join.finish();
        const auto values = values_of(net);
        ASSERT_EQ(values.size(), expected.size());
        for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], expected[i]);
        EXPECT_THROW(join.finish(), ValueError);
        // The next epoch needs no scope.
        loss_of(net, rank).backward();
      });
    }
  }
}

// However the scope ended: all ranks bring a batch again, and the mean is over all of them.
TEST(Join, AStepAfterTheScopeDividesByAllRanks) {
  for (const bool throws : {false, true}) {
    on_ranks(4, [&](int rank) {
      Net net;
      Mesh mesh(world());
      Replica replica = replicate(net, mesh, small_buckets());
      const auto all_ranks = [&] {
        net.zero_grad();
        loss_of(net, rank).backward();
        return gradients_of(net);
      };
      const Gradients before = all_ranks();
      net.zero_grad();
      {
        Join join = replica.join({.throw_on_early_end = throws});
        const auto uneven = [&] {
          for (int step = 0; step < 1 + rank; ++step) {
            loss_of(net, 10 * step + rank).backward();
            net.zero_grad();
          }
          join.finish();
        };
        if (throws) {
          EXPECT_THROW(uneven(), DistributedError);
        } else {
          uneven();
        }
      }
      expect_same_bits(all_ranks(), before);
    });
  }
}

TEST(Join, D12_RanksThatEndedAnswerLocalStepsAndBuffers) {
  on_ranks(4, [](int rank) {
    Normed model;
    Mesh mesh(world());
    ReplicateOptions options = small_buckets();
    options.average = GradientAverage::kWindow;
    Replica replica = replicate(model, mesh, options);
    Join join = replica.join();
    for (int step = 0; step < rank; ++step) {  // rank 0 has none at all
      for (int micro = 0; micro < 2; ++micro) {
        replica.set_plan(StepPlan::of(micro, 2));
        loss_of(model, 10 * step + rank).backward();
      }
      EXPECT_EQ(replica.pass().record().backwards_before, 1);
      model.zero_grad();
    }
    join.finish();
    expect_equal_on_all_ranks(Json(values_of(model)));
    expect_equal_on_all_ranks(Json(model.norm.running_mean.to_vector()));
    EXPECT_EQ(replica.pass().reductions(), 3);
  });
}

TEST(Join, D12_ThrowModeRaisesOnAllRanksInOneStep) {
  on_ranks(4, [](int rank) {
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    int steps = 0;
    {
      Join join = replica.join({.throw_on_early_end = true});
      EXPECT_THROW(
          {
            for (int step = 0; step < 2 + rank; ++step) {
              loss_of(net, 10 * step + rank).backward();
              net.zero_grad();
              ++steps;
            }
            join.finish();
          },
          DistributedError);
    }
    EXPECT_EQ(steps, 2);
    net.zero_grad();
    loss_of(net, rank).backward();  // and training can go on
    expect_equal_on_all_ranks(Json(gradients_of(net).values));
  });
}

TEST(Join, GradientsThatWereNeverReducedAreAnError) {
  on_ranks(1, [](int) {
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh);
    Join join = replica.join();
    {
      const NoSync local = replica.no_sync();
      loss_of(net, 0).backward();
    }
    EXPECT_THROW(join.finish(), ValueError);
    EXPECT_THROW(static_cast<void>(replica.join()), ValueError);  // one scope at a time
  });
}

}  // namespace
}  // namespace tessera::distributed::test_replicate_extras
