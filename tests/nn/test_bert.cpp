// nn::models::Bert: against transformers, its files, its data sets.
#include <gtest/gtest.h>

#include <unistd.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/models/bert.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>

#include "autograd/op_checks.h"
#include "bert/text_data.h"
#include "golden_files.h"
#include "nn/call_counts.h"

namespace tessera::nn::models::test_bert {
namespace {

using namespace examples;

using tests::difference;
using tests::golden_json;
using tests::golden_path;
using tests::largest;

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(golden_path("bert.safetensors"));
  return file;
}

TokenFeatures golden_features() {
  return {golden().load("token_type_ids"), golden().load("attention_mask")};
}

// Of 0 there is none in front of the classifier, whatever the encoder has.
TEST(Bert, TheClassifiersDropoutIsItsOwnOrElseTheEncoders) {
  const NoGradGuard no_grad;
  const struct {
    double dropout, classifier_dropout;
    bool drops;
  } rows[] = {{0.5, -1, true}, {0.5, 0, false}, {0.5, 0.5, true}, {0, -1, false}, {0, 0.5, true}};
  for (const auto& row : rows) {
    SCOPED_TRACE(testing::Message() << row.dropout << " " << row.classifier_dropout);
    manual_seed(6);
    Bert model({.vocab_size = 10,
                .width = 32,
                .layers = 1,
                .heads = 4,
                .context = 8,
                .dropout = row.dropout,
                .classifier_dropout = row.classifier_dropout});
    int64_t zeros_seen = 0;  // a pooled state is a tanh, never 0 itself
    model.classifier.register_forward_pre_hook([&](ModuleBase&, TensorRefs inputs) {
      for (const double value : inputs[0]->to_vector()) zeros_seen += value == 0;
    });
    model(ones({4, 5}, {.dtype = kI64}));
    EXPECT_EQ(zeros_seen > 0, row.drops);
    zeros_seen = 0;
    model.eval();
    model(ones({4, 5}, {.dtype = kI64}));
    EXPECT_EQ(zeros_seen, 0);
  }
}

class BertFiles : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(path_); }
  void TearDown() override { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(file(name)) << text;
    return file(name);
  }

 private:
  const std::filesystem::path path_ =
      std::filesystem::path(testing::TempDir()) / ("tessera_bert_" + std::to_string(getpid()));
};

TEST(Bert, LogitsStatesAndLossAreThoseOfTransformers) {
  const auto model = Bert::from_pretrained(golden_path("bert"));
  const Tensor ids = golden().load("input_ids");
  const BertOutput output = (*model)(ids, golden_features(), golden().load("labels"));
  const auto logits = golden().load("logits").to_vector();
  EXPECT_EQ(difference(output.logits, logits, 1e-5 * largest(logits)), "");
  const double loss = golden_json("bert.json")["loss"];
  EXPECT_NEAR(output.loss.item(), loss, 1e-6 * loss);
  const auto states = golden().load("hidden").to_vector();
  EXPECT_EQ(difference(model->bert(ids, golden_features()), states, 1e-5 * largest(states)), "");
}

TEST(Bert, EveryGradientIsWithinAHundredThousandthOfItsLargest) {
  const auto model = Bert::from_pretrained(golden_path("bert"));
  (*model)(golden().load("input_ids"), golden_features(), golden().load("labels")).loss.backward();
  for (const auto& [name, parameter] : model->named_parameters()) {
    const auto values = golden().load("grad." + name).to_vector();
    // The keys' bias moves all scores of a query alike: its gradient is 0 but for rounding.
    const double bound = name.ends_with("key.bias") ? 1e-6 : 1e-5 * largest(values);
    EXPECT_EQ(difference(parameter.grad(), values, bound), "") << name;
  }
}

TEST(Bert, PaddingChangesNothing) {
  const auto model = Bert::from_pretrained(golden_path("bert"));
  const NoGradGuard no_grad;
  const Tensor ids = golden().load("input_ids").narrow(0, 0, 1).contiguous();
  const Tensor types = golden().load("token_type_ids").narrow(0, 0, 1).contiguous();
  const Tensor plain = (*model)(ids, TokenFeatures{types, {}}).logits;
  const Tensor padding = zeros({1, 5}, {.dtype = kI64});
  const Tensor padded =
      (*model)(cat({ids, padding}, 1),
               TokenFeatures{cat({types, padding}, 1), cat({ones_like(ids), padding}, 1)})
          .logits;
  const auto expected = plain.to_vector();
  EXPECT_EQ(difference(padded, expected, 1e-6 * largest(expected)), "");
}

TEST(Bert, ThePaddingEmbeddingIsZeroAndStaysSo) {
  Bert model({.vocab_size = 11, .width = 8, .layers = 1, .heads = 2, .context = 6});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
  model(zeros({2, 4}, {.dtype = kI64}), TokenFeatures{}, zeros({2}, {.dtype = kI64}))
      .loss.backward();
  optimizer.step();
  EXPECT_EQ(model.bert.embeddings.word_embeddings.weight.select(0, 0).to_vector(),
            std::vector<double>(8, 0.0));
}

// Hooks on each module: each is called, and no fused op goes around it.
TEST(Bert, EveryModuleIsCalledOnceAForwardAndTheResultsAreThoseOfTheFusedOps) {
  const auto fused = Bert::from_pretrained(golden_path("bert")),
             called = Bert::from_pretrained(golden_path("bert"));
  const Tensor ids = golden().load("input_ids"), labels = golden().load("labels");
  tests::CallCounts counts(*called);
  EXPECT_NE(counts.not_called(1), "");
  const BertOutput expected = (*fused)(ids, golden_features(), labels);
  const BertOutput output = (*called)(ids, golden_features(), labels);
  EXPECT_EQ(counts.not_called(1), "");
  const auto logits = expected.logits.to_vector();
  EXPECT_EQ(difference(output.logits, logits, 1e-5 * largest(logits)), "");
  EXPECT_NEAR(output.loss.item(), expected.loss.item(), 1e-6 * expected.loss.item());
  expected.loss.backward();
  output.loss.backward();
  for (const auto& [name, parameter] : fused->named_parameters()) {
    const auto values = parameter.grad().to_vector();
    const double bound = name.ends_with("key.bias") ? 1e-6 : 1e-5 * largest(values);
    EXPECT_EQ(difference(called->get_parameter(name).grad(), values, bound), "") << name;
  }
  (*called)(ids);  // without types, labels and padding
  EXPECT_EQ(counts.not_called(1), "");
}

TEST(Bert, DropoutIsForTrainingAlone) {
  Bert model({.vocab_size = 11, .width = 8, .layers = 2, .heads = 2, .context = 6});
  const NoGradGuard no_grad;
  const Tensor ids = ones({2, 4}, {.dtype = kI64});
  model.eval();
  EXPECT_EQ(model(ids).logits.to_vector(), model(ids).logits.to_vector());
  model.train();
  EXPECT_NE(model(ids).logits.to_vector(), model(ids).logits.to_vector());
}

TEST_F(BertFiles, SavesWhatItLoads) {
  const auto model = Bert::from_pretrained(golden_path("bert"));
  model->save_pretrained(file("saved"));
  const auto again = Bert::from_pretrained(file("saved"));
  const auto expected = model->state_dict();
  for (const auto& [name, tensor] : again->state_dict()) {
    EXPECT_EQ(tensor.to_vector(), expected.find(name)->to_vector()) << name;
  }
  EXPECT_EQ(again->config.labels, 5);
  EXPECT_EQ(again->config.label_names.at(4), "LABEL_4");
  EXPECT_EQ(again->config.inner_width(), 72);
}

TEST_F(BertFiles, AnEncoderAloneLeavesTheClassifierFreshAndSaysSo) {
  std::map<std::string, Tensor> encoder;
  for (const auto& [name, tensor] : load_safetensors(golden_path("bert/model.safetensors"))) {
    if (!name.starts_with("bert.")) continue;
    std::string old = name.substr(5);
    if (old.ends_with("LayerNorm.weight")) old.replace(old.size() - 6, 6, "gamma");
    if (old.ends_with("LayerNorm.bias")) old.replace(old.size() - 4, 4, "beta");
    encoder.emplace(old, tensor);
  }
  encoder.emplace("embeddings.position_ids", zeros({1, 24}, {.dtype = kI64}));
  encoder.emplace("cls.predictions.bias", zeros({83}));
  save_safetensors(file("model.safetensors"), encoder);
  std::filesystem::copy(golden_path("bert/config.json"), file("config.json"));
  const std::string folder = std::filesystem::path(file("config.json")).parent_path().string();
  std::vector<std::string> fresh;
  const auto model = Bert::from_pretrained(folder, &fresh);
  EXPECT_EQ(fresh, (std::vector<std::string>{"classifier.weight", "classifier.bias"}));
  EXPECT_EQ(model->bert.pooler.dense.weight.to_vector(),
            encoder.at("pooler.dense.weight").to_vector());
  EXPECT_THROW(Bert::from_pretrained(folder), ValueError);
}

TEST_F(BertFiles, ErrorsNameFileAndField) {
  const auto message = [&](const std::string& json) -> std::string {
    try {
      BertConfig::read(write("config.json", json));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("{").find("config.json: is not JSON"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "gpt2"})").find("'model_type'"), std::string::npos);
  EXPECT_NE(message(R"({"model_type": "bert"})").find("'vocab_size' is missing"),
            std::string::npos);
  EXPECT_NE(message(R"({"model_type": "bert", "vocab_size": 10, "hidden_size": 10,
      "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8,
      "max_position_embeddings": 8})")
                .find("multiple of heads"),
            std::string::npos);
  EXPECT_THROW(BertConfig::read(file("missing.json")), IoError);
}

TEST(Bert, LongSequencesAndMasksOfAnotherShapeAreErrors) {
  Bert model({.vocab_size = 11, .width = 8, .layers = 1, .heads = 2, .context = 6});
  EXPECT_THROW(model(zeros({1, 7}, {.dtype = kI64})), ShapeError);
  EXPECT_THROW(
      model(zeros({1, 4}, {.dtype = kI64}), TokenFeatures{{}, ones({1, 5}, {.dtype = kI64})}),
      ShapeError);
}

TEST(Bert, LengthsSayWhatAMaskSays) {
  Bert model({.vocab_size = 11,
              .width = 16,
              .layers = 2,
              .heads = 2,
              .context = 6,
              .dropout = 0,
              .attention_dropout = 0});
  const Tensor ids = tensor({2, 7, 3, 0, 0, 2, 5, 6, 8, 3}, kI64).view({2, 5});
  const Tensor mask = tensor({1, 1, 1, 0, 0, 1, 1, 1, 1, 1}, kI64).view({2, 5});
  const Tensor lengths = tensor({3, 5}, kI64), labels = tensor({0, 1}, kI64);
  const auto gradients = [&](const TokenFeatures& features) {
    model.zero_grad();
    model(ids, features, labels).loss.backward();
    return model.bert.embeddings.word_embeddings.weight.grad().to_vector();
  };
  const auto by_mask = gradients({.attention_mask = mask});
  const auto by_lengths = gradients({.lengths = lengths});
  for (size_t i = 0; i < by_mask.size(); ++i) EXPECT_NEAR(by_lengths[i], by_mask[i], 1e-6) << i;
  EXPECT_THROW(model(ids, TokenFeatures{.attention_mask = mask, .lengths = lengths}), ValueError);
}

// Precision, recipe and filter by settings; the classifier's 3 classes are no multiple of 16.
TEST_F(BertFiles, TrainsInFp8BySettingsAlone) {
  manual_seed(19);
  Bert model({.vocab_size = 40,
              .width = 32,
              .layers = 1,
              .heads = 2,
              .context = 16,
              .labels = 3,
              .dropout = 0,
              .attention_dropout = 0});
  Accelerator accelerator({.config_file = write("settings.json", R"({"mixed_precision": "fp8",
      "fp8_recipe": "delayed", "fp8_filter": "all", "fp8_amax_history_len": 4})")});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3});
  accelerator.prepare(model, optimizer);
  constexpr int64_t kTexts = 16, kLength = 6, kSteps = 12;
  std::vector<int64_t> ids, labels;
  for (int64_t i = 0; i < kTexts; ++i) {
    labels.push_back(i % 3);
    for (int64_t t = 0; t < kLength; ++t) ids.push_back(1 + (i % 3) * 13 + (i * t) % 13);
  }
  const Tensor batch = tensor(ids, {kTexts, kLength}), classes = tensor(labels, {kTexts});
  const Tensor lengths = full({kTexts}, kLength, {.dtype = kI64});
  double first = 0, last = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto micro = accelerator.accumulate(model);
    const Tensor loss = model(batch, TokenFeatures{.lengths = lengths}, classes).loss;
    accelerator.backward(loss);
    optimizer.step(), optimizer.zero_grad();
    (step == 0 ? first : last) = loss.item();
  }
  EXPECT_LT(last, 0.7 * first);
  const precision::Fp8Report report = precision::fp8_of(model)->report();
  // query, key, value, output, two of the perceptron, and the pooler.
  EXPECT_EQ(report.fp8_calls(), 7 * kSteps) << report.table();
  EXPECT_EQ(report.fallbacks(), kSteps) << report.table();
  EXPECT_EQ(report.recipe.history, 4);
  EXPECT_EQ(report.layers.back().name, "classifier");
  EXPECT_EQ(report.layers.back().fallbacks.at("out_features (3) is no multiple of 16"), kSteps);
}

TEST(TextData, BatchesArePaddedToTheirLongestAndKeepTypesAndLabels) {
  const auto dataset = std::make_shared<TextDataset>(std::vector<TextExample>{
      {{2, 7, 3}, {0, 0, 0}, 1}, {{2, 5, 6, 3, 8, 3}, {0, 0, 0, 0, 1, 1}, 0}});
  EXPECT_EQ(dataset->longest(), 6);
  data::DataLoader<TextExample> loader(dataset, {.batch_size = 2});
  for (TextBatch& batch : loader) {
    EXPECT_EQ(batch.ids.to_vector<int64_t>(),
              (std::vector<int64_t>{2, 7, 3, 0, 0, 0, 2, 5, 6, 3, 8, 3}));
    EXPECT_EQ(batch.type_ids.sum().item(), 2);
    EXPECT_EQ(batch.lengths.to_vector<int64_t>(), (std::vector<int64_t>{3, 6}));
    EXPECT_EQ(batch.labels.to_vector<int64_t>(), (std::vector<int64_t>{1, 0}));
  }
}

TEST_F(BertFiles, DataSetsOfTextsRefuseLabelsTheyDoNotKnow) {
  const char* folder = std::getenv("TESSERA_DATA_DIR");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_DATA_DIR is unset: no vocabulary";
  const std::string root = folder;
  const auto tokenizer = data::WordPieceTokenizer::from_file(root + "/bert/vocab.txt");
  const auto labels = read_label_names(root + "/intent/banking77-categories.json");
  EXPECT_EQ(labels.size(), 77u);
  const auto intents = read_intents(root + "/intent/banking77-test.csv", labels, tokenizer, 32);
  EXPECT_EQ(intents->size(), 3080);
  EXPECT_LE(intents->longest(), 32);
  EXPECT_EQ(intents->get(0).ids.front(), tokenizer.first_id());
  const auto pairs = read_qnli(root + "/pairs/qnli-dev.tsv", tokenizer, 64, 10);
  EXPECT_EQ(pairs->size(), 10);
  EXPECT_EQ(pairs->get(0).label, 0);
  EXPECT_EQ(pairs->get(1).label, 1);
  EXPECT_EQ(pairs->get(1).type_ids.back(), 1);
  const std::string wrong = write("wrong.csv", "text,category\nhello,card_arrival\nhi,nonsense\n");
  try {
    read_intents(wrong, labels, tokenizer, 32);
    FAIL();
  } catch (const FormatError& error) {
    EXPECT_NE(std::string(error.what()).find("line 3: the category 'nonsense'"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera::nn::models::test_bert
