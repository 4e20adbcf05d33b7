// Data-parallel training on threads as ranks. The numbers in the names are those of the criteria
// that the design sets for it.
// ctest labels: threads
// ctest ranks: 2 4
#include <tessera/autograd/checkpoint.h>
#include <tessera/core/memory/allocator.h>

#include <tessera/autograd/node.h>

#include "distributed/replicate_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_replicate {
namespace {

TEST(Replicate, D2_RanksGiveTheBitsOfOneProcessThatAccumulatesInRankOrder) {
  for (const int size : {2, 4, 8}) {
    std::vector<Gradients> expected;
    {
      Context context;
      const ContextGuard guard(context);
      set_num_threads(1);
      manual_seed(3);
      Net alone;
      for (int step = 0; step < 3; ++step) {
        expected.push_back(accumulate_in_one_process(alone, step * size, size, size));
      }
    }
    on_ranks(size, [&](int rank) {
      manual_seed(3);
      Net net;
      Mesh mesh(world());
      Replica replica = replicate(net, mesh, small_buckets());
      EXPECT_GT(replica.report().buckets.size(), 2u);
      for (int step = 0; step < 3; ++step) {
        loss_of(net, step * size + rank).backward();
        expect_same_bits(gradients_of(net), expected[static_cast<size_t>(step)]);
        net.zero_grad();
      }
      EXPECT_EQ(replica.schedule().rebuilds(), 1);
    });
  }
}

// What every rank has after each of `steps` steps, in one process: loss(model, batch) of the
// batches step * size ... step * size + size - 1, added up in order, divided once.
template <class Model, class Loss>
std::vector<Gradients> one_process(int size, int steps, const Loss& loss, double divisor) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  manual_seed(3);
  Model model;
  std::vector<Gradients> result;
  for (int step = 0; step < steps; ++step) {
    model.zero_grad();
    for (int rank = 0; rank < size; ++rank) loss(model, step, rank).backward();
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) {
      if (parameter.grad().defined()) mul_(parameter.grad(), Scalar(1 / divisor));
    }
    result.push_back(gradients_of(model));
  }
  return result;
}

// Trains on `size` ranks and holds every gradient against one process.
template <class Model, class Loss>
void expect_bits_of_one_process(int size, int steps, const Loss& loss,
                                const ReplicateOptions& options = small_buckets()) {
  const std::vector<Gradients> expected = one_process<Model>(size, steps, loss, size);
  on_ranks(size, [&](int rank) {
    manual_seed(3);
    Model model;
    Mesh mesh(world());
    const Replica replica = replicate(model, mesh, options);
    for (int step = 0; step < steps; ++step) {
      SCOPED_TRACE(testing::Message() << "step " << step << ", rank " << rank << " of " << size);
      loss(model, step, rank).backward();
      expect_same_bits(gradients_of(model), expected[static_cast<size_t>(step)]);
      model.zero_grad();
    }
  });
}

// The gradients of one backward of `count` batches in one.
Gradients of_the_big_batch(int count) {
  Context context;
  const ContextGuard guard(context);
  manual_seed(3);
  Net net;
  TensorList batches;
  for (int i = 0; i < count; ++i) {
    batches.push_back(randn({5, 8}, {}, RandomStream{7, static_cast<uint64_t>(i)}));
  }
  const Tensor y = net(cat(batches));
  (y * y).mean().backward();
  return gradients_of(net);
}
// Each element within 1e-6 of the largest of its parameter's.
void expect_close(const Gradients& own, const Gradients& expected) {
  for (size_t i = 0; i < own.values.size(); ++i) {
    double largest = 0;
    for (const float value : expected.values[i])
      largest = std::max<double>(largest, std::abs(value));
    for (size_t j = 0; j < own.values[i].size(); ++j) {
      EXPECT_NEAR(own.values[i][j], expected.values[i][j], 1e-6 * largest);
    }
  }
}

TEST(Replicate, D2_AgreesWithTheConcatenatedBatchAlsoByTheTransportsOwnReductions) {
  for (const int size : {2, 4}) {
    const Gradients expected = of_the_big_batch(size);
    on_ranks(size, [&](int rank) {
      for (const ReductionMode mode : {ReductionMode::kDeterministic, ReductionMode::kNative}) {
        rank_context().reduction_mode = mode;
        manual_seed(3);
        Net net;
        Mesh mesh(world());
        const Replica replica = replicate(net, mesh, small_buckets());
        loss_of(net, rank).backward();
        expect_close(gradients_of(net), expected);
      }
      rank_context().reduction_mode = ReductionMode::kDeterministic;
    });
  }
}

TEST(Replicate, D3_GradientsLieInTheBucketsAndKeepTheirLayout) {
  on_ranks(2, [](int rank) {
    Net net;
    // A weight whose memory order is not its order of dimensions.
    net.second.weight.set_data(net.second.weight.detach().t().contiguous().t());
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    for (int step = 0; step < 3; ++step) {
      loss_of(net, rank).backward();
      int64_t found = 0;
      for (const auto& group : replica.schedule().buckets()) {
        for (size_t slot = 0; slot < group->size(); ++slot, ++found) {
          const Tensor grad = group->param(slot).tensor.grad();
          EXPECT_TRUE(grad.is(group->gradient(slot)));
          EXPECT_EQ(grad.storage(), group->gradients().storage());
          EXPECT_EQ(grad.strides(), group->param(slot).tensor.strides());
        }
      }
      EXPECT_EQ(found, 6);
      net.zero_grad();
      for (const Tensor& parameter : net.parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

// Columns of a wider tensor: its memory has holes, the bucket has none.
TEST(Replicate, D3_AParameterWhoseMemoryHasHolesHasTheGradientOfADenseOne) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net dense, holes;
    holes.load_state_dict(dense.state_dict());
    const Tensor wide = full({64, 70}, 7);
    const Tensor columns = wide.narrow(1, 5, 32);
    copy_(columns, holes.second.weight.detach());
    holes.second.weight.set_data(columns);
    Mesh mesh(world());
    const Replica first = replicate(dense, mesh, small_buckets());
    const Replica second = replicate(holes, mesh, small_buckets());
    for (int step = 0; step < 2; ++step) {
      loss_of(dense, 10 * step + rank).backward();
      loss_of(holes, 10 * step + rank).backward();
      expect_same_bits(gradients_of(holes), gradients_of(dense));
      dense.zero_grad(), holes.zero_grad();
    }
    EXPECT_EQ(wide.narrow(1, 0, 5).to_vector(), std::vector<double>(320, 7));
  });
}

TEST(Replicate, D3_ViewsAndCopiesGiveTheSameBits) {
  NEEDS_RANKS(2);
  for (const bool set_to_none : {true, false}) {
    std::vector<Gradients> results[2];
    for (const bool views : {false, true}) {
      on_ranks(2, [&](int rank) {
        manual_seed(3);
        Net net;
        Mesh mesh(world());
        ReplicateOptions options = small_buckets();
        options.gradient_as_bucket_view = views;
        Replica replica = replicate(net, mesh, options);
        for (int step = 0; step < 3; ++step) {
          {
            const NoSync local = replica.no_sync();
            loss_of(net, 10 * step + rank).backward();
          }
          loss_of(net, 10 * step + 2 + rank).backward();
          if (keeps_results(rank)) results[views].push_back(gradients_of(net));
          net.zero_grad(set_to_none);
        }
      });
    }
    ASSERT_EQ(results[0].size(), 3u);
    for (size_t step = 0; step < 3; ++step) expect_same_bits(results[0][step], results[1][step]);
  }
}

TEST(Replicate, D3_AGradientThatWasSetByHandIsTakenIntoTheBucket) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    net.third.bias.set_grad(ones({12}) * (rank + 1.0));
    (net.third.bias * 2.0).sum().backward();  // not through forward
    EXPECT_EQ(net.third.bias.grad().to_vector<float>(), std::vector<float>(12, 3.5f));
    EXPECT_FALSE(net.first.weight.grad().defined());
  });
}

TEST(Replicate, D4_LocalBackwardsCommunicateNothingAndGiveTheBitsOfTheDoubleSum) {
  constexpr int kMicroBatches = 3;
  for (const int size : {2, 4, 8}) {
    // sum over ranks of (sum over micro-batches), multiplied once.
    Gradients expected;
    {
      Context context;
      const ContextGuard guard(context);
      set_num_threads(1);
      manual_seed(3);
      Net net;
      TensorList sums;
      const NoGradGuard no_grad;
      for (int rank = 0; rank < size; ++rank) {
        net.zero_grad();
        for (int micro = 0; micro < kMicroBatches; ++micro) {
          const EnableGradGuard grad;
          loss_of(net, rank * kMicroBatches + micro).backward();
        }
        const TensorList parameters = net.parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          if (rank == 0) {
            sums.push_back(parameters[i].grad().clone());
          } else {
            add_(sums[i], parameters[i].grad());
          }
        }
      }
      const TensorList parameters = net.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        mul_(sums[i], Scalar(1.0 / (size * kMicroBatches)));
        parameters[i].set_grad(sums[i]);
      }
      expected = gradients_of(net);
      expect_close(expected, of_the_big_batch(size * kMicroBatches));
    }
    on_ranks(size, [&](int rank) {
      manual_seed(3);
      Net net;
      Mesh mesh(world());
      ReplicateOptions options = small_buckets();
      options.average = GradientAverage::kWindow;
      Replica replica = replicate(net, mesh, options);
      for (int step = 0; step < 2; ++step) {
        for (int micro = 0; micro < kMicroBatches; ++micro) {
          replica.set_plan(StepPlan::of(micro, kMicroBatches));
          const auto before = gradient_collectives();
          loss_of(net, rank * kMicroBatches + micro).backward();
          const int64_t issued = gradient_collectives() - before;
          EXPECT_EQ(issued, micro + 1 < kMicroBatches ? 0 : replica.report().gradients.collectives);
        }
        EXPECT_EQ(replica.pass().record().backwards_before, kMicroBatches - 1);
        expect_same_bits(gradients_of(net), expected);
        net.zero_grad();
      }
    });
  }
}

// ---- Order of buckets --------------------------------------------------------------------------

// Two layers side by side; rank 1 calls them in the other order.
struct Crossed : nn::Module<Crossed> {
  Crossed()
      : a(add<nn::Linear>("a", 8, 40)),
        b(add<nn::Linear>("b", 8, 40)),
        c(add<nn::Linear>("c", 8, 40)) {}
  Tensor forward(const Tensor& x, int order) {
    Tensor parts[3];
    nn::Linear* layers[] = {&a, &b, &c};
    for (int i = 0; i < 3; ++i) {
      const int j = (i * (order == 0 ? 1 : 2) + order) % 3;
      parts[j] = (*layers[j])(x);
    }
    return parts[0] + parts[1] + parts[2];
  }
  nn::Linear &a, &b, &c;
};

TEST(Replicate, D5_BucketsAreMadeAnewOnceInTheOrderOfRank0) {
  on_ranks(4, [](int rank) {
    Crossed net;
    Mesh mesh(world());
    ReplicateOptions options;
    options.first_bucket_bytes = options.bucket_bytes = 1;  // a bucket for each parameter
    const Replica replica = replicate(net, mesh, options);
    const auto order = [&] {
      std::vector<std::string> names;
      for (const auto& bucket : replica.report().buckets) names.push_back(bucket.parameters[0]);
      return names;
    };
    EXPECT_EQ(order(), (std::vector<std::string>{"c.bias", "c.weight", "b.bias", "b.weight",
                                                 "a.bias", "a.weight"}));
    const Tensor x = randn({3, 8});
    const auto train = [&](int forward_order) {
      std::vector<std::string> arrived;
      std::vector<HookHandle> handles;
      for (const auto& [name, tensor] : net.named_parameters()) {
        handles.push_back(register_post_accumulate_hook(
            tensor, [&arrived, name = name](const Tensor&) { arrived.push_back(name); }));
      }
      net(x, forward_order).sum().backward();
      for (HookHandle& handle : handles) handle.remove();
      net.zero_grad();
      return arrived;
    };
    const auto arrived = train(rank % 2);
    EXPECT_EQ(replica.schedule().rebuilds(), 0);
    train(rank % 2);
    EXPECT_EQ(replica.schedule().rebuilds(), 1);
    if (rank % 2 == 0) {
      EXPECT_EQ(order(), arrived);
      EXPECT_NE(arrived.front(), "c.bias");
    } else {
      EXPECT_NE(order(), arrived);
    }
    const auto all = all_gather_objects(world(), nlohmann::json(order()));
    for (const auto& other : all) EXPECT_EQ(other, all[0]);
    train(1 - rank % 2);
    train(rank % 2);
    EXPECT_EQ(replica.schedule().rebuilds(), 1);
  });
}

// The forward that makes the buckets anew comes while gradients are there: they move along, and are
// still known as reduced.
TEST(Replicate, D5_GradientsKeepTheirValuesWhenBucketsAreMadeAnew) {
  on_ranks(2, [](int rank) {
    for (const bool views : {true, false}) {
      Crossed net;
      Mesh mesh(world());
      ReplicateOptions options = small_buckets();
      options.gradient_as_bucket_view = views;
      const Replica replica = replicate(net, mesh, options);
      const Tensor x = full({3, 8}, 0.5 + rank);
      net(x, 1).sum().backward();
      const Gradients before = gradients_of(net);
      EXPECT_NE(before.values[0], std::vector<float>(before.values[0].size())) << "not only zeros";
      const Tensor loss = net(x, 1).sum();
      ASSERT_EQ(replica.schedule().rebuilds(), 1);
      expect_same_bits(gradients_of(net), before);
      EXPECT_THROW(loss.backward(), AutogradError) << "reduced, and no step was made";
      net.zero_grad();
      net(x, 1).sum().backward();
      expect_same_bits(gradients_of(net), before);
    }
  });
}

TEST(Replicate, D5_MakingBucketsAnewAddsNothingToThePeakAfterZeroGrad) {
  on_ranks(2, [](int rank) {
    nn::Linear model(256, 256);
    Mesh mesh(world());
    ReplicateOptions options;
    options.bucket_bytes = options.first_bucket_bytes = 4096;
    const Replica replica = replicate(model, mesh, options);
    const auto stats = memory_stats();
    const int64_t once = stats->current(MemoryCategory::kGradient);
    EXPECT_EQ(once, (256 * 256 + 256) * 4);
    for (int step = 0; step < 3; ++step) {
      model(randn({2, 256})).sum().backward();
      model.zero_grad();
    }
    EXPECT_EQ(replica.schedule().rebuilds(), 1);
    EXPECT_EQ(stats->current(MemoryCategory::kGradient), once);
    (void)rank;
  });
}

// ---- Unused parameters, shared weights, recomputation ------------------------------------------

constexpr int kNoParameter = 8;
struct Branches : nn::Module<Branches> {
  Branches()
      : trunk(add<nn::Linear>("trunk", 8, 16)),
        a(add<nn::Linear>("a", 16, 16)),
        b(add<nn::Linear>("b", 16, 16)),
        c(add<nn::Linear>("c", 16, 16)) {}
  // Bit 0, 1, 2: the branches a, b, c take part.
  Tensor forward(const Tensor& x, int mask) {
    if (mask == kNoParameter) return x * 2.0;
    const Tensor h = relu(trunk(x));
    Tensor y = h;
    if (mask & 1) y = y + a(h);
    if (mask & 2) y = y + b(h);
    if (mask & 4) y = y + c(h);
    return y;
  }
  nn::Linear &trunk, &a, &b, &c;
};

auto branch_loss(std::vector<std::vector<int>> masks) {
  return [masks](Branches& model, int step, int rank) {
    const auto& of_step = masks[static_cast<size_t>(step) % masks.size()];
    const int mask = of_step[static_cast<size_t>(rank) % of_step.size()];
    const auto batch = static_cast<uint64_t>(100 * step + rank);
    const Tensor y = model(randn({4, 8}, {}, RandomStream{11, batch}), mask);
    return (y * y).mean();
  };
}

TEST(Replicate, D6_ParametersUnusedOnAllRanksKeepNoGradient) {
  expect_bits_of_one_process<Branches>(2, 3, branch_loss({{3}}));
  expect_bits_of_one_process<Branches>(4, 3, branch_loss({{0}, {5}}));
}

TEST(Replicate, D6_EveryRankMayUseOtherParameters) {
  expect_bits_of_one_process<Branches>(2, 3, branch_loss({{1, 2}}));
  expect_bits_of_one_process<Branches>(4, 4, branch_loss({{1, 2, 4, 0}, {7, 0, 1, 1}}));
  expect_bits_of_one_process<Branches>(8, 2, branch_loss({{1, 2, 4, 0, 3, 5, 6, 7}}));
}

TEST(Replicate, D6_UsedParametersMayChangeFromStepToStep) {
  expect_bits_of_one_process<Branches>(2, 6, branch_loss({{0, 0}, {1, 1}, {2, 4}, {7, 7}, {0, 4}}));
}

TEST(Replicate, D6_AGradientThatNobodyAddsToIsLeftAsItWas) {
  on_ranks(2, [](int) {
    Branches net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    net(randn({2, 8}), 2).sum().backward();
    EXPECT_FALSE(net.a.weight.grad().defined());
    EXPECT_FALSE(net.c.bias.grad().defined());
    EXPECT_TRUE(net.b.weight.grad().defined());
  });
}

TEST(Replicate, D6_ARankWhoseLossReachesNoParameterTakesPart) {
  on_ranks(2, [](int rank) {
    Branches net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    const Tensor x = randn({2, 8}).set_requires_grad();
    for (int step = 0; step < 2; ++step) {
      const Tensor y = net(x, rank == 0 ? 1 : kNoParameter);
      grad(y.sum(), std::span(&x, 1), {}, {.retain_graph = true});
      EXPECT_EQ(replica.pass().reductions(), step);  // grad() is no training
      y.sum().backward();
      EXPECT_EQ(replica.pass().reductions(), step + 1);
      EXPECT_TRUE(net.a.weight.grad().defined());
      net.zero_grad();
    }
  });
}

struct Shared : nn::Module<Shared> {
  Shared() : layer(add<nn::Linear>("layer", 8, 8)), head(add<nn::Linear>("head", 8, 8)) {
    head.share_parameter("weight", layer.weight);
  }
  Tensor forward(const Tensor& x) { return head(relu(layer(relu(layer(x))))); }
  nn::Linear &layer, &head;
};

TEST(Replicate, D7_AWeightMayBeUsedSeveralTimes) {
  expect_bits_of_one_process<Shared>(
      2, 3, [](Shared& model, int step, int rank) { return loss_of(model, 10 * step + rank); });
}

// Recomputes its parts in backward; `mode`: which ones, and whether the second one takes part.
struct Recomputed : nn::Module<Recomputed> {
  Recomputed()
      : first(add<nn::Linear>("first", 8, 8)),
        second(add<nn::Linear>("second", 8, 8)),
        spare(add<nn::Linear>("spare", 8, 8)) {}
  Tensor forward(const Tensor& x, int mode) {
    const auto part = [&](const Tensor& in) { return relu(first(in)); };
    Tensor y = checkpoint(part, x);          // once
    if (mode >= 1) y = checkpoint(part, y);  // twice: the same weights again
    if (mode >= 2) y = checkpoint([&](const Tensor& in) { return second(in); }, y);
    if (mode >= 3) y = checkpoint([&](const Tensor& in) { return checkpoint(part, in) * 2.0; }, y);
    return y;
  }
  nn::Linear &first, &second, &spare;
};

TEST(Replicate, D7_ActivationsMayBeRecomputedOnceOrTwiceWithUnusedParameters) {
  for (int mode = 0; mode <= 3; ++mode) {
    SCOPED_TRACE(mode);
    expect_bits_of_one_process<Recomputed>(2, 2, [mode](Recomputed& model, int step, int rank) {
      const auto batch = static_cast<uint64_t>(10 * step + rank);
      return model(randn({4, 8}, {}, RandomStream{5, batch}), mode).sum();
    });
  }
}

TEST(Replicate, D7_TheUsedSetMayChangeBetweenStepsAndRanks) {
  expect_bits_of_one_process<Recomputed>(4, 4, [](Recomputed& model, int step, int rank) {
    const auto batch = static_cast<uint64_t>(10 * step + rank);
    return model(randn({4, 8}, {}, RandomStream{5, batch}), (step + rank) % 4).sum();
  });
}

TEST(Replicate, D7_ABackwardInsideABackwardIsRefusedWithTheName) {
  on_ranks(1, [](int) {
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    const Tensor y = net(randn({2, 8}));
    Tensor outer = (net.third.bias * 2.0).sum();
    register_post_accumulate_hook(net.third.bias, [&](const Tensor&) {
      const EnableGradGuard grad;
      y.sum().backward();
    });
    try {
      outer.backward();
      FAIL() << "not refused";
    } catch (const AutogradError& error) {
      EXPECT_NE(std::string(error.what()).find("third."), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("checkpoint()"), std::string::npos);
    }
  });
}

TEST(Replicate, FrozenAndIgnoredParametersStayOut) {
  on_ranks(2, [](int rank) {
    manual_seed(static_cast<uint64_t>(rank));
    Net net;
    net.first.requires_grad_(false);
    Mesh mesh(world());
    ReplicateOptions options = small_buckets();
    options.ignored = {"third", "second.bias"};
    const Replica replica = replicate(net, mesh, options);
    EXPECT_EQ(replica.report().parameters, 1);  // second.weight
    const auto equal_on_ranks = [](const Tensor& tensor) {
      const auto all = all_gather_objects(world(), nlohmann::json(tensor.to_vector<float>()));
      return all[0] == all[1];
    };
    EXPECT_TRUE(equal_on_ranks(net.first.weight));  // frozen ones are made equal, too
    EXPECT_FALSE(equal_on_ranks(net.third.weight));
    EXPECT_FALSE(equal_on_ranks(net.second.bias));
    loss_of(net, rank).backward();
    EXPECT_TRUE(equal_on_ranks(net.second.weight.grad()));
    EXPECT_FALSE(equal_on_ranks(net.third.weight.grad()));
    EXPECT_FALSE(net.first.weight.grad().defined());
  });
}

TEST(Replicate, OptionsThatDoNotFitAreConfigErrors) {
  on_ranks(1, [](int) {
    Net net;
    Mesh mesh(world());
    ReplicateOptions options;
    options.ignored = {"thirds"};
    EXPECT_THROW(replicate(net, mesh, options), ConfigError);
    options = {.gradient_as_bucket_view = false, .gradient_dtype = kF32};
    EXPECT_THROW(replicate(net, mesh, options), ConfigError);
    options = {.axis = "tp"};
    EXPECT_THROW(replicate(net, mesh, options), ConfigError);

    const Tensor without_memory = raw::empty({2}, kF32, kMeta).set_requires_grad();
    EXPECT_THROW(BucketSchedule({{"w", without_memory}}, world(), {}), DeviceError);
  });
}

TEST(Replicate, SeveralDtypesTravelInBucketsOfTheirOwn) {
  struct Mixed : nn::Module<Mixed> {
    Mixed() : low(add<nn::Linear>("low", 8, 8)), high(add<nn::Linear>("high", 8, 8)) {
      low.to(kBF16);
      high.to(kF64);
    }
    Tensor forward(const Tensor& x) { return high(low(x.to(kBF16)).to(kF64)); }
    nn::Linear &low, &high;
  };
  on_ranks(2, [](int rank) {
    Mixed model;
    Mesh mesh(world());
    const Replica replica = replicate(model, mesh);
    EXPECT_EQ(replica.report().buckets.size(), 2u);
    for (int step = 0; step < 2; ++step) {
      model(randn({2, 8}, {}, RandomStream{1, static_cast<uint64_t>(rank)})).sum().backward();
      EXPECT_EQ(model.low.weight.grad().dtype(), kBF16);
      const auto all =
          all_gather_objects(world(), nlohmann::json({model.low.weight.grad().to_vector(),
                                                      model.high.weight.grad().to_vector()}));
      EXPECT_EQ(all[0], all[1]);
      model.zero_grad();
    }
  });
}

TEST(Replicate, GradientsOfNarrowParametersMayBeKeptInF32) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    nn::Linear model(8, 4);
    model.to(kBF16);
    Mesh mesh(world());
    ReplicateOptions options;
    options.gradient_dtype = kF32;
    Replica replica = replicate(model, mesh, options);
    EXPECT_EQ(replica.report().gradient_bytes, 36 * 4);
    optim::SGD optimizer(model.named_parameters(), {.lr = 1});
    const auto bias = [&] { return model.bias.grad().to_vector<float>()[0]; };
    for (int step = 0; step < 2; ++step) {
      // 256 and 1 on one rank, 1 and 1 on the other: bf16 has neither 257 nor 259.
      for (int micro = 0; micro < 2; ++micro) {
        replica.set_plan(StepPlan::of(micro, 2));
        const double factor = micro == 0 && rank == 0 ? 256 : 1;
        (model(zeros({1, 8}, {kBF16})) * factor).sum().backward();
      }
      EXPECT_EQ(model.bias.grad().dtype(), kF32);
      EXPECT_EQ(bias(), 129.5f);
      EXPECT_TRUE(optimizer.step());
      optimizer.zero_grad();
    }
  });
}

// ---- Misuse ------------------------------------------------------------------------------------

TEST(Replicate, D8_TwoReductionsWithoutAStepAreRefusedAndANewReplicaTrains) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    optim::SGD optimizer(net.named_parameters(), {.lr = 0.1});
    {
      const Replica replica = replicate(net, mesh, small_buckets());
      loss_of(net, rank).backward();
      EXPECT_THROW(loss_of(net, rank).backward(), AutogradError);
      const std::string message = message_of([&] { loss_of(net, rank).backward(); });
      EXPECT_NE(message.find("'first.weight'"), std::string::npos) << message;
      EXPECT_NE(message.find("no_sync()"), std::string::npos) << message;
    }
    net.zero_grad();
    const Replica replica = replicate(net, mesh, small_buckets());
    for (int step = 0; step < 3; ++step) {
      loss_of(net, rank).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(replica.pass().reductions(), 3);
    const auto all = all_gather_objects(world(), nlohmann::json(values_of(net)));
    EXPECT_EQ(all[0], all[1]);
  });
}

TEST(Replicate, D8_AStepOrZeroGradBetweenIsEnough) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    optim::SGD optimizer(net.named_parameters(), {.lr = 0.1});
    Replica replica = replicate(net, mesh, small_buckets());
    loss_of(net, rank).backward();
    net.zero_grad(false);  // zeros, not none
    loss_of(net, rank).backward();
    optimizer.step();  // and no zero_grad: gradients add up, as in torch
    loss_of(net, rank).backward();
    net.zero_grad();
    {
      const NoSync local = replica.no_sync();
      loss_of(net, rank).backward();
      loss_of(net, rank).backward();
    }
    loss_of(net, rank).backward();
    EXPECT_EQ(replica.pass().reductions(), 4);
  });
}

TEST(Replicate, ABackwardThatFailedLeavesNothingBehind) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    Tensor y = net(randn({2, 8})) * 1.0;
    register_hook(y, [](const Tensor&) -> Tensor { TS_THROW(ValueError, "hook", "fails"); });
    EXPECT_THROW(y.sum().backward(), ValueError);
    loss_of(net, rank).backward();
    EXPECT_EQ(replica.pass().reductions(), 1);
    const auto all = all_gather_objects(world(), nlohmann::json(gradients_of(net).values));
    EXPECT_EQ(all[0], all[1]);
  });
}

// What came before it failed is no part of the order in which buckets are made anew.
TEST(Replicate, AFirstBackwardThatFailedHalfwayLeavesNoOrderBehind) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    Replica replica = replicate(net, mesh, small_buckets());
    HookHandle handle = register_hook(
        net.first.weight, [](const Tensor&) -> Tensor { TS_THROW(ValueError, "hook", "fails"); });
    EXPECT_THROW(loss_of(net, rank).backward(), ValueError);
    replica.pass().fail_backward();
    handle.remove();
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      loss_of(net, rank).backward();
    }
    EXPECT_EQ(replica.pass().reductions(), 3);
    EXPECT_EQ(replica.schedule().rebuilds(), 1);
    size_t members = 0;
    for (const auto& group : replica.schedule().buckets()) members += group->size();
    EXPECT_EQ(members, replica.pass().params().size());
    const auto all = all_gather_objects(world(), nlohmann::json(gradients_of(net).values));
    EXPECT_EQ(all[0], all[1]);
  });
}

TEST(Replicate, TheModelTrainsAloneAfterItsReplica) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net net;
    Mesh mesh(world());
    { const Replica replica = replicate(net, mesh, small_buckets()); }
    const auto before = gradient_collectives();
    loss_of(net, rank).backward();
    EXPECT_EQ(gradient_collectives(), before);
    const auto all = all_gather_objects(world(), nlohmann::json(gradients_of(net).values));
    EXPECT_NE(all[0], all[1]);
  });
}

TEST(Replicate, AReplicaThatGoesLeavesNothingOnTheParameters) {
  on_ranks(2, [](int rank) {
    Net net;
    Mesh mesh(world());
    const auto hooks = [&] {
      size_t count = 0;
      for (const Tensor& parameter : net.parameters()) {
        const AutogradSlot* slot = autograd_slot(parameter);
        if (slot->post_accumulate_hooks) count += slot->post_accumulate_hooks->size();
        count += slot->main_grad.defined();
      }
      return count;
    };
    int own = 0;
    HookHandle handle =
        register_post_accumulate_hook(net.parameters()[0], [&own](const Tensor&) { ++own; });
    for (int round = 0; round < 3; ++round) {
      {
        const Replica replica = replicate(net, mesh, small_buckets());
        EXPECT_GT(hooks(), net.parameters().size());
        loss_of(net, rank).backward();
        net.zero_grad();
      }
      EXPECT_EQ(hooks(), 1u) << "the user's own";
    }
    loss_of(net, rank).backward();
    EXPECT_EQ(own, 4);
    handle.remove();
    EXPECT_EQ(hooks(), 0u);
  });
}

TEST(Replicate, D9_AnyDifferenceBetweenTheModelsRaisesOnAllRanks) {
  const auto expect_refused = [](const std::string& expected, auto make_model,
                                 std::vector<ReplicateOptions> options = {}) {
    on_ranks(4, [&](int rank) {
      Mesh mesh(world());
      const auto model = make_model(rank);
      const std::string message = message_of([&] {
        replicate(*model, mesh, options.empty() ? ReplicateOptions() : options[rank == 2]);
      });
      EXPECT_NE(message.find("rank 2 differs"), std::string::npos) << message;
      EXPECT_NE(message.find(expected), std::string::npos) << message;
    });
  };
  const auto linear = [](int64_t in, bool bias = true) {
    return std::make_unique<nn::Linear>(in, 4, nn::LinearOptions{.bias = bias});
  };
  expect_refused("'weight' f32[4, 5]", [&](int rank) { return linear(rank == 2 ? 5 : 4); });
  expect_refused("1 parameters, rank 0 has 2", [&](int rank) { return linear(4, rank != 2); });
  expect_refused("'weight' bf16[4, 4]", [&](int rank) {
    auto model = linear(4);
    if (rank == 2) model->to(kBF16);
    return model;
  });
  expect_refused("requires grad", [&](int rank) {
    auto model = linear(4);
    if (rank == 2) model->bias.set_requires_grad(false);
    return model;
  });
  expect_refused("option bucket_bytes is 7", [&](int) { return linear(4); },
                 {{}, {.bucket_bytes = 7}});
  // And the ranks are able to do it right.
  on_ranks(2, [&](int rank) {
    Mesh mesh(world());
    EXPECT_THROW(replicate(*linear(4 + rank), mesh), DistributedError);
    Net net;
    const Replica replica = replicate(net, mesh);
    loss_of(net, rank).backward();
  });
}

TEST(Replicate, InitialValuesAreThoseOfRank0) {
  on_ranks(4, [](int rank) {
    manual_seed(static_cast<uint64_t>(100 + rank));
    Net net;
    Mesh mesh(world());
    const auto own = values_of(net);
    const Replica replica = replicate(net, mesh);
    const auto all = all_gather_objects(world(), nlohmann::json(values_of(net)));
    const auto before = all_gather_objects(world(), nlohmann::json(own));
    for (int other = 0; other < 4; ++other) {
      EXPECT_EQ(all[static_cast<size_t>(other)], before[0]);
    }
    EXPECT_NE(before[1], before[0]);
  });
}

TEST(Replicate, AWorldOfOneIssuesNothing) {
  on_ranks(1, [](int) {
    Net net;
    Mesh mesh(world());
    const Replica replica = replicate(net, mesh, small_buckets());
    const Gradients expected = accumulate_in_one_process(net, 0, 1, 1);
    net.zero_grad();
    loss_of(net, 0).backward();
    expect_same_bits(gradients_of(net), expected);
    EXPECT_EQ(gradient_collectives(), 0);
    EXPECT_EQ(replica.report().gradients.collectives, 0);
  });
}

TEST(Mesh, AxesAreGroupsOfTheRanksThatDifferOnlyThere) {
  on_ranks(8, [](int rank) {
    Mesh mesh(world(), {{"pp", 2}, {"dp", -1}, {"tp", 2}});
    EXPECT_EQ(mesh.describe(), "mesh(pp=2, dp=2, tp=2)");
    EXPECT_EQ(mesh.coordinate("pp"), rank / 4);
    EXPECT_EQ(mesh.coordinate("dp"), rank / 2 % 2);
    EXPECT_EQ(mesh.coordinate("tp"), rank % 2);
    for (const char* axis : {"pp", "dp", "tp"}) {
      EXPECT_EQ(mesh.group(axis).size(), 2);
      EXPECT_EQ(mesh.group(axis).rank(), mesh.coordinate(axis));
    }
    const Tensor x = ones({1}) * static_cast<double>(rank);
    mesh.group("dp").all_reduce(x).wait();
    EXPECT_EQ(x.item(), rank / 4 * 4 * 2 + rank % 2 * 2 + 2);
    EXPECT_THROW(mesh.size("cp"), ConfigError);
  });
}

TEST(Mesh, ImpossibleMeshesAreRefused) {
  on_ranks(2, [](int) {
    EXPECT_THROW(Mesh(world(), {{"dp", 3}}), ConfigError);
    EXPECT_THROW(Mesh(world(), {{"dp", -1}, {"tp", -1}}), ConfigError);
    EXPECT_THROW(Mesh(world(), {{"dp", -1}, {"tp", 3}}), ConfigError);
    EXPECT_THROW(Mesh(world(), {{"dp", 1}, {"dp", 2}}), ConfigError);
    EXPECT_THROW(Mesh(world(), {{"", 2}}), ConfigError);
    EXPECT_THROW(Mesh(world(), {}), ConfigError);
    EXPECT_THROW(Mesh(world(), {{"dp", 0}}), ConfigError);
  });
}

TEST(Replicate, RunsOverOneAxisOfAMesh) {
  // Two replicas of two model halves: gradients are averaged within the halves' axis only.
  on_ranks(4, [](int rank) {
    Mesh mesh(world(), {{"dp", 2}, {"tp", 2}});
    manual_seed(static_cast<uint64_t>(mesh.coordinate("tp")));
    Net net;
    const Replica replica = replicate(net, mesh, small_buckets());
    loss_of(net, rank).backward();
    const auto all = all_gather_objects(world(), nlohmann::json(gradients_of(net).values));
    EXPECT_EQ(all[0], all[2]);
    EXPECT_EQ(all[1], all[3]);
    EXPECT_NE(all[0], all[1]);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_replicate
