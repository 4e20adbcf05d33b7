// `tessera estimate-memory` and `tessera plan`. CLI-3 is in the tests' names.
#include <gtest/gtest.h>

#include <filesystem>

#include <nlohmann/json.hpp>

#include "accelerate/tessera_command.h"
#include "golden_files.h"

namespace tessera::test_memory_commands {
namespace {

// ---- estimate-memory

const char* const kBertBaseCased = R"({"model_type": "bert", "hidden_size": 768,
  "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
  "vocab_size": 28996, "max_position_embeddings": 512, "type_vocab_size": 2})";

// Its parameters with a head of two classes, and without the tables of indices.
constexpr int64_t kBertTrained = 433249280 / 4 - 2 * 512 * 2 + 2 * 768 + 2;

nlohmann::json estimate(const std::vector<std::string>& words) {
  std::vector<std::string> command = {"estimate-memory", "--json"};
  command.insert(command.end(), words.begin(), words.end());
  const FinishedProcess process = tessera_command(command);
  EXPECT_EQ(process.code(), 0) << process;
  return nlohmann::json::parse(process.output);
}

TEST(EstimateMemory, CLI3_BertBaseCasedToTheByte) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  for (const std::string& path : {file, folder.path("")}) {
    const auto rows = estimate({path, "--dtypes", "float32,float16"})["dtypes"];
    EXPECT_EQ(rows[0]["largest_layer_bytes"], 90669056);
    EXPECT_EQ(rows[0]["total_bytes"], 433249280);
    EXPECT_EQ(rows[0]["training_bytes"], 4 * 433249280LL);
    EXPECT_EQ(rows[1]["largest_layer_bytes"], 90669056 / 2);
    EXPECT_EQ(rows[1]["total_bytes"], 433249280 / 2);
    EXPECT_EQ(rows[1]["training_bytes"], 4 * (433249280LL / 2));
  }
}

// The decoder of idefics-80b-instruct by the header of its file: what stays together is a layer,
// with the tables of its rotary embedding, and Accelerate's figure for it is 3 240 165 632 bytes.
TEST(EstimateMemory, CLI3_AModelOf80BWithBlocksThatStayTogether) {
  TestFolder folder;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> layer = {
      {"self_attn.q_proj.weight", {8192, 8192}},
      {"self_attn.k_proj.weight", {8192, 8192}},
      {"self_attn.v_proj.weight", {8192, 8192}},
      {"self_attn.o_proj.weight", {8192, 8192}},
      {"self_attn.rotary_emb.cos_cached", {2048, 128}},
      {"self_attn.rotary_emb.sin_cached", {2048, 128}},
      {"self_attn.rotary_emb.inv_freq", {64}},
      {"mlp.gate_proj.weight", {22016, 8192}},
      {"mlp.up_proj.weight", {22016, 8192}},
      {"mlp.down_proj.weight", {8192, 22016}},
      {"input_layernorm.weight", {8192}},
      {"post_attention_layernorm.weight", {8192}}};
  nlohmann::ordered_json header;
  int64_t end = 0;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    int64_t bytes = 4;
    for (const int64_t size : shape) bytes *= size;
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  };
  add("model.embed_tokens.weight", {32002, 8192});
  for (int i = 0; i < 80; ++i) {
    for (const auto& [name, shape] : layer) {
      add("model.layers." + std::to_string(i) + "." + name, shape);
    }
  }
  add("lm_head.weight", {32002, 8192});
  const std::string text = header.dump();
  std::ofstream file(folder.path("model.safetensors"), std::ios::binary);
  const uint64_t size = text.size();
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << text;
  file.close();
  std::filesystem::resize_file(folder.path("model.safetensors"),
                               8 + size + static_cast<uint64_t>(end));  // sparse
  const auto result = estimate({folder.path(""), "--dtypes", "float32,float16"});
  const auto rows = result["dtypes"];
  EXPECT_EQ(result["largest_layer"], "model.layers.0");
  EXPECT_EQ(rows[0]["largest_layer_bytes"], 3240165632);
  EXPECT_EQ(rows[1]["largest_layer_bytes"], 3240165632 / 2);
  EXPECT_EQ(rows[0]["total_bytes"], 80 * 3240165632LL + 2 * 4 * 32002LL * 8192);
}

TEST(EstimateMemory, RanksShareWhatTheirModeShards) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  const auto row = estimate({file, "--dtypes", "f32", "--num_processes", "4", "--batch-size", "8",
                             "--sequence-length", "128"})["dtypes"][0]["per_rank"];
  constexpr int64_t kSize = 4 * kBertTrained;
  EXPECT_EQ(row["DDP"]["parameters"], kSize);
  EXPECT_EQ(row["DDP"]["optimizer"], 2 * kSize);
  // Parts begin at cache lines, or are padded to whole rows.
  const auto is_about = [](int64_t bytes, int64_t expected) {
    return bytes >= expected && bytes < expected + expected / 1000;
  };
  EXPECT_TRUE(is_about(row["ZeRO-1"]["optimizer"], 2 * kSize / 4)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-1"]["gradients"], kSize)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-2"]["gradients"], kSize / 4)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-2"]["parameters"], kSize)) << row;
  EXPECT_TRUE(is_about(row["ZeRO-3"]["parameters"], kSize / 4)) << row;
  // 8 * 128 tokens; a layer keeps 8 C + 2 F values and statistics, then 3 C + V.
  EXPECT_EQ(row["DDP"]["activations"],
            8 * 128 * (12 * ((8 * 768 + 2 * 3072) * 4 + 4 * 12) + (3 * 768 + 28996) * 4));
}

// In 16 bits there are two ways to train, and the default keeps parameters and gradients in f32.
TEST(EstimateMemory, RowsOf16BitsAreAutocastsAndPures) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  const auto row = estimate({file, "--dtypes", "bf16", "-n", "2"})["dtypes"][0];
  constexpr int64_t kElements = kBertTrained;
  // Of layers all but the norms, the pooler and the classifier.
  constexpr int64_t kCast = 12 * (7087872 - 4 * 768) + 590592 + 1538;
  const auto autocast = row["per_rank"]["DDP"], pure = row["per_rank_pure"]["DDP"];
  EXPECT_EQ(autocast["parameters"], 4 * kElements + 2 * kCast);  // what products read in 16 bits
  // Each gradient begins at 16 bytes: the classifier's bias is two numbers.
  EXPECT_EQ(autocast["gradients"], 4 * kElements + 8);
  EXPECT_EQ(autocast["optimizer"], 8 * kElements);
  EXPECT_EQ(pure["parameters"], 2 * kElements);
  EXPECT_EQ(pure["gradients"], 4 * kElements + 8);
  EXPECT_EQ(pure["optimizer"], 12 * kElements);
  const FinishedProcess table = tessera_command({"estimate-memory", file, "--dtypes", "f32,bf16"});
  EXPECT_TRUE(table.printed("bf16 autocast (the default)")) << table;
  EXPECT_TRUE(table.printed("bf16 pure (precision_policy = pure)")) << table;
}

TEST(EstimateMemory, ParametersOfGpt2AndLlama) {
  TestFolder folder;
  const std::string gpt2 = folder.write(
      "gpt2.json", R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                       "n_positions": 1024, "vocab_size": 50257})");
  EXPECT_EQ(estimate({gpt2})["dtypes"][0]["total_bytes"], 4 * 124439808LL);
  // TinyLlama-1.1B: 1 100 048 384 parameters.
  const std::string llama = folder.write(
      "llama.json", R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
                        "num_hidden_layers": 22, "num_attention_heads": 32,
                        "num_key_value_heads": 4, "vocab_size": 32000})");
  EXPECT_EQ(estimate({llama})["dtypes"][0]["total_bytes"], 4 * 1100048384LL);
}

TEST(EstimateMemory, HeadersOfFilesAreEnough) {
  TestFolder folder;
  // A header that claims 80 GB, in a sparse file: reading the data would show.
  const std::string header =
      R"({"h.0.w":{"dtype":"F32","shape":[100000,100000],"data_offsets":[0,40000000000]},)"
      R"("h.1.w":{"dtype":"F32","shape":[100000,100000],"data_offsets":[40000000000,80000000000]}})";
  std::ofstream file(folder.path("model.safetensors"), std::ios::binary);
  const uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << header;
  file.close();
  std::filesystem::resize_file(folder.path("model.safetensors"), 8 + size + 80000000000ULL);
  const auto result = estimate({folder.path("")});
  EXPECT_EQ(result["dtypes"][0]["total_bytes"], 80000000000);
  EXPECT_EQ(result["dtypes"][0]["largest_layer_bytes"], 40000000000);
  EXPECT_EQ(result["largest_layer"], "h.0");
}

TEST(EstimateMemory, CLI3_ErrorsSayWhatIsMissing) {
  TestFolder folder;
  const auto complaint = [&](const std::vector<std::string>& words, int code = 1) {
    std::vector<std::string> command = {"estimate-memory"};
    command.insert(command.end(), words.begin(), words.end());
    const FinishedProcess process = tessera_command(command);
    EXPECT_EQ(process.code(), code) << process;
    return process.error;
  };
  const auto mentions = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(mentions(complaint({"bert-base-uncased-that-is-not-here"}), "there is no "));
  std::filesystem::create_directories(folder.path("empty"));
  EXPECT_TRUE(mentions(complaint({folder.path("empty")}), "no config.json"));
  const std::string unknown = folder.write("u.json", R"({"model_type": "perceiver"})");
  EXPECT_TRUE(mentions(complaint({unknown}), "model_type \"perceiver\", which is unknown"));
  EXPECT_TRUE(mentions(complaint({folder.write("n.json", "{}")}), "\"model_type\""));
  EXPECT_TRUE(mentions(complaint({folder.write("m.json", R"({"model_type": "bert"})")}),
                       "the field 'vocab_size' is missing"));
  EXPECT_TRUE(mentions(complaint({folder.write("a.bin", "x")}), "neither"));
  EXPECT_TRUE(mentions(complaint({folder.write("b.json", kBertBaseCased), "--dtypes", "f12"}, 2),
                       "\"f12\""));
  EXPECT_TRUE(mentions(complaint({folder.write("c.json", kBertBaseCased), "--batch-size", "2"}, 2),
                       "--sequence-length"));
}

TEST(EstimateMemory, SizesThatAreTooLargeAreSaidAndNeverNegative) {
  TestFolder folder;
  const auto complaint = [&](const std::string& text) {
    const std::string file = folder.write("config.json", text);
    const FinishedProcess process = tessera_command({"estimate-memory", file});
    EXPECT_NE(process.code(), 0) << process;
    return process;
  };
  const auto bert_with = [](const nlohmann::json& changes) {
    nlohmann::json config = nlohmann::json::parse(kBertBaseCased);
    config.update(changes);
    return config.dump();
  };
  const FinishedProcess deep = complaint(bert_with({{"num_hidden_layers", 100'000}}));
  EXPECT_TRUE(deep.complained("1024 layers")) << deep;
  const int64_t most = (int64_t{1} << 31) - 8;
  const FinishedProcess wide = complaint(bert_with({{"hidden_size", most}, {"vocab_size", most}}));
  EXPECT_TRUE(wide.complained("weights")) << wide;
  const std::string size = std::to_string(most);
  const FinishedProcess listed = complaint(R"({"modules": [{"name": "a", "parameters": [["w", [)" +
                                           size + ", " + size + ", " + size + "]]]}]}");
  EXPECT_TRUE(listed.complained("2^50")) << listed;
  const std::string most_tokens = std::to_string(1 << 30);
  const auto rows = estimate({folder.write("b.json", kBertBaseCased), "--dtypes", "f32",
                              "--batch-size", most_tokens, "--sequence-length", most_tokens});
  for (const auto& [name, value] : rows["dtypes"][0]["per_rank"]["one rank"].items()) {
    EXPECT_GE(value.get<double>(), 0) << name;
  }
}

TEST(EstimateMemory, SaysWhichModulesLieWhereByTransformersNames) {
  const nlohmann::json one = tests::golden_json("device_map_folders.json")[1];
  TestFolder folder;
  folder.write("config.json", one["config"].dump());
  const auto out =
      estimate({folder.path(""), "--dtypes", "f32", "--max-memory", one["max_memory"]});
  EXPECT_EQ(out["device_map"], one["map"]);
  EXPECT_EQ(out["dtypes"][0]["device_map"], one["map"]);
  const FinishedProcess text = tessera_command(
      {"estimate-memory", folder.path(""), "--dtypes", "f32", "--max-memory", one["max_memory"]});
  EXPECT_NE(text.output.find("transformer.drop"), std::string::npos) << text;
}

TEST(EstimateMemory, RefusesLimitsThatSayNothing) {
  TestFolder folder;
  const std::string file = folder.write("config.json", kBertBaseCased);
  const auto refused = [&](const std::vector<std::string>& words, const char* word) {
    std::vector<std::string> command = {"estimate-memory", file};
    command.insert(command.end(), words.begin(), words.end());
    const FinishedProcess process = tessera_command(command);
    EXPECT_NE(process.code(), 0);
    EXPECT_NE(process.output.find(word), std::string::npos) << process;
  };
  refused({"--max-memory", "tpu=1GB"}, "tpu");
  refused({"--max-memory", "cpu=1GB", "--dtypes", "fp8"}, "fp8");
}

// ---- plan

const char* const kGpt2Xl = R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25,
  "n_positions": 1024, "vocab_size": 50257})";

TEST(PlanCommand, SaysWhetherItFitsAndWhatItSends) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const FinishedProcess told =
      tessera_command({"plan", "--model", model, "--mesh", "dp_shard=8", "--batch_size", "4",
                       "--context", "1024", "--memory", "80GB", "--json", folder.path("p.json")});
  EXPECT_EQ(told.code(), 0) << told;
  for (const char* part : {"1,557,611,200 parameters", "fsdp", "fits:", "a step of a rank sends",
                           "reduce_scatter", "together"}) {
    EXPECT_TRUE(told.printed(part)) << part << "\n" << told;
  }
  const auto plan = nlohmann::json::parse(folder.read("p.json"));
  EXPECT_EQ(plan["parameters"], 1557611200);
  ASSERT_EQ(plan["ranks"].size(), 8u);
  EXPECT_EQ(plan["step_seconds"], nullptr);
  // The same rank without room.
  const FinishedProcess small = tessera_command({"plan", "--model", model, "--sharding", "ddp",
                                                 "--mesh", "dp_replicate=8", "--memory", "8GB"});
  EXPECT_TRUE(small.printed("DOES NOT FIT")) << small;
}

TEST(PlanCommand, SaysWhatARankHasOfLayersThatRanksShare) {
  TestFolder folder;
  const std::string model = folder.write("config.json", R"({"model_type": "gpt2", "n_embd": 64,
    "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 100})");
  const FinishedProcess told =
      tessera_command({"plan", "--model", model, "--mesh", "dp_shard=4,tp=2", "--batch-size", "2",
                       "--context", "32", "--json", folder.path("p.json")});
  EXPECT_EQ(told.code(), 0) << told;
  for (const char* part :
       {"fsdp on mesh(dp_shard=4, tp=2)", "layers along tp=2: this rank has ",
        "transformer.h.*.attn.c_attn.weight  x 3   [96, 64] of [192, 64], Shard(0) of 3 blocks",
        "module      tp "}) {
    EXPECT_TRUE(told.printed(part)) << part << "\n" << told;
  }
  EXPECT_EQ(nlohmann::json::parse(folder.read("p.json"))["ranks"].size(), 8u);
  const FinishedProcess copies = tessera_command(
      {"plan", "--model", model, "--sharding", "ddp", "--mesh", "dp_replicate=2,tp=2"});
  EXPECT_EQ(copies.code(), 1) << copies;
  EXPECT_NE(copies.error.find("tp_size=2 (--mesh)"), std::string::npos) << copies;
}

TEST(PlanCommand, SecondsComeFromAStatedNetwork) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const std::string network =
      folder.write("net.json", R"({"bandwidth_bytes_per_second": 5e10, "latency_seconds": 5e-6,
                      "flops_per_second": 4e14})");
  const std::vector<std::string> words = {
      "plan",         "--model", model,          "--sharding", "zero2",     "--mesh", "dp_shard=64",
      "--accumulate", "2",       "--batch-size", "1",          "--context", "512"};
  const auto seconds = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    more.insert(more.end(), {"--json", "-"});
    const FinishedProcess told = tessera_command(more);
    EXPECT_EQ(told.code(), 0) << told;
    return nlohmann::json::parse(told.output)["step_seconds"];
  };
  const auto by_file = seconds({"--network", network});
  EXPECT_EQ(by_file, seconds({"--bandwidth", "50", "--latency", "5", "--flops", "400"}));
  EXPECT_GT(by_file["communication"], 0);
  EXPECT_EQ(by_file["most"],
            by_file["communication"].get<double>() + by_file["compute"].get<double>());
}

TEST(PlanCommand, APipelinesScheduleIsToldAndDrawn) {
  TestFolder folder;
  const FinishedProcess told = tessera_command(
      {"plan", "--pp-size", "4", "--accumulate", "8", "--schedule-picture", folder.path("a.svg")});
  EXPECT_EQ(told.code(), 0) << told;
  EXPECT_TRUE(told.printed("1f1b: 4 stages on 4 ranks, 8 micro-batches a step")) << told;
  EXPECT_TRUE(told.printed("bubble 27.3%") && told.printed("   0   4\n")) << told;
  const std::string picture = folder.read("a.svg");
  EXPECT_NE(picture.find(">1f1b: 4 stages on 4 ranks, 8 micro-batches, bubble 27.3%<"),
            std::string::npos)
      << picture;
  const auto json = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--pp_size", "4", "--accumulate", "8", "--json", "-"});
    const FinishedProcess by = tessera_command(more);
    EXPECT_EQ(by.code(), 0) << by;
    return nlohmann::json::parse(by.output);
  };
  const auto interleaved = json({"--pp-stages-per-rank", "2"});
  EXPECT_NEAR(interleaved["bubble"].get<double>(), 3.0 / 19, 1e-12);
  EXPECT_EQ(interleaved["live_activations"], nlohmann::json({11, 9, 7, 5}));
  EXPECT_NEAR(json({"--pp-schedule", "zero_bubble_h1"})["bubble"].get<double>(), 1.0 / 9, 1e-12);
  EXPECT_EQ(json({"--pp-schedule", "gpipe"})["live_activations"], nlohmann::json({8, 8, 8, 8}));
  for (const auto& [words, code, part] :
       std::vector<std::tuple<std::vector<std::string>, int, std::string>>{
           {{"--pp-size", "two"}, 2, "--pp-size has to be a whole number"},
           {{"--pp-size", "4096"}, 2, "at most 1024"},
           {{"--pp-size", "2", "--pp-schedule", "dualpipe"}, 2, "zero_bubble_h1"},
           {{"--pp-size", "2", "--pp-schedule", "gpipe", "--pp-stages-per-rank", "2"}, 2, "1f1b"},
           {{"--pp-stages-per-rank", "2"}, 2, "--pp-size above 1"},
           {{"--schedule-picture", folder.path("b.svg")}, 2, "--pp-size above 1"},
           {{"--pp-size", "2", "--mesh", "dp_shard=2"}, 1, "--mesh does not go with --pp-size"},
           {{"--pp-size", "2", "--units"}, 1, "--units does not go with --pp-size"},
           {{}, 2, "--model and --mesh are required"}}) {
    std::vector<std::string> all = words;
    all.insert(all.begin(), "plan");
    const FinishedProcess refused = tessera_command(all);
    EXPECT_EQ(refused.code(), code) << refused;
    EXPECT_TRUE(refused.complained(part)) << part << "\n" << refused;
  }
}

TEST(PlanCommand, MistakesNameWhatIsWrong) {
  TestFolder folder;
  const std::string model = folder.write("config.json", kGpt2Xl);
  const auto complaint = [&](std::vector<std::string> words, int code = 2) {
    words.insert(words.begin(), {"plan", "--model", model});
    const FinishedProcess told = tessera_command(words);
    EXPECT_EQ(told.code(), code) << told;
    return told.error;
  };
  for (const auto& [words, part] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--mesh", "dp=8"}, "dp_shard, dp_replicate and tp; got \"dp=8\""},
           {{"--mesh", "dp_shard=0"}, "dp_shard has to be a whole number above 0; got \"0\""},
           {{"--mesh", "dp_shard=2,dp_shard=2"}, "names dp_shard twice"},
           {{"--mesh", "dp_shard=4000000"}, "up to 65536"},
           {{"--mesh", "dp_replicate=8"}, "nothing to cut"},
           {{"--mesh", "dp_shard=2,dp_replicate=2", "--sharding", "zero1"}, "one axis"},
           {{"--mesh", "dp_shard=2", "--memory", "80gigs"}, "got \"80gigs\""},
           {{"--mesh", "dp_shard=2", "--memory", "80"}, "as 80GiB, or bytes"},
           {{"--mesh", "dp_shard=2", "--batch-size", "2"}, "--context"},
           {{"--mesh", "dp_shard=2", "--batch-size", "2", "--context", "4096"}, "at most 1024"},
           {{"--mesh", "dp_shard=2", "--flops", "1"}, "need --bandwidth"}}) {
    EXPECT_NE(complaint(words).find(part), std::string::npos) << part << "\n" << complaint(words);
  }
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--wrap-modules", "Blok"}, 1).find("Blok"),
            std::string::npos);
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--network", folder.write("n.json", "{}")}, 1)
                .find("bandwidth_bytes_per_second"),
            std::string::npos);
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--optimizer", "adamv"}, 2).find("adamv"),
            std::string::npos);
  EXPECT_NE(complaint({"--mesh", "dp_shard=2", "--sharing", "ddp"}, 2).find("--sharding"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::test_memory_commands
