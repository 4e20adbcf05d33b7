// Several adapters side by side: each has the numbers and the files that it has alone.
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/random.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/optim/optimizers.h>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_lora_adapters {
namespace {

struct Poet : nn::Module<Poet> {
  Poet()
      : table(add<nn::Embedding>("table", 11, 6)),
        up(add<nn::Linear>("up", 6, 9)),
        down(add<nn::Linear>("down", 9, 6)) {}
  Tensor forward(const Tensor& tokens) { return down(gelu(up(table(tokens)))); }
  std::unique_ptr<Poet> remake() const { return std::make_unique<Poet>(); }
  nn::Embedding& table;
  nn::Linear& up;
  nn::Linear& down;
};

nn::LoraOptions plain_adapter() { return {.names = {"up"}, .rank = 2, .alpha = 4}; }
nn::LoraOptions wide_adapter(const std::string& name) {
  nn::LoraOptions options{.names = {"up", "down", "table"}, .rank = 3, .alpha = 3};
  options.adapter = name;
  return options;
}

std::vector<float> answer(Poet& model) {
  const NoGradGuard no_grad;
  return model(randint(0, 11, {3}, kI64, RandomStream{1, 1})).to_vector<float>();
}

void teach(Poet& model, uint64_t seed) {
  optim::SGD optimizer(nn::trainable_parameters(model), {.lr = 0.5});
  for (uint64_t step = 0; step < 3; ++step) {
    const Tensor tokens = randint(0, 11, {8}, kI64, RandomStream{seed, step});
    const Tensor out = model(tokens);
    (out * out + out * static_cast<double>(seed)).mean().backward();
    optimizer.step(), optimizer.zero_grad();
  }
}

std::unique_ptr<Poet> made_poet() {
  manual_seed(3);
  return std::make_unique<Poet>();
}

// "default" alone, "verse" alone, and both of one model.
TEST(LoraAdapters, LearnAndAnswerAsEachDoesAlone) {
  const auto first = made_poet(), second = made_poet(), both = made_poet();
  const std::vector<float> base = answer(*both);
  nn::add_lora(*first, plain_adapter());
  nn::add_lora(*second, wide_adapter("verse"));
  nn::add_lora(*both, plain_adapter());
  const nn::LoraSummary added = nn::add_lora(*both, wide_adapter("verse"));
  EXPECT_EQ(added.adapted, (std::vector<std::string>{"table", "up", "down"}));
  EXPECT_EQ(nn::lora_adapter_names(*both), (std::vector<std::string>{"default", "verse"}));
  EXPECT_EQ(nn::active_lora(*both), "default") << "a further one waits";
  EXPECT_EQ(answer(*both), base);
  teach(*first, 1);
  teach(*both, 1);
  EXPECT_EQ(answer(*both), answer(*first));
  teach(*second, 2);
  nn::set_lora(*both, "verse");
  EXPECT_EQ(answer(*both), base);
  EXPECT_EQ(nn::trainable_parameters(*both).size(), 6u);
  teach(*both, 2);
  EXPECT_EQ(answer(*both), answer(*second));
  nn::set_lora(*both, "default");
  EXPECT_EQ(answer(*both), answer(*first)) << "the other one has learnt beside it";
  EXPECT_EQ(nn::trainable_parameters(*both).size(), 2u);
  {
    const nn::LoraDisabled off(*both);
    EXPECT_EQ(answer(*both), base);
  }
  EXPECT_EQ(answer(*both), answer(*first));
}

TEST(LoraAdapters, HaveTheFilesThatEachHasAlone) {
  TestFolder folder;
  const auto alone = made_poet(), both = made_poet();
  nn::add_lora(*alone, wide_adapter("default"));
  nn::add_lora(*both, plain_adapter());
  nn::add_lora(*both, wide_adapter("verse"));
  teach(*alone, 2);
  nn::save_lora(*alone, folder.path("alone"));
  // What one program calls default another may call verse.
  nn::load_lora(*both, folder.path("alone"), {.adapter = "verse"});
  nn::load_lora(*both, folder.path("alone"), {.adapter = "prose"});
  EXPECT_EQ(nn::active_lora(*both), "default");
  for (const char* name : {"verse", "prose"}) {
    nn::set_lora(*both, name);
    EXPECT_EQ(answer(*both), answer(*alone)) << name;
    nn::save_lora(*both, folder.path(name));
    for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) {
      EXPECT_EQ(folder.read(std::string(name) + "/" + file),
                folder.read(std::string("alone/") + file))
          << name << " " << file;
    }
  }
  EXPECT_THROW(nn::load_lora(*both, folder.path("alone"), {.adapter = "default"}), ValueError);
}

TEST(LoraAdapters, AreMergedClonedAndTakenAwayByThemselves) {
  const auto model = made_poet();
  nn::add_lora(*model, plain_adapter());
  nn::add_lora(*model, wide_adapter("verse"));
  teach(*model, 1);
  const std::vector<float> first = answer(*model);
  nn::set_lora(*model, "verse");
  teach(*model, 2);
  const std::vector<float> second = answer(*model);
  const auto copy = model->clone();
  EXPECT_EQ(nn::active_lora(*copy), "verse");
  EXPECT_EQ(answer(*copy), second);
  nn::set_lora(*copy, "default");
  EXPECT_EQ(answer(*copy), first);
  EXPECT_EQ(answer(*model), second);

  EXPECT_THROW(nn::remove_lora(*model, "verse"), ValueError) << "active";
  nn::merge_lora(*model);
  const std::vector<float> merged = answer(*model);
  for (size_t i = 0; i < merged.size(); ++i) EXPECT_NEAR(merged[i], second[i], 1e-5);
  EXPECT_THROW(nn::set_lora(*model, "default"), ValueError);
  EXPECT_THROW(nn::add_lora(*model, wide_adapter("third")), ConfigError);
  nn::unmerge_lora(*model);
  EXPECT_EQ(answer(*model), second);
  nn::remove_lora(*model, "default");
  EXPECT_EQ(nn::lora_adapter_names(*model), std::vector<std::string>{"verse"});
  EXPECT_EQ(answer(*model), second);
  nn::add_lora(*model, plain_adapter());
  nn::set_lora(*model, "default");
  nn::remove_lora(*model, "verse");
  EXPECT_EQ(nn::lora_adapter_names(*model), std::vector<std::string>{"default"});
  nn::remove_lora(*model);
  EXPECT_TRUE(nn::lora_adapter_names(*model).empty());
  EXPECT_EQ(answer(*model), answer(*made_poet()));
}

// Linears that are adapters are no layers of the model.
TEST(LoraAdapters, AdaptTheModelAndNotEachOther) {
  const auto model = made_poet();
  nn::add_lora(*model, plain_adapter());
  nn::LoraOptions all{.names = {"all-linear"}};
  all.adapter = "all";
  EXPECT_EQ(nn::add_lora(*model, all).adapted, (std::vector<std::string>{"up", "down"}));
  for (const auto& [name, tensor] : model->named_parameters()) {
    EXPECT_EQ(name.find("lora_A.lora"), std::string::npos) << name;
  }
}

TEST(LoraAdapters, MistakesNameTheAdapter) {
  const auto model = made_poet();
  nn::add_lora(*model, plain_adapter());
  const auto said = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  said(message_of<ConfigError>([&] { nn::add_lora(*model, plain_adapter()); }),
       "the model has an adapter 'default'");
  for (const char* name : {"", "a.b", "two words"}) {
    said(message_of<ConfigError>([&] { nn::add_lora(*model, wide_adapter(name)); }),
         "letters, digits, - and _");
  }
  nn::LoraOptions more = wide_adapter("verse");
  more.bias = nn::LoraBias::kAll;
  said(message_of<UnsupportedError>([&] { nn::add_lora(*model, more); }),
       "'verse' stands beside another adapter");
  more = wide_adapter("verse");
  more.base_dtype = kBF16;
  EXPECT_THROW(nn::add_lora(*model, more), UnsupportedError);
  said(message_of<ValueError>([&] { nn::set_lora(*model, "verse"); }),
       "Poet has no adapter 'verse'; it has 'default'");
  EXPECT_THROW(nn::remove_lora(*model, "verse"), ValueError);
  EXPECT_EQ(nn::lora_adapter_names(*model).size(), 1u);
}

}  // namespace
}  // namespace tessera::test_lora_adapters
