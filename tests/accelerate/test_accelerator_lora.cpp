// Adapters under the Accelerator: in every mode the bits of replicas, with a frozen base in 16
// bits, and files that PEFT reads out of models that lie in parts.
// ctest labels: threads
#include <filesystem>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/nn/lora/lora.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"

namespace tessera::test_accelerator_lora {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

constexpr Sharding kLoraModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                   Sharding::kZero3, Sharding::kFsdp};

nn::LoraOptions adapters(bool low = true) {
  nn::LoraOptions options{.names = {"up", "down", "embedding"}, .rank = 3, .alpha = 6};
  options.dropout = 0;
  options.bias = nn::LoraBias::kLoraOnly;
  if (low) options.base_dtype = kBF16;
  return options;
}

struct LoraRun {
  LoraRun(Sharding sharding, bool low = true, bool checkpointing = false)
      : accelerator({.mixed_precision = low ? Precision::kBF16 : Precision::kNo,
                     .seed = 5,
                     .sharding = sharding,
                     .fsdp = {.activation_checkpointing = checkpointing},
                     .config_file = ""}) {
    nn::add_lora(model, adapters(low));
    optimizer.emplace(nn::trainable_parameters(model), optim::AdamW::Options{.lr = 1e-2});
    accelerator.prepare(model, *optimizer, loader);
  }
  void train() {
    for (const auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(
          cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer->step(), optimizer->zero_grad();
    }
  }
  Accelerator accelerator;
  Words model;
  std::optional<optim::AdamW> optimizer;
  data::DataLoader<std::array<Tensor, 2>> loader{std::make_shared<Tokens>(24), {.batch_size = 2}};
};

Values floats_of(const nn::ModuleBase& model) {
  const NoGradGuard no_grad;
  Values values;
  for (const auto& [name, tensor] : model.named_parameters()) {
    const Tensor whole =
        distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor;
    values.push_back(whole.to(kF32).to_vector<float>());
  }
  return values;
}

Values lora_values(int ranks, Sharding sharding, bool low, bool checkpointing = false) {
  Values values;
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    LoraRun run(sharding, low, checkpointing);
    const Values before = floats_of(run.model);
    run.train();
    const Values own = floats_of(run.model);
    const NamedTensors names = run.model.named_parameters();
    for (size_t i = 0; i < names.size(); ++i) {
      const bool learns = names[i].tensor.requires_grad();
      EXPECT_EQ(own[i] != before[i], learns) << names[i].name;
      EXPECT_EQ(names[i].tensor.dtype(), learns || !low ? kF32 : kBF16) << names[i].name;
    }
    if (rank == 0) values = own;
  });
  return values;
}

TEST(AcceleratorLora, TrainsInEveryModeWithTheBitsOfReplicas) {
  for (const bool low : {false, true}) {
    for (const int ranks : {2, 3}) {
      const Values expected = lora_values(ranks, Sharding::kDdp, low);
      for (const Sharding sharding : kLoraModes) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(sharding) << " on " << ranks
                                        << (low ? " base in bf16" : ""));
        EXPECT_TRUE(lora_values(ranks, sharding, low) == expected);
        EXPECT_TRUE(lora_values(ranks, sharding, low, true) == expected) << "recomputed";
      }
    }
  }
}

std::string lora_folder(const std::string& name) {
  const std::string folder = testing::TempDir() + "accelerator_lora_" + name;
  std::filesystem::remove_all(folder);
  return folder;
}
std::string bytes_of_file(const std::string& path) {
  const MappedFile file(path);
  return std::string(file.text());
}

TEST(AcceleratorLora, IsSavedAsPeftsFilesOutOfParts) {
  const std::string expected = lora_folder("plain");
  for (const Sharding sharding : kLoraModes) {
    const std::string folder = lora_folder("parts");
    compared_ranks(3, [&](int rank) {
      manual_seed(5);
      LoraRun run(sharding);
      run.train();
      if (sharding == Sharding::kDdp) {
        if (rank == 0) nn::save_lora(run.model, expected);
        run.accelerator.wait_for_everyone();
      }
      run.accelerator.save_lora(run.model, folder);
    });
    for (const char* file : {"/adapter_model.safetensors", "/adapter_config.json"}) {
      EXPECT_TRUE(bytes_of_file(folder + file) == bytes_of_file(expected + file))
          << file << " of " << static_cast<int>(sharding);
    }
  }
  // They go into a base that is prepared afterwards, of any mode.
  manual_seed(5);
  Words plain;
  nn::load_lora(plain, expected, {.base_dtype = kBF16});
  const Values values = floats_of(plain);
  compared_ranks(2, [&](int) {
    manual_seed(5);
    Words model;
    nn::load_lora(model, expected, {.trainable = true, .base_dtype = kBF16});
    Accelerator accelerator(
        {.mixed_precision = Precision::kBF16, .sharding = Sharding::kFsdp, .config_file = ""});
    accelerator.prepare(model);
    EXPECT_TRUE(floats_of(model) == values);
    const std::string message = message_of<ConfigError>([&] { nn::load_lora(model, expected); });
    EXPECT_NE(message.find("load adapters before the model is sharded"), std::string::npos)
        << message;
  });
}

TEST(AcceleratorLora, MergedWeightsAreWrittenOutOfParts) {
  const std::string expected = lora_folder("merged");
  for (const Sharding sharding : kLoraModes) {
    const std::string folder = lora_folder("merged_parts");
    compared_ranks(3, [&](int rank) {
      manual_seed(5);
      LoraRun run(sharding);
      run.train();
      const Values before = floats_of(run.model);
      run.accelerator.save_merged_lora(run.model, folder, {.max_shard_size = "2KB"});
      EXPECT_TRUE(floats_of(run.model) == before);
      if (sharding != Sharding::kDdp) {
        const std::string message = message_of<ValueError>([&] { nn::merge_lora(run.model); });
        EXPECT_NE(message.find("Accelerator::save_merged_lora"), std::string::npos) << message;
      } else if (rank == 0) {
        nn::merge_lora(run.model);
        nn::remove_lora(run.model);
        save_weights(run.model.state_dict(), expected, {.max_shard_size = "2KB"});
      }
    });
    Words plain, merged;
    EXPECT_TRUE(load_model(plain, expected).complete());
    EXPECT_TRUE(load_model(merged, folder).complete());
    EXPECT_TRUE(floats_of(plain) == floats_of(merged)) << static_cast<int>(sharding);
  }
}

// The one that is active is trained and saved, the other one lies beside it in parts.
TEST(AcceleratorLora, OneOfSeveralAdaptersIsTrained) {
  const std::string alone = lora_folder("alone");
  for (const Sharding sharding : kLoraModes) {
    for (const bool both : {false, true}) {
      const std::string folder = both ? lora_folder("beside") : alone;
      compared_ranks(2, [&](int) {
        manual_seed(5);
        Words model;
        if (both) nn::add_lora(model, {.adapter = "other", .names = {"up"}, .rank = 2});
        nn::add_lora(model, {.names = {"down", "up"}, .rank = 3});
        if (both) nn::set_lora(model, "default");
        Accelerator accelerator({.seed = 5, .sharding = sharding, .config_file = ""});
        optim::AdamW optimizer(nn::trainable_parameters(model), {.lr = 1e-2});
        data::DataLoader loader(std::make_shared<Tokens>(24), {.batch_size = 2});
        accelerator.prepare(model, optimizer, loader);
        for (const auto& batch : loader) {
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(
              cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1})));
          optimizer.step(), optimizer.zero_grad();
        }
        accelerator.save_lora(model, folder);
        if (both) accelerator.save_merged_lora(model, folder + "/merged");
      });
      if (both) {
        Words merged;
        EXPECT_TRUE(load_model(merged, folder + "/merged").complete());
      }
      EXPECT_TRUE(bytes_of_file(folder + "/adapter_model.safetensors") ==
                  bytes_of_file(alone + "/adapter_model.safetensors"))
          << static_cast<int>(sharding);
    }
  }
}

TEST(AcceleratorLora, StatesGoOnInEveryMode) {
  const std::string folder = lora_folder("state");
  Values whole;
  compared_ranks(2, [&](int rank) {
    manual_seed(5);
    LoraRun run(Sharding::kDdp);
    run.train();
    run.accelerator.save_state(folder);
    run.train();
    const Values own = floats_of(run.model);
    if (rank == 0) whole = own;
  });
  for (const Sharding sharding : kLoraModes) {
    compared_ranks(2, [&](int) {
      manual_seed(99);
      LoraRun run(sharding);
      run.accelerator.load_state(folder);
      run.train();
      EXPECT_TRUE(floats_of(run.model) == whole) << static_cast<int>(sharding);
    });
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_lora
