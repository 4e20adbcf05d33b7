// Rows of packed documents: every token once, what fits stays whole, and rows that resume.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/dataloader.h>
#include <tessera/data/packed_dataset.h>

namespace tessera::data::test_packed_dataset {
namespace {

struct Documents : Dataset<TokenDocument> {
  explicit Documents(std::vector<TokenDocument> all) : all(std::move(all)) {}
  int64_t size() const override { return static_cast<int64_t>(all.size()); }
  TokenDocument get(int64_t index) const override { return all[static_cast<size_t>(index)]; }
  std::vector<TokenDocument> all;
};

// Token i of all documents is i, so that each is known.
std::shared_ptr<Documents> documents_of(const std::vector<int64_t>& lengths) {
  std::vector<TokenDocument> all;
  TokenId next = 0;
  for (const int64_t length : lengths) {
    TokenDocument document(static_cast<size_t>(length));
    for (TokenId& id : document) id = next++;
    all.push_back(document);
  }
  return std::make_shared<Documents>(all);
}

std::vector<int64_t> random_lengths(int64_t count, int64_t most, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) {
    lengths.push_back(1 + static_cast<int64_t>(generator()) % most);
  }
  return lengths;
}

using Lengths = std::vector<std::vector<int64_t>>;
Lengths rows_of(const PackedDataset& packed) {
  Lengths rows;
  for (int64_t i = 0; i < packed.size(); ++i) {
    rows.emplace_back();
    for (const PackedDataset::Part& part : packed.parts(i)) rows.back().push_back(part.length);
  }
  return rows;
}

TEST(PackedDataset, PacksInOrderOrTheLongestFirst) {
  const auto documents = documents_of({4, 5, 3, 6, 2, 1, 10, 3});
  EXPECT_EQ(rows_of(PackedDataset(documents, {.context = 10, .packing = Packing::kSequential})),
            (Lengths{{4, 5}, {3, 6}, {2, 1}, {10}, {3}}));
  // 10 | 6 4 | 5 3 2 | 3 1, ordered by their first documents
  EXPECT_EQ(rows_of(PackedDataset(documents, {.context = 10})),
            (Lengths{{4, 6}, {5, 3, 2}, {1, 3}, {10}}));
  // Of each four documents apart: 6 4 | 5 3, 10 | 3 2 1
  EXPECT_EQ(rows_of(PackedDataset(documents, {.context = 10, .buffer = 4})),
            (Lengths{{4, 6}, {5, 3}, {2, 1, 3}, {10}}));
  const PackedDataset packed(documents, {.context = 10});
  EXPECT_EQ(packed.num_tokens(), 34);
  EXPECT_DOUBLE_EQ(packed.fill(), 34.0 / 40);
}

TEST(PackedDataset, ARowsTargetsStayInTheirDocuments) {
  const PackedDataset packed(documents_of({3, 1, 2}),
                             {.context = 8, .weights = TargetWeights::kDocuments, .padding = 99});
  ASSERT_EQ(packed.size(), 1);
  const PackedExample row = packed.get(0);
  const auto ints = [](const Tensor& x) { return x.to_vector<int64_t>(); };
  EXPECT_EQ(ints(row.inputs), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 99, 99}));
  EXPECT_EQ(ints(row.targets), (std::vector<int64_t>{1, 2, -100, -100, 5, -100, -100, -100}));
  EXPECT_EQ(ints(row.position_ids), (std::vector<int64_t>{0, 1, 2, 0, 0, 1, 0, 1}));
  EXPECT_EQ(row.weights.to_vector<float>(), (std::vector<float>{0.5f, 0.5f, 0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(
      PackedDataset(documents_of({3, 1, 2}), {.context = 8}).get(0).weights.to_vector<float>(),
      (std::vector<float>{1, 1, 0, 0, 1, 0, 0, 0}));
}

// All ways of packing, with long documents split: each token once, each target but the documents'
// last ones, each part at position 0, and a document is split only if it is longer than a row.
TEST(PackedDataset, EveryTokenIsInOneRowAndWhatFitsIsWhole) {
  const int64_t context = 32;
  for (const uint32_t seed : {1u, 2u, 3u}) {
    const std::vector<int64_t> lengths = random_lengths(300, seed == 3 ? 100 : 32, seed);
    const auto documents = documents_of(lengths);
    const std::pair<Packing, int64_t> ways[] = {{Packing::kSequential, 1},
                                                {Packing::kFirstFitDecreasing, 7},
                                                {Packing::kFirstFitDecreasing, 4096}};
    for (const auto& [packing, buffer] : ways) {
      const PackedDataset packed(documents, {.context = context,
                                             .packing = packing,
                                             .buffer = buffer,
                                             .long_documents = LongDocuments::kSplit});
      std::set<int64_t> seen;
      int64_t targets = 0, tokens = 0;
      std::vector<int64_t> pieces(lengths.size(), 0);
      for (int64_t i = 0; i < packed.size(); ++i) {
        const PackedExample row = packed.get(i);
        int64_t at = 0;
        for (const PackedDataset::Part& part : packed.parts(i)) {
          ++pieces[static_cast<size_t>(part.document)];
          for (int64_t j = 0; j < part.length; ++j, ++at, ++tokens) {
            EXPECT_TRUE(seen.insert(row.inputs.data_as<int64_t>()[at]).second);
            EXPECT_EQ(row.position_ids.data_as<int64_t>()[at], j);
            const int64_t target = row.targets.data_as<int64_t>()[at];
            if (target == kIgnoreTarget) continue;
            ++targets;
            EXPECT_EQ(target, row.inputs.data_as<int64_t>()[at] + 1);
          }
        }
        ASSERT_LE(at, context);
        ASSERT_GT(at, 0);
      }
      EXPECT_EQ(tokens, packed.num_tokens());
      EXPECT_EQ(targets, packed.num_tokens() - static_cast<int64_t>(lengths.size()));
      for (size_t i = 0; i < lengths.size(); ++i) {
        EXPECT_EQ(pieces[i], (lengths[i] + context - 1) / context);
      }
    }
  }
}

TEST(PackedDataset, FirstFitDecreasingFillsRowsBetterThanTheOrderDoes) {
  const auto documents = documents_of(random_lengths(2000, 200, 4));
  const double in_order =
      PackedDataset(documents, {.context = 256, .packing = Packing::kSequential}).fill();
  EXPECT_LT(in_order, 0.85);
  EXPECT_GT(PackedDataset(documents, {.context = 256}).fill(), 0.97);
}

TEST(PackedDataset, RefusesWhatItCannotPack) {
  EXPECT_THROW(PackedDataset(DatasetPtr<TokenDocument>(), PackedOptions{}), ValueError);
  EXPECT_THROW(PackedDataset(documents_of({1}), {.context = 0}), ValueError);
  EXPECT_THROW(PackedDataset(documents_of({1}), {.buffer = 0}), ValueError);
  EXPECT_THROW(PackedDataset(documents_of({3, 9}), {.context = 8}), ValueError);
  EXPECT_THROW(PackedDataset(documents_of({3, 9}), std::vector<int64_t>{3}), ValueError);
  EXPECT_THROW(PackedDataset(documents_of({3}), std::vector<int64_t>{-3}), ValueError);
  const PackedDataset wrong(documents_of({3, 2}), std::vector<int64_t>{3, 1}, {.context = 8});
  EXPECT_THROW((void)wrong.get(0), ValueError);
  const PackedDataset packed(documents_of({3}), {.context = 8});
  EXPECT_THROW((void)packed.get(1), IndexError);
  EXPECT_THROW((void)packed.parts(-1), IndexError);
  EXPECT_EQ(PackedDataset(documents_of({}), {.context = 8}).size(), 0);
  EXPECT_EQ(PackedDataset(documents_of({0, 0}), {.context = 8}).size(), 0);
}

// A run that stops within an epoch and goes on from the loader's state has the batches that it
// would have had: with workers, in every epoch's own order.
TEST(PackedDataset, ALoaderResumesWithinAnEpoch) {
  const PackedDataset packed(documents_of(random_lengths(200, 60, 5)), {.context = 64});
  const DataLoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 7, .workers = 1};
  using Batches = std::vector<std::vector<int64_t>>;
  const auto take = [](auto& loader, int count) {
    Batches batches;
    for (int i = 0; i < count; ++i) {
      auto batch = loader.next();
      if (!batch) batch = loader.next();  // of the next epoch
      batches.push_back(batch->inputs.template to_vector<int64_t>());
      for (const Tensor& x : {batch->targets, batch->position_ids}) {
        const auto more = x.template to_vector<int64_t>();
        batches.back().insert(batches.back().end(), more.begin(), more.end());
      }
    }
    return batches;
  };
  DataLoader whole(packed, options);
  const int batches = static_cast<int>(2 * whole.size());
  const Batches all = take(whole, batches);
  for (const int stop : {1, 7, batches / 2, batches / 2 + 3}) {
    DataLoader before(packed, options);
    Batches found = take(before, stop);
    DataLoader after(packed, options);
    after.load_state_dict(before.state_dict());
    const Batches rest = take(after, batches - stop);
    found.insert(found.end(), rest.begin(), rest.end());
    EXPECT_EQ(found, all) << stop;
  }
  const PackedDataset other(documents_of(random_lengths(200, 60, 5)),
                            {.context = 64, .packing = Packing::kSequential});
  DataLoader refused(other, options);
  EXPECT_THROW(refused.load_state_dict(whole.state_dict()), ConfigError);
}

TEST(PackedDataset, DocumentsOfATokenSequenceEndWithTheirLastToken) {
  const std::vector<TokenId> ids{5, 6, 0, 0, 7, 0, 8, 9};
  const auto documents = std::make_shared<TokenDocuments>(TokenArray::from_ids(ids), 0);
  EXPECT_EQ(documents->lengths(), (std::vector<int64_t>{3, 1, 2, 2}));
  EXPECT_EQ(documents->get(0), (TokenDocument{5, 6, 0}));
  EXPECT_EQ(documents->get(1), (TokenDocument{0}));
  EXPECT_EQ(documents->get(3), (TokenDocument{8, 9}));
  EXPECT_EQ(documents->length(2), 2);
  EXPECT_THROW((void)documents->get(4), IndexError);
  EXPECT_EQ(TokenDocuments(TokenArray(), 0).size(), 0);
  EXPECT_EQ(TokenDocuments(TokenArray::from_ids(std::vector<TokenId>{1, 0}), 0).size(), 1);
  const PackedDataset packed(documents, {.context = 8});
  EXPECT_EQ(packed.get(0).inputs.to_vector<int64_t>(),
            (std::vector<int64_t>(ids.begin(), ids.end())));
}

}  // namespace
}  // namespace tessera::data::test_packed_dataset
