// Packed documents: their bounds, and models that take rows of them: what a document gives does not
// depend on the row that it stands in.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/nn/transformer/documents.h>
#include <tessera/nn/transformer/positions.h>

namespace tessera::nn::models::test_packed_documents {
namespace {

Tensor ids_of(const std::vector<int64_t>& values) {
  return tensor(std::vector<double>(values.begin(), values.end()),
                {static_cast<int64_t>(values.size())}, kI64);
}
Tensor row_of(const std::vector<int64_t>& values) { return ids_of(values).unsqueeze(0); }

// ---- Bounds -------------------------------------------------------------------------------------

TEST(DocumentBounds, AreWhereDocumentsBeginAndEnd) {
  const Documents rows =
      document_bounds(tensor({0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 5}, {2, 6}, kI64));
  EXPECT_EQ(rows.starts.dtype(), kI32);
  EXPECT_EQ(rows.ends.dtype(), kI32);
  EXPECT_EQ(rows.starts.to_vector<int64_t>(),
            (std::vector<int64_t>{0, 0, 0, 3, 4, 4, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(rows.ends.to_vector<int64_t>(),
            (std::vector<int64_t>{3, 3, 3, 4, 6, 6, 6, 6, 6, 6, 6, 6}));
  const Documents lengths = document_bounds(ids_of({0, 3, 4, 6}).to(kI32));
  EXPECT_EQ(lengths.position_ids.to_vector<int64_t>(), (std::vector<int64_t>{0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(lengths.starts.shape(), (Shape{1, 6}));
  EXPECT_EQ(lengths.ends.to_vector<int64_t>(), (std::vector<int64_t>{3, 3, 3, 4, 6, 6}));
  EXPECT_EQ(document_bounds(empty({2, 0}, {.dtype = kI64})).ends.shape(), (Shape{2, 0}));
  EXPECT_EQ(document_bounds(empty({2, 5}, {.dtype = kI64, .device = kMeta})).ends.shape(),
            (Shape{2, 5}));
}

TEST(DocumentBounds, RefuseWhatAreNoDocuments) {
  EXPECT_THROW(document_bounds({}), ValueError);
  EXPECT_THROW(document_bounds(tensor({0, 1}, {1, 2}, kF32)), DTypeError);
  EXPECT_THROW(document_bounds(empty({1, 2, 3}, {.dtype = kI64})), ShapeError);
  EXPECT_THROW(document_bounds(row_of({1, 2, 3})), ValueError);     // begins behind 0
  EXPECT_THROW(document_bounds(row_of({0, 1, 3})), ValueError);     // leaves one out
  EXPECT_THROW(document_bounds(row_of({0, 1, 1, 2})), ValueError);  // goes back, but not to 0
  EXPECT_THROW(document_bounds(tensor({0, 1, 2, 3}, {2, 2}, kI64)), ValueError);  // across rows
  EXPECT_THROW(document_bounds(ids_of({1, 3})), ValueError);
  EXPECT_THROW(document_bounds(ids_of({0, 3, 3})), ValueError);
}

// ---- Models -------------------------------------------------------------------------------------

struct Row {
  std::vector<std::vector<int64_t>> documents;
  Tensor ids, targets;
  Documents bounds;
  int64_t tokens = 0;
};

Tensor targets_of(const std::vector<int64_t>& document) {
  std::vector<int64_t> targets(document.begin() + 1, document.end());
  targets.push_back(-100);
  return row_of(targets);
}

// Documents of random lengths from 1 to 48, of one token too.
Row random_row(uint32_t seed, int64_t vocab_size) {
  std::mt19937 generator(seed);
  Row row;
  std::vector<int64_t> all, targets, cu_seqlens{0};
  for (int i = 0; i < 6; ++i) {
    const size_t length = i == 2 ? 1 : 2 + generator() % 47;
    std::vector<int64_t> document(length);
    for (int64_t& id : document) id = static_cast<int64_t>(generator() % 29) % vocab_size;
    all.insert(all.end(), document.begin(), document.end());
    const auto own = targets_of(document).to_vector<int64_t>();
    targets.insert(targets.end(), own.begin(), own.end());
    cu_seqlens.push_back(static_cast<int64_t>(all.size()));
    row.documents.push_back(document);
  }
  row.tokens = cu_seqlens.back();
  row.ids = row_of(all);
  row.targets = row_of(targets);
  row.bounds = document_bounds(ids_of(cu_seqlens));
  return row;
}

using Gradients = std::map<std::string, std::vector<double>>;

// Adds factor times what a loss gives each parameter, and to "loss" the loss.
void add_gradients(ModuleBase& model, const Tensor& loss, double factor, Gradients& sums) {
  model.zero_grad();
  loss.backward();
  const auto add = [&](const std::string& name, const std::vector<double>& values) {
    std::vector<double>& sum = sums.try_emplace(name, values.size(), 0.0).first->second;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += factor * values[i];
  };
  add("loss", {loss.item()});
  for (const auto& [name, parameter] : model.named_parameters()) {
    if (parameter.grad().defined()) add(name, parameter.grad().to_vector());
  }
}

// A row's loss and gradients are the means of those of its documents alone.
template <class LossOfRow, class LossOfDocument>
void expect_like_alone(ModuleBase& model, DType dtype, const Row& row, LossOfRow&& of_row,
                       LossOfDocument&& of_document) {
  Gradients packed, alone;
  add_gradients(model, of_row(), 1, packed);
  double total = 0;
  for (size_t i = 0; i < row.documents.size(); ++i) total += of_document(i).second;
  for (size_t i = 0; i < row.documents.size(); ++i) {
    const auto [loss, weight] = of_document(i);
    if (weight > 0) add_gradients(model, loss, weight / total, alone);
  }
  ASSERT_EQ(packed.size(), alone.size());
  double most = 0;  // a key's bias has a gradient of 0, of which roundings are left
  for (const auto& [name, values] : packed) {
    if (name == "loss") continue;
    for (const double value : values) most = std::max(most, std::abs(value));
  }
  const double bound = 8 * epsilon_of(dtype) * std::sqrt(static_cast<double>(row.tokens));
  for (const auto& [name, values] : packed) {
    const double scale = name == "loss" ? std::abs(values[0]) : most;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], alone.at(name)[i], bound * scale)
          << name << " at " << i << " in " << name_of(dtype);
    }
  }
}

template <class Model>
void expect_language_model_like_alone(Model& model, DType dtype, uint32_t seed) {
  model.to(dtype);
  const Row row = random_row(seed, 29);
  expect_like_alone(
      model, dtype, row,
      [&] {
        return model({row.ids, row.bounds}, row.targets).loss;
      },
      [&](size_t i) {
        const std::vector<int64_t>& document = row.documents[i];
        const double targets = static_cast<double>(document.size()) - 1;
        return std::pair(
            targets > 0 ? model(row_of(document), targets_of(document)).loss : Tensor(), targets);
      });
}

constexpr DType kDTypes[] = {kF64, kF32, kF16, kBF16};

TEST(PackedModels, GptGivesEachDocumentWhatItGivesItAlone) {
  for (const DType dtype : kDTypes) {
    manual_seed(3);
    // Rows are longer than the context, documents are not.
    Gpt model({.vocab_size = 29, .context = 48, .width = 32, .layers = 2, .heads = 2});
    expect_language_model_like_alone(model, dtype, 5);
  }
}

TEST(PackedModels, LlamaGivesEachDocumentWhatItGivesItAlone) {
  LlamaConfig config{.vocab_size = 29,
                     .width = 32,
                     .inner = 48,
                     .layers = 2,
                     .heads = 4,
                     .kv_heads = 2,
                     .head_norms = true};
  for (const DType dtype : kDTypes) {
    manual_seed(3);
    config.window = dtype == kF32 ? 0 : 7;
    config.windowed = {false, true};
    Llama model(config);
    expect_language_model_like_alone(model, dtype, 6);
  }
}

TEST(PackedModels, BertClassifiesEachDocumentAsItDoesAlone) {
  for (const DType dtype : kDTypes) {
    manual_seed(3);
    Bert model({.vocab_size = 29,
                .width = 32,
                .layers = 2,
                .heads = 2,
                .context = 48,
                .labels = 3,
                .dropout = 0,
                .attention_dropout = 0});
    model.to(dtype);
    const Row row = random_row(7, 29);
    const Tensor labels = ids_of({0, 2, 1, 1, -100, 2});
    EXPECT_EQ(model({row.ids, row.bounds}, {}).logits.shape(), (Shape{6, 3}));
    expect_like_alone(
        model, dtype, row,
        [&] {
          return model({row.ids, row.bounds}, {}, labels).loss;
        },
        [&](size_t i) {
          if (i == 4) return std::pair(Tensor(), 0.0);
          const auto at = static_cast<int64_t>(i);
          return std::pair(model(row_of(row.documents[i]), {}, labels.narrow(0, at, 1)).loss, 1.0);
        });
  }
}

// Dropout drops other elements in a row than alone; in a row it is the same with the contents of
// other documents, and when a block is calculated again in backward.
TEST(PackedModels, ADocumentsBitsDoNotDependOnItsNeighboursContents) {
  Gpt model(
      {.vocab_size = 29, .context = 64, .width = 32, .layers = 2, .heads = 2, .dropout = 0.2});
  const Row row = random_row(8, 29);
  Tensor other = row.ids.clone();
  const auto begin = static_cast<int64_t>(row.documents[0].size());
  const auto length = static_cast<int64_t>(row.documents[1].size());
  for (int64_t t = 0; t < row.tokens; ++t) {
    if (t >= begin && t < begin + length) continue;
    int64_t& id = other.data_as<int64_t>()[t];
    id = (id + 11) % 29;
  }
  const auto logits = [&](const Tensor& ids, int64_t from, int64_t count) {
    manual_seed(4);
    return model({ids, row.bounds}, {}).logits.narrow(1, from, count).to_vector();
  };
  EXPECT_EQ(logits(row.ids, begin, length), logits(other, begin, length));
  EXPECT_NE(logits(row.ids, 0, begin), logits(other, 0, begin));
}

TEST(PackedModels, BlocksThatAreCalculatedAgainGiveTheSameBits) {
  Gpt model(
      {.vocab_size = 29, .context = 64, .width = 32, .layers = 2, .heads = 2, .dropout = 0.2});
  const Row row = random_row(9, 29);
  const auto gradients = [&] {
    manual_seed(4);
    Gradients all;
    add_gradients(model, model({row.ids, row.bounds}, row.targets).loss, 1, all);
    return all;
  };
  const Gradients kept = gradients();
  std::vector<HookHandle> handles;
  for (size_t i = 0; i < model.transformer.h.size(); ++i) {
    handles.push_back(model.transformer.h.at<gpt2::Block>(i).checkpoint_calls());
  }
  EXPECT_EQ(gradients(), kept);
}

TEST(PackedModels, RefuseWhatDoesNotFitTheirRows) {
  Gpt gpt({.vocab_size = 29, .context = 48, .width = 32, .layers = 1, .heads = 2});
  Llama llama({.vocab_size = 29, .width = 32, .inner = 48, .layers = 1});
  const Row row = random_row(10, 29);
  const Documents shorter = document_bounds(ids_of({0, 5, 9}));
  EXPECT_THROW(gpt({row.ids, shorter}, {}), ShapeError);
  EXPECT_THROW(llama({row.ids, shorter}, {}), ShapeError);
  gpt2::KvCache cache(gpt.config, 1);
  EXPECT_THROW(gpt({row.ids, row.bounds}, {}, Logits::kAll, &cache), UnsupportedError);
  llama::KvCache llama_cache(llama.config, 1, 400);
  EXPECT_THROW(llama({row.ids, row.bounds}, {}, false, &llama_cache), UnsupportedError);
  // A document longer than the table of positions.
  const Tensor ids = zeros({1, 50}, {.dtype = kI64});
  EXPECT_THROW(gpt({ids, document_bounds(ids_of({0, 1, 50}))}, {}), IndexError);
  Bert bert({.vocab_size = 29, .width = 32, .layers = 1, .heads = 2});
  EXPECT_THROW(bert({row.ids, row.bounds}, TokenFeatures{.attention_mask = ones_like(row.ids)}),
               ValueError);
  EXPECT_THROW(bert({row.ids, row.bounds}, TokenFeatures{.lengths = ids_of({row.tokens})}),
               ValueError);
}

// ---- The op -------------------------------------------------------------------------------------

TEST(PackedOp, RefusesBoundsThatAreNone) {
  const Tensor x = randn({2, 2, 5, 4}), packed = randn({2, 5, 3, 2, 4});
  const Tensor good = zeros({2, 5}, {.dtype = kI32});
  const auto attend = [&](const AttentionOptions& options) {
    return scaled_dot_product_attention(x, x, x, options);
  };
  EXPECT_THROW(attend({.starts = good.to(kI64)}), DTypeError);
  EXPECT_THROW(attend({.ends = good.to(kF32)}), DTypeError);
  EXPECT_THROW(attend({.starts = good.narrow(1, 0, 4)}), ShapeError);
  EXPECT_THROW(attend({.starts = good.narrow(0, 0, 1)}), ShapeError);
  EXPECT_THROW(attend({.starts = empty({2, 5}, {.dtype = kI32, .device = kMeta})}), DeviceError);
  EXPECT_THROW(attend({.mask = ones({5, 5}, {.dtype = kBool}), .starts = good}), ValueError);
  EXPECT_THROW(attend({.lengths = ids_of({5, 5}), .starts = good}), ValueError);
  EXPECT_THROW(attend({.ends = good, .causal = true}), ValueError);
  EXPECT_THROW(attend({.starts = good + 1}), IndexError);  // points ahead
  EXPECT_THROW(attend({.ends = good + 6}), IndexError);
  EXPECT_THROW(attend({.starts = good + 3, .ends = good + 2}), IndexError);
  EXPECT_THROW((void)packed_attention(packed, {.starts = good.to(kI64)}), DTypeError);
  EXPECT_THROW((void)packed_attention(packed, {.starts = good + 1}), IndexError);
}

TEST(PackedOp, CountsTheOperationsOfWhatQueriesSee) {
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  const Tensor x = randn({1, 2, 6, 4});
  const Documents rows = document_bounds(ids_of({0, 2, 6}));
  const auto count = [&](const AttentionOptions& options) {
    counter = {.enabled = true};
    (void)scaled_dot_product_attention(x, x, x, options);
    const double total = counter.total;
    counter = {};
    return total;
  };
  EXPECT_EQ(count({.starts = rows.starts}), 2 * 2 * (3 + 10) * 8.0);
  EXPECT_EQ(count({.starts = rows.starts, .ends = rows.ends}), 2 * 2 * (4 + 16) * 8.0);
}

}  // namespace
}  // namespace tessera::nn::models::test_packed_documents
