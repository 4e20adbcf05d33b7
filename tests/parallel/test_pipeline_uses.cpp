// What a training in one process does beside its loop, a training by stages does as well: adapters,
// averages, groups, clipping, hooks, evaluations in between.
// ctest labels: threads
#include <tessera/accelerate/full_values.h>
#include <tessera/accelerate/state/model_io.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/quantize/quantize.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/schedule.h>
#include <tessera/precision/autocast.h>

#include "finished_process.h"
#include "message_of.h"
#include "optim/optimizer_kinds.h"
#include "parallel/pipeline_training.h"

namespace tessera::test_pipeline_uses {
namespace {

using namespace test_pipeline;
using precision::Fp8Scaling;

// One training in the hands of a script.
struct Session {
  Accelerator& accelerator;
  const Training& training;
  const Way& way;
  std::vector<double> told;
  int step_number = 0;
  std::optional<Pipeline> pipeline_ = {};

  // Of this composition.
  std::string title() const {
    return std::to_string(accelerator.num_processes()) + " " +
           std::to_string(static_cast<int>(way.sharding)) + " " + std::to_string(way.tp) + " " +
           std::to_string(way.stages_per_rank) + " " + std::to_string(static_cast<int>(way.dtype));
  }
  nn::ModuleBase& model() const { return *training.model; }
  Pipeline& pipeline() {
    if (!pipeline_) pipeline_.emplace(accelerator.pipeline(model(), way.options));
    return *pipeline_;
  }
  std::vector<Batch> window(int64_t micro_batches, int64_t length = 8) {
    const int64_t rank = accelerator.data_ranks().rank(), ranks = accelerator.data_ranks().size();
    // Of all ranks together as many as of one process.
    std::vector<Batch> batches;
    for (int64_t micro = 0; micro < micro_batches / ranks; ++micro) {
      const Batch whole = batch_of(step_number * 100 + micro * ranks + rank);
      batches.push_back({whole.inputs.narrow(1, 0, length).contiguous(),
                         whole.targets.narrow(1, 0, length).contiguous()});
    }
    ++step_number;
    return batches;
  }
  void tell(double value) { told.push_back(value); }
  void tell_loss(const Tensor& loss) {
    tell(accelerator.reduce(loss.to(kF64).reshape({1})).item());
  }
  Tensor step(int64_t micro_batches = 4, int64_t length = 8) {
    const Tensor loss = pipeline().step(window(micro_batches, length), training.loss);
    tell_loss(loss);
    return loss;
  }
  void evaluate(int64_t micro_batches = 4, int64_t length = 8) {
    double sum = 0;
    for (const Tensor& loss : pipeline().evaluate(window(micro_batches, length), training.loss)) {
      sum += loss.item();
    }
    tell(accelerator.reduce(tensor(std::vector{sum}, kF64)).item() *
         static_cast<double>(accelerator.data_ranks().size()));
  }
};
using Script = std::function<void(Session& session)>;

using Change = std::function<void(AcceleratorOptions& settings)>;

struct Outcome {
  std::vector<double> told;
  Values parameters;
};
Outcome play(const MakeTraining& make, const Way& way, const Script& script,
             const Change& change = {}) {
  set_num_threads(1);
  AcceleratorOptions settings = settings_of(way);
  if (change) change(settings);
  Accelerator accelerator(settings);
  accelerator.set_seed(3);
  const Training training = make();
  training.model->to(way.dtype);
  if (way.change) way.change(*training.model);
  Session session{accelerator, training, way, {}};
  script(session);
  Outcome outcome{std::move(session.told), {}};
  for (const auto& [name, tensor] : accelerator.get_state_dict(*training.model)) {
    outcome.parameters[name] = tensor.to_vector();
  }
  return outcome;
}

constexpr double kTolerance = 1e-11;  // f64
constexpr Sharding kShardings[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kFsdp};

// With which compositions, beside stages alone.
struct Compared {
  std::vector<Sharding> data = {std::begin(kShardings), std::end(kShardings)};
  bool layers = true;  // divided by tp
  bool turns = true;   // of two stages on a rank
  Change change = {};  // of the settings
};
// The bits of one process by stages alone, f64's tolerance with data-parallel ranks or divided layers.
void expect_as_alone(const MakeTraining& make, const Script& script,
                     const Compared& compared = {}) {
  const auto outcome_of_one = [&](DType dtype) {
    Outcome outcome;
    compared_ranks(1,
                   [&](int) { outcome = play(make, {.dtype = dtype}, script, compared.change); });
    return outcome;
  };
  const auto compare = [&](const char* title, int ranks, const Way& way, const Outcome& expected,
                           double tolerance) {
    compared_ranks(ranks, [&](int rank) {
      SCOPED_TRACE(std::string(title) + ", rank " + std::to_string(rank));
      const Outcome own = play(make, way, script, compared.change);
      ASSERT_EQ(own.told.size(), expected.told.size());
      for (size_t i = 0; i < own.told.size(); ++i) {
        EXPECT_NEAR(own.told[i], expected.told[i],
                    tolerance * std::max(1.0, std::abs(expected.told[i])))
            << i;
      }
      if (rank != 0) return;
      for (const auto& [name, values] : expected.parameters) {
        const std::vector<double>& got = own.parameters.at(name);
        ASSERT_EQ(got.size(), values.size()) << name;
        double largest = 1;
        for (const double value : values) largest = std::max(largest, std::abs(value));
        for (size_t i = 0; i < values.size(); ++i) {
          ASSERT_NEAR(got[i], values[i], tolerance * largest) << name << " " << i;
        }
      }
    });
  };
  const Outcome exactly = outcome_of_one(kF32);
  compare("stages", 2, {.pp = 2}, exactly, 0);
  if (compared.turns) compare("stages in turns", 2, {.pp = 2, .stages_per_rank = 2}, exactly, 0);
  if (compared.data.empty() && !compared.layers) return;
  const Outcome expected = outcome_of_one(kF64);
  for (const Sharding sharding : compared.data) {
    compare(sharding == Sharding::kDdp    ? "ddp"
            : sharding == Sharding::kFsdp ? "fsdp"
                                          : "zero1",
            4, {.pp = 2, .sharding = sharding, .dtype = kF64}, expected, kTolerance);
  }
  if (!compared.layers) return;
  compare("layers", 4, {.pp = 2, .tp = 2, .dtype = kF64}, expected, kTolerance);
}

Training dropping() { return gpt(false, 0.2); }

std::unique_ptr<optim::Optimizer> prepared(Session& s, const NamedTensors& parameters) {
  auto optimizer = adamw(parameters);
  s.accelerator.prepare(s.model(), optimizer);
  return optimizer;
}
std::unique_ptr<optim::Optimizer> prepared(Session& s) {
  return prepared(s, s.model().named_parameters());
}
void end_step(optim::Optimizer& optimizer) {
  optimizer.step();
  optimizer.zero_grad();
}
void train(Session& s, optim::Optimizer& optimizer, int steps = 3) {
  for (int i = 0; i < steps; ++i) {
    s.step();
    s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
    end_step(optimizer);
  }
}

// ---- What is trained ---------------------------------------------------------------------------

TEST(PipelineUses, AdaptersLearnBesideAFrozenBase) {
  expect_as_alone(
      untied,
      [](Session& s) {
        nn::add_lora(s.model(), {.names = {"c_attn", "c_proj", "c_fc"}, .rank = 4, .dropout = 0.1});
        const auto optimizer = prepared(s, nn::trainable_parameters(s.model()));
        train(s, *optimizer);
        const nn::LoraDisabled off(s.model());
        s.evaluate();
      },
      {.layers = false});
  expect_as_alone(untied,
                  [](Session& s) {
                    nn::add_lora(s.model(), {.names = {"c_attn", "c_proj", "c_fc", "wte"},
                                             .rank = 4,
                                             .bias = nn::LoraBias::kAll,
                                             .modules_to_save = {"lm_head"}});
                    const auto optimizer = prepared(s, nn::trainable_parameters(s.model()));
                    train(s, *optimizer, 2);
                  },
                  {.data = {Sharding::kFsdp}, .layers = false});
}

TEST(PipelineUses, AnotherAdapterTrainsInItsTurn) {
  expect_as_alone(untied,
                  [](Session& s) {
                    nn::add_lora(s.model(), {.names = {"c_attn"}, .rank = 4});
                    nn::add_lora(s.model(), {.adapter = "poems", .names = {"c_fc"}, .rank = 2});
                    train(s, *prepared(s, nn::trainable_parameters(s.model())), 2);
                    nn::set_lora(s.model(), "poems");
                    train(s, *prepared(s, nn::trainable_parameters(s.model())), 2);
                  },
                  {.data = {Sharding::kFsdp}, .layers = false});
}

TEST(PipelineUses, AdaptersAreSaved) {
  const TestFolder folder;
  expect_as_alone(untied,
                  [&](Session& s) {
                    nn::add_lora(s.model(), {.names = {"c_attn", "c_proj", "c_fc"}, .rank = 4});
                    train(s, *prepared(s, nn::trainable_parameters(s.model())));
                    const std::string at = folder.path(s.title());
                    s.accelerator.save_lora(s.model(), at);
                    s.accelerator.save_merged_lora(s.model(), at + " merged");
                    s.accelerator.wait_for_everyone();
                    const Training adapted = untied(), merged = untied();
                    adapted.model->to(s.way.dtype), merged.model->to(s.way.dtype);
                    nn::load_lora(*adapted.model, at);
                    s.tell(adapted.loss(batch_of(5)).item());
                    accelerate::load_model(*merged.model, at + " merged");
                    s.tell(merged.loss(batch_of(5)).item());
                  },
                  {.layers = false});
}

// Its second layer has no part in the loss.
struct WithUnused : nn::Module<WithUnused> {
  WithUnused()
      : gpt(add<Gpt>("gpt", nn::models::GptConfig{.vocab_size = kVocabulary,
                                                  .context = 16,
                                                  .width = 32,
                                                  .layers = 4,
                                                  .heads = 4,
                                                  .tied = false})),
        unused(add<nn::Linear>("unused", 8, 8)) {}
  Tensor forward(const Tensor& inputs, const Tensor& targets) { return gpt(inputs, targets).loss; }
  Gpt& gpt;
  nn::Linear& unused;
};

TEST(PipelineUses, ParametersWithoutAGradientStayAsTheyAre) {
  const auto make = [] {
    manual_seed(1);
    return training_of<WithUnused>(
        std::make_unique<WithUnused>(),
        [](WithUnused& model, const Batch& b) { return model(b.inputs, b.targets); });
  };
  expect_as_alone(make, [](Session& s) { train(s, *prepared(s)); }, {.layers = false});
}

TEST(PipelineUses, TwoModelsTrainInTurn) {
  expect_as_alone(untied, [](Session& s) {
    const Training other = llama();
    other.model->to(s.way.dtype);
    const auto first = adamw(s.model().named_parameters());
    const auto second = adamw(other.model->named_parameters());
    s.accelerator.prepare(s.model(), *other.model, first, second);
    Pipeline pipeline = s.accelerator.pipeline(*other.model);
    for (int i = 0; i < 2; ++i) {
      s.step();
      s.tell_loss(pipeline.step(s.window(4), other.loss));
      s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
      s.tell(s.accelerator.clip_grad_norm(other.model->parameters(), 0.25).item());
      end_step(*first), end_step(*second);
    }
  });
}

// ---- How it is trained -------------------------------------------------------------------------

TEST(PipelineUses, AveragesFollowTheParameters) {
  expect_as_alone(untied, [](Session& s) {
    const auto optimizer = adamw(s.model().named_parameters());
    optim::EMA average(s.model().named_parameters(), {.decay = 0.9});
    s.accelerator.prepare(s.model(), optimizer);
    for (int i = 0; i < 3; ++i) {
      s.step();
      end_step(*optimizer);
      average.update();
      const optim::EMA::Scope scope(average);
      s.evaluate();
    }
    average.copy_to_parameters();
  });
}

template <class T>
struct PipelineOptimizers : testing::Test {};
TYPED_TEST_SUITE(PipelineOptimizers, optim::OptimizerKinds);
TYPED_TEST(PipelineOptimizers, StepAsInOneProcess) {
  expect_as_alone(untied,
                  [](Session& s) {
                    typename TypeParam::Options options = optim::kOptions<TypeParam>.front();
                    options.lr /= 10;
                    // See adamw().
                    if constexpr (requires { options.eps; }) options.eps = 1e-3;
                    TypeParam optimizer(s.model().named_parameters(), options);
                    s.accelerator.prepare(s.model(), optimizer);
                    train(s, optimizer);
                  },
                  {.data = {Sharding::kFsdp}, .layers = false, .turns = false});
}

TEST(PipelineUses, TwoOptimizersShareAModel) {
  expect_as_alone(untied, [](Session& s) {
    const auto split = optim::split_for_muon(s.model().named_parameters(),
                                             {"transformer.wte", "transformer.wpe", "lm_head"});
    optim::Muon muon(split.matrices, {.lr = 1e-2});
    const auto others = adamw(split.others);
    s.accelerator.prepare(s.model(), muon, others);
    for (int i = 0; i < 3; ++i) {
      s.step();
      s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
      end_step(muon), end_step(*others);
    }
  });
}

TEST(PipelineUses, GroupsHaveRatesOfTheirOwn) {
  expect_as_alone(untied, [](Session& s) {
    NamedTensors plain, decayed;
    for (const NamedTensor& named : s.model().named_parameters()) {
      (named.tensor.dim() == 1 ? plain : decayed).push_back(named);
    }
    optim::AdamW optimizer(std::vector<optim::ParameterGroup<optim::AdamW::Options>>{
        {plain, {.lr = 1e-2, .eps = 1e-3, .weight_decay = 0}},
        {decayed, {.lr = 3e-3, .eps = 1e-3, .weight_decay = 0.1}}});
    optim::CosineSchedule schedule(optimizer, {.total = 10});
    s.accelerator.prepare(s.model(), optimizer, schedule);
    for (int i = 0; i < 3; ++i) {
      s.step();
      end_step(optimizer);
      schedule.step();
      s.tell(optimizer.lr(0)), s.tell(optimizer.lr(1));
    }
  });
}

TEST(PipelineUses, GradientsOfSomeParametersAreClipped) {
  expect_as_alone(untied, [](Session& s) {
    optim::SGD optimizer(s.model().named_parameters(), {.lr = 0.1, .momentum = 0.9});
    s.accelerator.prepare(s.model(), optimizer);
    const auto clip = [&](const std::string& prefix, double norm_type) {
      TensorList list;
      for (const auto& [name, tensor] : s.model().named_parameters()) {
        if (name.starts_with(prefix)) list.push_back(tensor);
      }
      s.tell(s.accelerator.clip_grad_norm(list, 0.05, norm_type).item());
    };
    for (int i = 0; i < 3; ++i) {
      s.step();
      clip("transformer.h.0", 2), clip("lm_head", 2);
      clip("transformer.w", 1), clip("transformer.h.3", HUGE_VAL);
      if (i == 1) s.accelerator.clip_grad_value(s.model().parameters(), 0.01);
      optimizer.step();
      optimizer.zero_grad(i != 1);  // once without setting to none
    }
  });
}

TEST(PipelineUses, TheSettingClipsWhatTheProgramDoesNot) {
  const Script script = [](Session& s) {
    const auto optimizer = prepared(s);
    for (int i = 0; i < 3; ++i) {
      s.step();
      if (i == 1) s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
      end_step(*optimizer);
    }
  };
  expect_as_alone(untied, script, {.change = [](AcceleratorOptions& settings) {
                    settings.gradient_clipping = 0.1;
                  }});
}

TEST(PipelineUses, GradientsAreClearedInFrontOfAStepToo) {
  expect_as_alone(untied, [](Session& s) {
    const auto optimizer = prepared(s);
    for (int i = 0; i < 3; ++i) {
      optimizer->zero_grad(i != 2);
      s.step();
      optimizer->step();
    }
  });
}

TEST(PipelineUses, TwoStepsOfThePipelineAreOneOfTheOptimizer) {
  expect_as_alone(untied, [](Session& s) {
    const auto optimizer = prepared(s);
    for (int i = 0; i < 2; ++i) {
      s.step();
      s.evaluate();
      s.step(8);
      s.evaluate();
      s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
      end_step(*optimizer);
    }
  });
}

// Its numbers of micro-batches too, by which masks are drawn. In one process, by the plain loop and by
// two stages.
TEST(PipelineUses, AStepThatFailsLeavesTheGradientsBeforeIt) {
  for (const bool staged : {false, true}) {
    const auto trained = [&](int fails_at) {
      Outcome outcome;
      compared_ranks(1, [&](int) {
        outcome = play(dropping, {.options = {.ties_apart = staged}}, [&](Session& s) {
          const auto optimizer = prepared(s);
          s.step();
          int calls = 0;
          const auto failing = [&](const Batch& batch) {
            if (calls++ == fails_at) throw ValueError("that was all");
            return s.training.loss(batch);
          };
          if (fails_at >= 0) {
            EXPECT_THROW(s.pipeline().step(s.window(4), failing), ValueError);
            --s.step_number;
          }
          for (int i = 0; i < 2; ++i) {
            s.step();
            s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
            end_step(*optimizer);
          }
        });
      });
      return outcome;
    };
    const Outcome expected = trained(-1);
    for (const int at : {0, 2}) {
      const Outcome own = trained(at);
      EXPECT_EQ(own.told, expected.told) << at << staged;
      EXPECT_TRUE(own.parameters == expected.parameters) << at << staged;
    }
  }
}

// All ranks find out together, behind their backwards.
TEST(PipelineUses, AStepThatIsRefusedLeavesTheGradientsBeforeIt) {
  for (const Sharding sharding : kShardings) {
    for (const int ranks : {2, 4}) {
      const auto trained = [&](bool fails) {
        Outcome outcome;
        compared_ranks(ranks, [&](int rank) {
          const Way way{.pp = 2, .sharding = sharding};
          const Outcome own = play(dropping, way, [&](Session& s) {
            const auto optimizer = prepared(s);
            s.step();
            if (fails) {
              const std::vector<Batch> window = s.window(8);
              std::vector<double> weights(window.size(), 1);
              if (s.pipeline().is_last_stage()) weights.back() = 2;
              EXPECT_THROW(s.pipeline().step(window, s.training.loss, {.weights = weights}),
                           ValueError);
              --s.step_number;
            }
            for (int i = 0; i < 2; ++i) {
              s.step();
              s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
              end_step(*optimizer);
            }
          });
          if (rank == 0) outcome = own;
        });
        return outcome;
      };
      const Outcome own = trained(true), expected = trained(false);
      EXPECT_EQ(own.told, expected.told) << ranks << static_cast<int>(sharding);
      EXPECT_TRUE(own.parameters == expected.parameters) << ranks << static_cast<int>(sharding);
    }
  }
}

TEST(PipelineUses, LengthsChangeFromStepToStep) {
  expect_as_alone(untied, [](Session& s) {
    const auto optimizer = prepared(s);
    for (int i = 0; i < 3; ++i) {
      s.step(4, 8 - 2 * i);
      s.evaluate(4, 2 + 2 * i);
      end_step(*optimizer);
    }
  });
}

TEST(PipelineUses, HooksOfModulesChangeValuesAndGradients) {
  expect_as_alone(untied, [](Session& s) {
    const auto scale = [&](const char* name, double inputs, double outputs, double gradients) {
      nn::ModuleBase& module = s.model().submodule(name);
      module.register_forward_pre_hook(
          [=](nn::ModuleBase&, nn::TensorRefs refs) { *refs[0] = *refs[0] * inputs; });
      module.register_forward_hook([=](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs refs) {
        *refs[0] = *refs[0] * outputs;
      });
      module.register_full_backward_hook([=](nn::ModuleBase&, nn::TensorRefs refs, nn::TensorRefs) {
        *refs[0] = *refs[0] * gradients;
      });
    };
    // Before and behind those of the cut, which is the third block.
    for (const char* name : {"transformer.h.1", "transformer.h.2"}) scale(name, 1.25, 0.75, 1.5);
    const auto optimizer = prepared(s);
    for (const char* name : {"transformer.h.2", "transformer.h.3"}) scale(name, 1.125, 0.875, 0.75);
    train(s, *optimizer);
  });
}

TEST(PipelineUses, LossesReadParametersOfTheLastStageAndNumbers) {
  expect_as_alone(untied,
                  [](Session& s) {
                    const auto optimizer = prepared(s);
                    Gpt& model = static_cast<Gpt&>(s.model());
                    for (int i = 0; i < 3; ++i) {
                      s.tell_loss(s.pipeline().step(s.window(4), [&](const Batch& b) {
                        const Tensor loss = model(b.inputs, b.targets).loss;
                        return loss + model.lm_head.weight.square().mean() * rand({}).item();
                      }));
                      end_step(*optimizer);
                      s.tell(rand({}).item());
                    }
                  },
                  {.data = {}, .layers = false});
}

// ---- fp8 ---------------------------------------------------------------------------------------

Change in_fp8(Fp8Scaling recipe, bool recomputes = false) {
  return [=](AcceleratorOptions& settings) {
    settings.mixed_precision = Precision::kFP8;
    settings.fp8.recipe = recipe;
    settings.fp8.filter = precision::Fp8Filter::kAll;
    settings.fsdp.activation_checkpointing = recomputes;
  };
}
constexpr Fp8Scaling kRecipes[] = {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed,
                                   Fp8Scaling::kRowwise, Fp8Scaling::kBlockwise};
// Also tells the scales that persist, which all ranks have of all layers.
void train_in_fp8(Session& s, int64_t micro_batches) {
  const auto optimizer = prepared(s);
  const auto told = [&] {
    for (const auto& [name, tensor] : precision::fp8_of(s.model())->state_dict()) {
      for (const double value : tensor.to_vector()) s.tell(value);
    }
  };
  for (int step = 0; step < 3; ++step) {
    s.step(micro_batches);
    s.evaluate();
    s.tell(s.accelerator.clip_grad_norm(s.model().parameters(), 0.5).item());
    end_step(*optimizer);
    told();
  }
}

TEST(PipelineUses, Fp8HasTheBitsOfOneProcess) {
  for (const Fp8Scaling recipe : kRecipes) {
    SCOPED_TRACE(name_of(recipe));
    for (const bool recomputes : {false, true}) {
      expect_as_alone(untied, [](Session& s) { train_in_fp8(s, 4); },
                      {.data = {}, .layers = false, .change = in_fp8(recipe, recomputes)});
    }
  }
}

// With one micro-batch of each rank a step sums have two summands, in whichever order.
TEST(PipelineUses, Fp8BesideDataParallelRanksHasTheBitsOfTheseAlone) {
  const auto training = [](Session& s) { train_in_fp8(s, 2); };
  for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    for (const Sharding sharding : kShardings) {
      SCOPED_TRACE(std::string(name_of(recipe)) + " " + std::to_string(static_cast<int>(sharding)));
      Outcome expected;
      compared_ranks(2, [&](int rank) {
        const Outcome own = play(untied, {.sharding = sharding}, training, in_fp8(recipe));
        if (rank == 0) expected = own;
      });
      compared_ranks(4, [&](int rank) {
        const Outcome own = play(untied, {.pp = 2, .sharding = sharding}, training, in_fp8(recipe));
        EXPECT_EQ(own.told, expected.told) << rank;
        EXPECT_TRUE(rank != 0 || own.parameters == expected.parameters);
      });
    }
  }
}

TEST(PipelineUses, Fp8CountsTheCallsOfAStagesOwnLayers) {
  compared_ranks(2, [&](int rank) {
    play(
        untied, {.pp = 2},
        [&](Session& s) {
          const auto optimizer = prepared(s);
          s.step(3);
          for (const auto& layer : precision::fp8_of(s.model())->report().layers) {
            const bool of_last = layer.name.starts_with("transformer.h.2") ||
                                 layer.name.starts_with("transformer.h.3");
            const bool runs = layer.name != "lm_head" && of_last == (rank == 1);
            EXPECT_EQ(layer.fp8_calls, runs ? 3 : 0) << layer.name << " of rank " << rank;
          }
        },
        in_fp8(Fp8Scaling::kDelayed));
  });
}

TEST(PipelineUses, ScalesOfFp8GoOnFromACheckpoint) {
  const TestFolder folder;
  expect_as_alone(untied,
                  [&](Session& s) {
                    const auto optimizer = prepared(s);
                    train(s, *optimizer, 2);
                    s.accelerator.save_state(folder.path(s.title()));
                    train(s, *optimizer, 1);
                    s.accelerator.load_state(folder.path(s.title()));
                    --s.step_number;
                    train(s, *optimizer, 1);
                  },
                  {.data = {}, .layers = false, .change = in_fp8(Fp8Scaling::kDelayed)});
}

// A layer behind the cut reads what passes it from a variable outside, which is meta there.
struct Rejoined : nn::Module<Rejoined> {
  Rejoined()
      : embed(add<nn::Embedding>("embed", kVocabulary, 64)),
        first(add<nn::Linear>("first", 64, 64)),
        second(add<nn::Linear>("second", 64, 64)),
        beside(add<nn::Linear>("beside", 64, 64)),
        head(add<nn::Linear>("head", 64, kVocabulary)) {}
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    const Tensor e = embed(tokens).view({tokens.numel(), 64});
    const Tensor x = e + first(e);  // f32, which layers cast
    const Tensor y = gelu(second(x));
    return cross_entropy(head(y + beside(x)), targets.reshape({targets.numel()}));
  }
  nn::Embedding& embed;
  nn::Linear &first, &second, &beside, &head;
};
Training rejoined() {
  manual_seed(1);
  return training_of<Rejoined>(std::make_unique<Rejoined>(), [](Rejoined& model, const Batch& b) {
    return model(b.inputs, b.targets);
  });
}
Change cut_at_second(const Change& change) {
  return [=](AcceleratorOptions& settings) {
    change(settings);
    if (settings.pp.size == 2) settings.pp.cuts = std::vector<std::string>{"second"};
  };
}

TEST(PipelineUses, LayersInFp8ReadWhatPassesACutBesideIt) {
  for (const Fp8Scaling recipe : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    expect_as_alone(
        rejoined,
        [](Session& s) {
          train_in_fp8(s, 4);
          for (const auto& layer : precision::fp8_of(s.model())->report().layers) {
            const bool own = (layer.name == "first") == !s.pipeline().is_last_stage();
            if (s.accelerator.num_processes() == 1 || layer.name == "head") continue;
            // Of a step four micro-batches, and as many of an evaluation.
            EXPECT_EQ(layer.fp8_calls, own ? 24 : 0) << layer.name;
          }
        },
        {.data = {}, .layers = false, .turns = false, .change = cut_at_second(in_fp8(recipe))});
  }
}

TEST(PipelineUses, QuantizedLayersReadWhatPassesACutBesideIt) {
  expect_as_alone(rejoined,
                  [](Session& s) {
                    s.model().requires_grad_(false);
                    nn::quantize(s.model(), {.format = nn::QuantizeFormat::kNf4});
                    nn::add_lora(s.model(), {.names = {"first", "second", "beside"}, .rank = 4});
                    train(s, *prepared(s, nn::trainable_parameters(s.model())));
                  },
                  {.data = {},
                   .layers = false,
                   .turns = false,
                   .change = cut_at_second([](AcceleratorOptions& settings) {
                     settings.mixed_precision = Precision::kBF16;
                   })});
}

// ---- Random numbers ----------------------------------------------------------------------------

TEST(PipelineUses, EvaluationsDrawTheNumbersOfOneProcess) {
  expect_as_alone(dropping,
                  [](Session& s) {
                    const auto optimizer = prepared(s);
                    for (int i = 0; i < 3; ++i) {
                      s.evaluate();
                      s.step();
                      s.evaluate();
                      s.model().eval();
                      s.evaluate();
                      s.model().train();
                      end_step(*optimizer);
                      s.tell(rand({}).item());
                    }
                  },
                  {.data = {}, .layers = false});
}

TEST(PipelineUses, RanksWithOneBatchHaveTheSameSeedIfItIsEachDevices) {
  expect_as_alone(dropping,
                  [](Session& s) {
                    s.accelerator.set_seed(7, true);
                    const auto optimizer = prepared(s);
                    s.tell(rand({}).item());
                    train(s, *optimizer, 2);
                  },
                  {.data = {}});
}

// ---- State -------------------------------------------------------------------------------------

TEST(PipelineUses, WholeValuesAreReadAndWritten) {
  expect_as_alone(untied, [](Session& s) {
    const auto optimizer = prepared(s);
    const accelerate::FullValues values = s.accelerator.full_values(s.model());
    for (int i = 0; i < 3; ++i) {
      s.step();
      for (const char* name : {"transformer.h.0.attn.c_attn.weight", "lm_head.weight"}) {
        s.tell(values.gradient(name).square().sum().item());
        s.tell(values.parameter(name).square().sum().item());
        if (i == 1) values.set_gradient(name, values.gradient(name) * 0.5);
        if (i == 1) values.set_parameter(name, values.parameter(name) * 0.5);
        if (i > 0) s.tell(values.state(name, "exp_avg").square().sum().item());
      }
      end_step(*optimizer);
    }
  });
}

TEST(PipelineUses, AModelIsSavedAndLoadedBetweenSteps) {
  const TestFolder folder;
  expect_as_alone(untied, [&](Session& s) {
    const auto optimizer = prepared(s);
    train(s, *optimizer, 1);
    s.accelerator.save_model(s.model(), folder.path(s.title()));
    train(s, *optimizer, 1);
    s.accelerator.load_model(s.model(), folder.path(s.title()));
    s.evaluate();
    train(s, *optimizer, 2);
  });
}

TEST(PipelineUses, BuffersReachAllRanksWhereverCallsChangeThem) {
  const Script in_a_part = [](Session& s) {
    const auto optimizer = prepared(s);
    train(s, *optimizer, 1);
    s.model().eval();
    s.model().submodule("blocks.3").train();
    train(s, *optimizer, 2);
  };
  const Script in_evaluations = [](Session& s) {
    train(s, *prepared(s), 1);
    s.evaluate();
  };
  for (const Script& script : {in_a_part, in_evaluations}) {
    expect_as_alone(normed, script, {.data = {}, .layers = false});
  }
}

// Each data-parallel rank goes on from what it would have without stages: rank 0's, and its own last
// batch.
TEST(PipelineUses, BuffersFollowRankZerosAsWithoutStages) {
  const auto losses_of = [](int pp, Sharding sharding, bool follows) {
    std::vector<double> losses(2);
    compared_ranks(2 * pp, [&](int rank) {
      AcceleratorOptions settings = settings_of({.pp = pp, .sharding = sharding});
      settings.ddp.broadcast_buffers = follows;
      Accelerator accelerator(settings);
      const Training training = normed();
      training.model->to(kF64);
      accelerator.prepare(*training.model);
      Pipeline pipeline = accelerator.pipeline(*training.model);
      const int64_t place = accelerator.data_ranks().rank();
      for (int64_t step = 0; step < 2; ++step) {
        pipeline.step(std::vector{batch_of(10 * step + place), batch_of(10 * step + 5 + place)},
                      training.loss);
      }
      training.model->eval();
      const double loss = pipeline.evaluate(std::vector{batch_of(3)}, training.loss)[0].item();
      if (rank < 2) losses[static_cast<size_t>(rank)] = loss;
    });
    return losses;
  };
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kFsdp}) {
    for (const bool follows : {true, false}) {
      const std::vector<double> own = losses_of(2, sharding, follows);
      const std::vector<double> expected = losses_of(1, sharding, follows);
      EXPECT_NE(expected[0], expected[1]);
      for (size_t rank = 0; rank < 2; ++rank) {
        EXPECT_NEAR(own[rank], expected[rank], kTolerance * expected[rank]) << rank << follows;
      }
    }
  }
}

// ---- What is refused ---------------------------------------------------------------------------

template <class E>
std::string refusal(int pp, const std::function<void(Accelerator&, Training&, int rank)>& body) {
  return message_of<E>([&] {
    distributed::failing_ranks("the call is refused", pp, [&](int rank) {
      Accelerator accelerator(settings_of({.pp = pp, .micro_batches = 2}));
      Training training = untied();
      body(accelerator, training, rank);
    });
  });
}

struct Examples : data::Dataset<std::array<Tensor, 2>> {
  int64_t size() const override { return 16; }
  std::array<Tensor, 2> get(int64_t index) const override {
    const Batch batch = batch_of(index / 2);
    return {batch.inputs.select(0, index % 2), batch.targets.select(0, index % 2)};
  }
};

TEST(PipelineUses, RanksOfAPipelineShuffleAlikeWhateverTheirSeeds) {
  const Examples examples;
  std::array<std::vector<double>, 2> read;
  compared_ranks(2, [&](int rank) {
    Accelerator accelerator(settings_of({.pp = 2}));
    manual_seed(40 + static_cast<uint64_t>(rank));
    data::DataLoader loader(examples, {.batch_size = 2, .shuffle = true});
    accelerator.prepare(loader);
    for (const auto& batch : loader) {
      for (const double token : batch[0].to_vector()) {
        read[static_cast<size_t>(rank)].push_back(token);
      }
    }
  });
  EXPECT_EQ(read[0], read[1]);
}

TEST(PipelineUses, RanksOfAPipelineThatReadDifferentBatchesAreRefused) {
  const Examples examples;
  const auto ahead = [&](Accelerator& accelerator, Training& training, int rank) {
    data::DataLoader loader(examples, {.batch_size = 2});
    accelerator.prepare(*training.model, loader);
    if (rank == 1) accelerator.skip_first_batches(loader, 1);
    Pipeline pipeline = accelerator.pipeline(*training.model);
    for (auto& window : pipeline.windows(loader)) {
      pipeline.step(window, [&](const std::array<Tensor, 2>& batch) {
        return training.loss({batch[0], batch[1]});
      });
    }
  };
  const std::string place = refusal<ValueError>(2, ahead);
  EXPECT_TRUE(mentions(place, "have read different micro-batches: rank 0 has position")) << place;
  const std::string weights =
      refusal<ValueError>(2, [](Accelerator& accelerator, Training& training, int rank) {
        Pipeline pipeline = accelerator.pipeline(*training.model);
        pipeline.step(std::vector{batch_of(0), batch_of(1)}, training.loss,
                      {.weights = {1, 1.0 + rank}});
      });
  EXPECT_TRUE(mentions(weights, "rank 0 has the weight 1, rank 1 has the weight 2")) << weights;
  const std::string layers = message_of<ValueError>([] {
    distributed::failing_ranks("the call is refused", 4, [](int rank) {
      Accelerator accelerator(settings_of({.pp = 2, .micro_batches = 2, .tp = 2}));
      const Training training = untied();
      Pipeline pipeline = accelerator.pipeline(*training.model);
      pipeline.step(std::vector{batch_of(0), batch_of(1)}, training.loss,
                    {.weights = {1, 1.0 + rank % 2}});
    });
  });
  EXPECT_TRUE(mentions(layers, "ranks that calculate one micro-batch together")) << layers;
}

TEST(PipelineUses, ALossWithoutAGradientIsRefusedOnOneRankAndOnStages) {
  for (const int pp : {1, 2}) {
    const std::string frozen =
        refusal<AutogradError>(pp, [](Accelerator& accelerator, Training& training, int) {
          Pipeline pipeline = accelerator.pipeline(*training.model);
          training.model->requires_grad_(false);
          pipeline.step(std::vector{batch_of(0), batch_of(1)}, training.loss);
        });
    EXPECT_TRUE(mentions(frozen, pp == 1 ? "does not require grad" : "no parameter of Gpt"))
        << frozen;
    const std::string cut =
        refusal<AutogradError>(pp, [](Accelerator& accelerator, Training& training, int) {
          Pipeline pipeline = accelerator.pipeline(*training.model);
          pipeline.step(std::vector{batch_of(0), batch_of(1)},
                        [&](const Batch& batch) { return training.loss(batch).detach(); });
        });
    EXPECT_TRUE(mentions(cut, "does not require grad")) << cut;
  }
}

}  // namespace
}  // namespace tessera::test_pipeline_uses
