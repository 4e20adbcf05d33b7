// Modules that stay whole beside sharded ones, by a setting.
// ctest labels: threads
#include <tessera/core/error.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"

namespace tessera::test_accelerator_units {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using distributed::is_dtensor;

struct Ignoring {
  Sharding sharding = Sharding::kFsdp;
  std::string pattern = {};
  std::vector<std::string> frozen = {};  // submodules
  bool first_rank = false;
};

Values train_ignoring(int ranks, const Ignoring& asked) {
  Values values;
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    const nn::ParameterDefaultsGuard guard(
        {.device = asked.first_rank && rank != 0 ? kMeta : kCpu});
    Words model;
    for (const std::string& name : asked.frozen) model.submodule(name).requires_grad_(false);
    AcceleratorOptions options{.seed = 5, .sharding = asked.sharding, .config_file = ""};
    if (!asked.pattern.empty()) options.fsdp.ignored_modules = asked.pattern;
    if (asked.first_rank) options.fsdp.cpu_ram_efficient_loading = true;
    Accelerator accelerator(options);
    NamedTensors learned = model.named_parameters();
    std::erase_if(learned, [](const NamedTensor& one) { return !one.tensor.requires_grad(); });
    optim::AdamW optimizer(learned, {.lr = 1e-2});
    data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
    accelerator.prepare(model, optimizer, loader);
    for (const std::string& name : asked.frozen) {
      if (asked.pattern.empty()) continue;
      for (const auto& [parameter, tensor] : model.submodule(name).named_parameters()) {
        EXPECT_FALSE(is_dtensor(tensor)) << name << "." << parameter;
      }
    }
    EXPECT_TRUE(ranks == 1 || is_dtensor(model.submodule("blocks.0").get_parameter("down.weight")));
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(
          cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step(), optimizer.zero_grad();
    }
    const Values own = whole_values(model);
    if (rank == 0) values = own;
  });
  return values;
}

TEST(DistributedType, IsTheModeOfSeveralRanks) {
  for (const auto& [sharding, name] :
       {std::pair{Sharding::kDdp, "ddp"}, {Sharding::kZero2, "zero2"}, {Sharding::kFsdp, "fsdp"}}) {
    for (const int ranks : {1, 2}) {
      compared_ranks(ranks, [&](int) {
        const Accelerator accelerator({.sharding = sharding, .config_file = ""});
        EXPECT_EQ(accelerator.distributed_type(), ranks == 1 ? "no" : name);
      });
    }
  }
}

TEST(UnitClasses, FS_1_OneThatTheModelHasNotIsNamed) {
  for (const Sharding sharding : {Sharding::kFsdp, Sharding::kZero3}) {
    compared_ranks(2, [&](int) {
      Words model;
      Accelerator accelerator(
          {.sharding = sharding, .fsdp = {.wrap_modules = {{"Blok"}}}, .config_file = ""});
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model); });
      EXPECT_NE(message.find("fsdp_wrap_modules names the class Blok, of which Words has no "
                             "module; it has Block, "),
                std::string::npos)
          << message;
    });
  }
}

// A part of a unit, a unit by itself, and both at once by one pattern.
// fsdp keeps the root's parameters for backward, zero3 gathers them again, and without
// reshard_after_forward all stay.
TEST(Units, AreGatheredAgainForBackwardAsModeAndSettingSay) {
  const auto gathered = [](const distributed::CommTrace::Scope& scope) {
    std::vector<std::string> units;
    for (const distributed::CommRecord& record : scope.records()) {
      const bool gathers = record.channel == distributed::Channel::kParameter &&
                           record.operation == distributed::Operation::kAllGather;
      if (gathers) units.push_back(record.tag);
    }
    std::ranges::sort(units);
    return units;
  };
  for (const Sharding sharding : {Sharding::kFsdp, Sharding::kZero3}) {
    for (const bool reshards : {true, false}) {
      SCOPED_TRACE(testing::Message() << (sharding == Sharding::kFsdp) << reshards);
      compared_ranks(2, [&](int) {
        Words model;
        Accelerator accelerator(
            {.sharding = sharding, .fsdp = {.reshard_after_forward = reshards}, .config_file = ""});
        accelerator.prepare(model);
        const Tokens tokens(2);
        const auto [inputs, targets] = tokens.get(0);
        const auto micro = accelerator.accumulate(model);
        std::optional<distributed::CommTrace::Scope> scope(*distributed::rank_context().trace);
        const Tensor loss = cross_entropy(model(inputs), targets);
        std::vector<std::string> expected = gathered(*scope);
        EXPECT_EQ(expected.size(), 4U) << "three blocks and the root";
        scope.emplace(*distributed::rank_context().trace);
        accelerator.backward(loss);
        if (!reshards) expected.clear();
        if (reshards && sharding == Sharding::kFsdp) std::erase(expected, "the root unit");
        EXPECT_EQ(gathered(*scope), expected);
      });
    }
  }
}

TEST(IgnoredModules, StayWholeAndTheRestTrainsAsEver) {
  struct Case {
    const char* pattern;
    std::vector<std::string> frozen;
  };
  for (const auto& [pattern, frozen] :
       {Case{"blocks\\.1\\.up", {"blocks.1.up"}}, Case{"blocks\\.1", {"blocks.1"}},
        Case{"blocks\\.[12]\\.norm|norm", {"blocks.1.norm", "blocks.2.norm", "norm"}},
        Case{"blocks\\.2(\\..*)?", {"blocks.2"}}}) {
    for (const int ranks : {2, 3}) {
      for (const Sharding sharding : {Sharding::kFsdp, Sharding::kZero3}) {
        SCOPED_TRACE(std::string(pattern) + " on " + std::to_string(ranks));
        const Values expected = train_ignoring(ranks, {.sharding = sharding, .frozen = frozen});
        EXPECT_TRUE(
            train_ignoring(ranks, {.sharding = sharding, .pattern = pattern, .frozen = frozen}) ==
            expected);
        EXPECT_TRUE(train_ignoring(ranks, {.sharding = sharding,
                                           .pattern = pattern,
                                           .frozen = frozen,
                                           .first_rank = true}) == expected);
      }
    }
  }
}

TEST(IgnoredModules, ThatTrainOrAreNotThereAreErrorsOnEveryRank) {
  const auto said = [](const std::string& pattern) {
    std::string text;
    compared_ranks(2, [&](int rank) {
      Words model;
      Accelerator accelerator(
          {.sharding = Sharding::kFsdp, .fsdp = {.ignored_modules = pattern}, .config_file = ""});
      const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model); });
      if (rank == 0) text = message;
    });
    return text;
  };
  const std::string trained = said("blocks\\.1");
  EXPECT_NE(trained.find("leaves 'blocks.1.norm.weight' whole"), std::string::npos) << trained;
  EXPECT_NE(trained.find("freeze it"), std::string::npos) << trained;
  const std::string absent = said("block");  // the whole name has to match
  EXPECT_NE(absent.find("matches the whole name of no module of Words"), std::string::npos)
      << absent;
  const std::string wrong = said("blocks(");
  EXPECT_NE(wrong.find("is no regular expression"), std::string::npos) << wrong;
  const std::string replicas = message_of<ConfigError>(
      [] { Accelerator accelerator({.fsdp = {.ignored_modules = "norm"}, .config_file = ""}); });
  EXPECT_NE(replicas.find("it is that of fsdp and zero3 alone"), std::string::npos) << replicas;
}

}  // namespace
}  // namespace tessera::test_accelerator_units
