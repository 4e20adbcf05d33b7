// Streams that ranks share, and batches that rank 0 makes for all. IDs (DL) are the scenarios of
// docs/accelerate-scenarios.md; traps are those that other libraries fell into.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <tessera/accelerate/loaders/loader_plan.h>
#include <tessera/accelerate/loaders/parts_relay.h>
#include <tessera/accelerate/process/operations.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/transport/collectives.h>

#include "accelerate/loader_fixture.h"
#include "message_of.h"

namespace tessera::accelerate::test_facade_streams {
namespace {

// ---- DL-2: streams
// -------------------------------------------------------------------------------

TEST(FacadeStreams, DL_2_RanksOfAStreamInterleaveToTheStreamAndItsStart) {
  for (const int n : {2, 3}) {
    for (const int64_t size : {1, 2, 7, 12, 23, 24}) {
      for (const bool dispatch : {false, true}) {
        const Ranks ranks = on_ranks(n, {.dispatch_batches = dispatch}, stream_loader(size, 4));
        Indices all;
        for (size_t turn = 0; turn < ranks[0].size(); ++turn) {
          for (const Batches& batches : ranks) {
            ASSERT_EQ(batches.size(), ranks[0].size());
            EXPECT_EQ(batches[turn].size(), 4U);
            all.insert(all.end(), batches[turn].begin(), batches[turn].end());
          }
        }
        for (size_t i = 0; i < all.size(); ++i) {
          // Beyond the end the first turn again.
          const int64_t beyond = static_cast<int64_t>(i) - size;
          EXPECT_EQ(all[i],
                    beyond < 0 ? static_cast<int64_t>(i) : beyond % std::min<int64_t>(size, 4 * n));
        }
      }
    }
  }
}

// A length that nobody knows before, and that differs between epochs.
struct RandomLengthStream : data::IterableDataset<std::string> {
  std::unique_ptr<data::ExampleStream<std::string>> open(int64_t epoch) const override {
    struct Pass : data::ExampleStream<std::string> {
      std::optional<std::string> next() override {
        if (next_ == size_) return std::nullopt;
        const int64_t number = next_++;
        return std::string(static_cast<size_t>(number % 5), 'x') + std::to_string(number);
      }
      int64_t size_ = 0, next_ = 0;
    };
    auto pass = std::make_unique<Pass>();
    pass->size_ = 5 + static_cast<int64_t>(philox4x32(9, static_cast<uint64_t>(epoch), 0)[0] % 20);
    return pass;
  }
};

TEST(FacadeStreams, DL_2_StringsOfAStreamOfUnknownLengthAreShared) {
  compared_ranks(2, [](int rank) {
    for (const bool dispatch : {false, true}) {
      LoaderPlan plan(world(), {.dispatch_batches = dispatch});
      StreamLoader<std::string> loader(std::make_shared<RandomLengthStream>(), {.batch_size = 2});
      plan.prepare(loader);
      std::set<size_t> lengths;
      for (int epoch = 0; epoch < 4; ++epoch) {
        std::vector<std::string> own;
        int64_t samples = 0;
        for (std::vector<std::string>& batch : loader) {
          EXPECT_EQ(batch.size(), 2U);
          own.insert(own.end(), batch.begin(), batch.end());
          samples += loader.batch_samples();
        }
        const auto pass = RandomLengthStream().open(epoch);
        std::vector<std::string> all;
        while (auto text = pass->next()) all.push_back(*text);
        lengths.insert(all.size());
        EXPECT_EQ(own.front(), all[rank == 0 ? 0 : 2]);
        EXPECT_EQ(own.size(), (all.size() + 3) / 4 * 2);
        EXPECT_EQ(reduce(scalar_tensor(samples, kI64), RankReduction::kSum).item<int64_t>(),
                  static_cast<int64_t>(all.size()));
      }
      EXPECT_GT(lengths.size(), 1U);
    }
  });
}

// Traps: with upstream's shards of iterable data every rank reads the whole stream.
TEST(FacadeStreams, DL_2_ByDefaultOnlyRank0OpensAStream) {
  compared_ranks(3, [](int rank) {
    const auto stream = std::make_shared<NumberStream>(30);
    StreamLoader<int64_t> loader(stream, {.batch_size = 2});
    LoaderPlan plan;
    plan.prepare(loader);
    EXPECT_EQ(plan.mode(loader), LoaderMode::kDispatched);
    EXPECT_EQ(epoch_of(loader).size(), 5U);
    EXPECT_EQ(stream->opened, rank == 0 ? 1 : 0);
    EXPECT_EQ(stream->read, rank == 0 ? 30 : 0);
  });
}

TEST(FacadeStreams, DL_2_RanksReadTheirOwnPartsOfAStream) {
  compared_ranks(2, [](int rank) {
    const auto stream = std::make_shared<NumberParts>();
    StreamLoader<int64_t> loader(stream, {.batch_size = 2});
    LoaderPlan plan;
    plan.prepare(loader);
    EXPECT_EQ(plan.mode(loader), LoaderMode::kParts);
    for (int epoch = 0; epoch < 2; ++epoch) {
      EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{0, 1}, {2, 20}, {21, 0}, {0, 1}}
                                             : Batches{{10, 11}, {12, 13}, {14, 30}, {31, 10}}));
    }
    EXPECT_EQ(samples_of(loader), (rank == 0 ? Indices{2, 2, 1, 0} : Indices{2, 2, 2, 1}));
    EXPECT_EQ(stream->opened, 6);  // its two parts in three epochs
    {
      const EvenBatchesScope uneven(plan, false);
      EXPECT_EQ(epoch_of(loader), (rank == 0 ? Batches{{0, 1}, {2, 20}, {21}}
                                             : Batches{{10, 11}, {12, 13}, {14, 30}, {31}}));
    }
    StreamLoader<int64_t> dropping(stream, {.batch_size = 2, .drop_last = true});
    plan.prepare(dropping);
    EXPECT_EQ(epoch_of(dropping),
              (rank == 0 ? Batches{{0, 1}, {2, 20}} : Batches{{10, 11}, {12, 13}}));
    StreamLoader<int64_t> dispatched(stream, {.batch_size = 2});
    LoaderPlan asked(world(), {.dispatch_batches = true});
    asked.prepare(dispatched);
    EXPECT_EQ(asked.mode(dispatched), LoaderMode::kDispatched);
  });
  compared_ranks(3, [](int) {  // a state of two ranks
    StreamLoader<int64_t> loader(std::make_shared<NumberParts>(), {.batch_size = 2});
    LoaderPlan plan;
    plan.prepare(loader);
    EXPECT_EQ(plan.mode(loader), LoaderMode::kParts);
    loader.next();
    StateDict state = loader.state_dict();
    state.set("ranks", scalar_tensor(int64_t{2}, kI64));
    EXPECT_THROW(loader.load_state_dict(state), ConfigError);
  });
}

// ---- Dispatching
// ---------------------------------------------------------------------------------

struct Sentence {
  Tensor ids;
  int64_t valid = 0;
  std::map<std::string, std::vector<Tensor>> more;
  std::optional<Tensor> label;
  std::string text;
  void visit_tensors(auto&& visit) { visit(ids), visit(more), visit(label), visit(text); }
};
struct Word {
  int64_t number;
};
struct Opaque {
  explicit Opaque(int64_t number) : number(number) {}
  int64_t number;
};
}  // namespace
}  // namespace tessera::accelerate::test_facade_streams

template <>
struct tessera::data::Collate<tessera::accelerate::test_facade_streams::Word> {
  static accelerate::test_facade_streams::Sentence batch(
      std::span<accelerate::test_facade_streams::Word> words) {
    accelerate::test_facade_streams::Sentence sentence;
    int64_t longest = 0;
    for (const auto& word : words) longest = std::max(longest, word.number);
    sentence.ids = raw::full({std::ssize(words), longest}, longest, kI64);  // its own padding
    sentence.more["a"] = {raw::full({2}, longest, kBF16), Tensor()};
    if (longest % 2 == 0) sentence.label = raw::full({}, 1, kBool);
    sentence.text = "up to " + std::to_string(longest);
    return sentence;
  }
};

template <>
struct tessera::data::Collate<tessera::accelerate::test_facade_streams::Opaque> {
  static accelerate::test_facade_streams::Opaque batch(
      std::span<accelerate::test_facade_streams::Opaque> examples) {
    return examples[0];
  }
};

namespace tessera::accelerate::test_facade_streams {
namespace {

struct Opaques : data::Dataset<Opaque> {
  int64_t size() const override { return 4; }
  Opaque get(int64_t index) const override { return Opaque(index); }
};
struct Words : data::Dataset<Word> {
  int64_t size() const override { return 7; }
  Word get(int64_t index) const override { return {index + 1}; }
};

TEST(FacadeStreams, DL_2_DispatchedBatchesArriveWhole) {
  compared_ranks(2, [](int rank) {
    LoaderPlan plan(world(), {.dispatch_batches = true});
    DataLoader<Word> loader(std::make_shared<Words>(), {.batch_size = 2});
    plan.prepare(loader);
    // Batches of one turn may have different shapes, which upstream refuses.
    const Indices longest = rank == 0 ? Indices{2, 6} : Indices{4, 7};
    size_t turn = 0;
    for (Sentence& batch : loader) {
      const int64_t length = longest[turn++];
      EXPECT_EQ(batch.ids.shape(), Shape({2, length}));
      EXPECT_EQ(batch.ids.to_vector<int64_t>(), Indices(static_cast<size_t>(2 * length), length));
      EXPECT_EQ(batch.more.at("a")[0].dtype(), kBF16);
      EXPECT_EQ(batch.more.at("a")[0].to_vector<int64_t>(), (Indices{length, length}));
      EXPECT_FALSE(batch.more.at("a")[1].defined());
      EXPECT_EQ(batch.label.has_value(), length % 2 == 0);
      EXPECT_EQ(batch.text, "up to " + std::to_string(length));
      EXPECT_EQ(batch.valid, rank == 1 && turn == 2 ? 1 : 2);
    }
    EXPECT_EQ(turn, 2U);
  });
}

// Trap: upstream broadcasts the batches of all ranks to every rank.
TEST(FacadeStreams, DL_2_ARankReceivesItsOwnBatchOnly) {
  constexpr int kRanks = 4;
  compared_ranks(kRanks, [](int rank) {
    LoaderPlan plan(world(), {.dispatch_batches = true});
    const auto loader = numbers_loader(64 * kRanks, 64)();
    plan.prepare(*loader);
    const distributed::CommTrace::Scope scope(world().trace());
    epoch_of(*loader);
    int64_t bytes = 0;
    for (const distributed::CommRecord& record : scope.records()) {
      EXPECT_EQ(record.operation, distributed::Operation::kScatter);
      bytes += record.bytes;
    }
    const int64_t own = 64 * 8;  // and headers of a batch and of the end
    EXPECT_GE(bytes, rank == 0 ? 0 : own);
    EXPECT_LE(bytes, (rank == 0 ? 0 : own) + 256);
  });
}

// A stream that breaks behind its 5th example, which the look-ahead at the 4th meets early.
struct BrokenStream : data::IterableDataset<int64_t> {
  std::unique_ptr<data::ExampleStream<int64_t>> open(int64_t) const override {
    struct Pass : data::ExampleStream<int64_t> {
      std::optional<int64_t> next() override {
        if (next_ == 4) throw IoError("the line is cut");
        return next_++;
      }
      int64_t next_ = 0;
    };
    return std::make_unique<Pass>();
  }
};

TEST(FacadeStreams, DL_4_WhatLookingAheadMeetsBelongsToTheNextBatch) {
  for (const int workers : {0, 1}) {
    LoaderPlan plan;
    StreamLoader<int64_t> loader(std::make_shared<BrokenStream>(),
                                 {.batch_size = 2, .workers = workers});
    plan.prepare(loader);
    Batches seen;
    EXPECT_THROW(
        {
          for (Tensor& batch : loader) {
            EXPECT_FALSE(plan.end_of_loader());
            seen.push_back(values_of(batch));
          }
        },
        IoError);
    EXPECT_EQ(seen, (Batches{{0, 1}, {2, 3}}));
    EXPECT_EQ(loader.cursor(), (data::LoaderCursor{0, 4}));
    EXPECT_EQ(plan.active(), nullptr);
  }
}

TEST(FacadeStreams, DL_2_APartThatCannotBeReadOrIsEmptyIsAnErrorOnAllRanks) {
  struct Parts : NumberParts {
    explicit Parts(bool broken) : broken_(broken) {}
    int64_t num_parts() const override { return 2; }
    std::unique_ptr<data::ExampleStream<int64_t>> open_part(int64_t, int64_t part) const override {
      if (part == 1 && broken_) throw IoError("the file is gone");
      return std::make_unique<Pass>(part == 1 ? Indices{} : Indices{1, 2, 3});
    }
    bool broken_;
  };
  compared_ranks(2, [](int rank) {
    LoaderPlan plan;
    StreamLoader<int64_t> broken(std::make_shared<Parts>(true), {.batch_size = 2});
    plan.prepare(broken);
    if (rank == 0) {
      EXPECT_THROW(broken.next(), DistributedError);
    } else {
      EXPECT_THROW(broken.next(), IoError);
    }
    StreamLoader<int64_t> empty(std::make_shared<Parts>(false), {.batch_size = 2});
    plan.prepare(empty);
    EXPECT_THROW(empty.next(), DistributedError);
    const EvenBatchesScope uneven(plan, false);
    EXPECT_EQ(epoch_of(empty), (rank == 0 ? Batches{{1, 2}, {3}} : Batches{}));
  });
}

// What ranks agree on before each batch, for every state of three ranks: without a batch, with
// one, with one that is filled up alone, and with the last one.
TEST(FacadeStreams, DL_2_WhatRanksWithPartsAgreeOnBeforeABatch) {
  struct State {
    bool batch;
    int64_t samples;
    bool last;
  };
  const State states[] = {{false, 0, false}, {true, 2, false}, {true, 0, true}, {true, 1, true}};
  compared_ranks(3, [&](int rank) {
    for (const bool drop_last : {false, true}) {
      PartsRelay relay(world(), drop_last);
      EXPECT_TRUE(relay.makes_batches());
      for (int number = 0; number < 64; ++number) {
        const State of[] = {states[number % 4], states[number / 4 % 4], states[number / 16]};
        int64_t none = 0, samples = 0, last = 0;
        for (const State& one : of) {
          none += !one.batch, samples += one.samples, last += one.last;
        }
        const State& own = of[rank];
        data::MadeBatch made;
        if (own.batch) made.batch = std::make_shared<int>(rank);
        made.samples = own.samples, made.last = own.last;
        SCOPED_TRACE(std::to_string(number) + (drop_last ? ", drops" : ""));
        if (drop_last ? none > 0 : samples == 0) {
          EXPECT_EQ(relay.exchange(made, nullptr).batch, nullptr);
        } else if (none > 0) {
          const std::string message =
              message_of<DistributedError>([&] { relay.exchange(made, nullptr); });
          EXPECT_TRUE(mentions(message, std::to_string(none) + " of the ranks have no example"))
              << message;
        } else {
          const data::MadeBatch agreed = relay.exchange(made, nullptr);
          EXPECT_EQ(agreed.batch, made.batch);
          EXPECT_EQ(agreed.samples, made.samples);
          EXPECT_EQ(agreed.last, drop_last ? last > 0 : last == 3);
        }
      }
      // One rank's error is every rank's.
      const auto failing = [&] {
        relay.exchange({}, rank == 1 ? std::make_exception_ptr(IoError("gone")) : nullptr);
      };
      EXPECT_TRUE(mentions(message_of(failing), rank == 1 ? "gone" : "rank 1 could not read"));
    }
  });
}

TEST(FacadeStreams, DL_2_WhatRank0CannotReadIsAnErrorOnAllRanks) {
  struct Broken : data::Dataset<int64_t> {
    int64_t size() const override { return 12; }
    int64_t get(int64_t index) const override {
      if (index == 6) throw IoError("the file is gone");
      return index;
    }
  };
  for (const int workers : {0, 1}) {
    compared_ranks(2, [workers](int rank) {
      LoaderPlan plan(world(), {.dispatch_batches = true});
      DataLoader loader(std::make_shared<Broken>(), {.batch_size = 2, .workers = workers});
      plan.prepare(loader);
      EXPECT_EQ(loader.next()->numel(), 2);
      const auto message = [&](auto error) -> std::string {
        try {
          loader.next();
        } catch (const decltype(error)& thrown) {
          return thrown.what();
        }
        return "nothing was thrown";
      };
      const std::string text = rank == 0 ? message(IoError("")) : message(DistributedError(""));
      EXPECT_NE(text.find("example 6"), std::string::npos) << text;
      EXPECT_NE(text.find("the file is gone"), std::string::npos) << text;
      EXPECT_EQ(loader.cursor(), (data::LoaderCursor{0, 4}));
      distributed::barrier();  // the ranks are in step
    });
  }
}

TEST(FacadeStreams, DL_2_BatchesThatCannotBeMadeAnewAreNotDispatched) {
  compared_ranks(2, [](int) {
    LoaderPlan plan(world(), {.dispatch_batches = true});
    DataLoader<Opaque> loader(std::make_shared<Opaques>());
    EXPECT_THROW(plan.prepare(loader), UnsupportedError);
    LoaderPlan sharded;
    sharded.prepare(loader);
    EXPECT_EQ(loader.size(), 2);
  });
}

}  // namespace
}  // namespace tessera::accelerate::test_facade_streams
