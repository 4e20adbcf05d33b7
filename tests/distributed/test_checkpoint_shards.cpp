// Checkpoints of tensors that lie in parts: saved in any way by any number of ranks, loaded in any
// other by any other number.
// ctest labels: threads
#include <atomic>
#include <filesystem>
#include <mutex>
#include <numeric>

#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/distributed/checkpoint/commit.h>

#include "distributed/dtensor_fixture.h"
#include "distributed/parts_training.h"
#include "finished_process.h"
#include "thinned.h"

namespace tessera::distributed::test_checkpoint_shards {
namespace {

using accelerate::StateIo;
using accelerate::StateIoOptions;
using Way = Lying::Way;

class ShardCheckpoints : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(1); }
  std::string path(const std::string& name) const { return folder_.path(name); }
  TestFolder folder_;
};

std::vector<Lying> ways() {
  std::vector<Lying> all;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Way way : {Way::kPlain, Way::kReplicate, Way::kRows, Way::kFlat}) {
      all.push_back({ranks, way});
    }
  }
  all.push_back({4, Way::kRows, true});
  all.push_back({4, Way::kFlat, true});
  all.push_back({3, Way::kColumns});
  all.push_back({2, Way::kBlocks});
  all.push_back({4, Way::kBlocks, true});
  all.push_back({6, Way::kBlocks, true});
  all.push_back({8, Way::kFlat});
  return all;
}

std::string bits_after(int steps) {
  PartsTraining training({1, Way::kPlain});
  training.train(steps);
  return training.bits();
}

void save_after(int steps, const Lying& lying, const std::string& folder) {
  compared_ranks(lying.ranks, [&](int) {
    PartsTraining training(lying);
    training.train(steps);
    StateIo().save_state(training.state(), folder);
  });
}

// ---- Saved and loaded --------------------------------------------------------------------------

TEST_F(ShardCheckpoints, EveryWayLoadsIntoEveryOtherAndGoesOnAsIfNothingHadHappened) {
  const std::string saved = bits_after(3), expected = bits_after(5);
  int count = 0;
  for (const Lying& from : tests::thinned(ways(), 4)) {
    const std::string folder = path(std::to_string(count++));
    save_after(3, from, folder);
    for (const Lying& to : tests::thinned(ways(), 3)) {
      compared_ranks(to.ranks, [&](int) {
        PartsTraining training(to);
        // A fresh one has no moments yet; another one has others.
        training.train(to.ranks % 2);
        StateIo().load_state(training.state(), folder);
        EXPECT_TRUE(training.bits() == saved) << from.describe() << " to " << to.describe();
        training.train(2);
        EXPECT_TRUE(training.bits() == expected) << from.describe() << " to " << to.describe();
      });
    }
  }
}

TEST_F(ShardCheckpoints, MastersOf16BitPartsGoOnToo) {
  const auto make = [](const Lying& lying) {
    return std::make_unique<PartsTraining>(lying, 5, kBF16);
  };
  const auto plain = make({1, Way::kPlain});
  plain->train(2);
  const std::string saved = plain->bits();
  plain->train(2);
  const std::string expected = plain->bits();
  const Lying some[] = {{1, Way::kPlain}, {2, Way::kRows}, {3, Way::kFlat}, {4, Way::kFlat, true}};
  for (const Lying& from : some) {
    compared_ranks(from.ranks, [&](int) {
      const auto training = make(from);
      training->train(2);
      EXPECT_TRUE(training->optimizer.state_dict().contains("state.cube.master"));
      StateIo().save_state(training->state(), path("half"));
    });
    for (const Lying& to : some) {
      compared_ranks(to.ranks, [&](int) {
        const auto training = make(to);
        StateIo().load_state(training->state(), path("half"));
        EXPECT_TRUE(training->bits() == saved) << from.describe() << " to " << to.describe();
        training->train(2);
        EXPECT_TRUE(training->bits() == expected) << from.describe() << " to " << to.describe();
      });
    }
  }
}

TEST_F(ShardCheckpoints, ALoadNeedsMemoryForThePartsAndNotForTheWhole) {
  struct Table : nn::Module<Table> {
    explicit Table(const Tensor& table) { parameter("table", table); }
    Tensor forward(const Tensor& x) { return x; }
  };
  const auto with_table = [&](int ranks, const Placement& placement, const auto& body) {
    compared_ranks(ranks, [&](int) {
      manual_seed(7);
      Mesh mesh(world());
      Table model(distribute_tensor(numbered({64, 256}), mesh, {placement}));
      optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
      sum(full_tensor(model.parameters()[0])).backward();
      optimizer.step();
      optimizer.zero_grad();
      body(accelerate::TrainingState{.models = {&model}, .optimizers = {&optimizer}});
    });
  };
  with_table(3, Shard(0), [&](const accelerate::TrainingState& state) {
    StateIo().save_state(state, path("table"));
  });
  for (const Placement& placement : {Placement(Shard(0)), Placement(FlatShard{0, 2048})}) {
    with_table(8, placement, [&](const accelerate::TrainingState& state) {
      const auto stats = memory_stats();
      const int64_t before = stats->current();
      stats->reset_peak();
      StateIo().load_state(state, path("table"));
      // Two moments, as they are read and as they are kept, of an eighth each.
      EXPECT_LT(stats->peak() - before, 64 * 256 * 4 * 5 / 8) << describe(placement);
    });
  }
}

TEST_F(ShardCheckpoints, EveryPairOfCutsOfTwoAxesIsReadAsItIsHeld) {
  const Placements all[] = {
      {Replicate(), Replicate()},
      {Replicate(), Shard(0)},
      {Shard(0), Replicate()},
      {Shard(1), Shard(0)},
      {Shard(0), Shard(0)},
      {StridedShard(0, 2), Shard(0)},
      {Replicate(), FlatShard{5, 22}},
      {FlatShard{2, 40}, Replicate()},
      {Shard(1), Shard(1)},
  };
  const Shape shape = {7, 5};
  compared_ranks(4, [&](int) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}});
    const Tensor whole = numbered(shape);
    for (const Placements& from : all) {
      // Chunks of two rows or less: boxes cut across them.
      CheckpointSaver().save(path("w"),
                             items_of("w", distribute_tensor(whole, mesh, from), world()),
                             {.chunk_bytes = 40});
      CheckpointReader reader(path("w"));
      for (const Placements& to : all) {
        const Tensor read = read_as(reader, "w", DTensorSpec{&mesh, to, shape});
        expect_equal(to_local(read), part_by_hand(whole, mesh, to),
                     describe(from) + " to " + describe(to));
      }
    }
  });
}

TEST_F(ShardCheckpoints, EveryElementIsWrittenOnceWhateverIsCopied) {
  // Of model and optimizer, whoever holds them: the tied one once.
  int64_t expected = 0;
  for (const Lying& lying : ways()) {
    save_after(1, lying, path("one"));
    const CheckpointReader reader(path("one"));  // checks that parts tile
    int64_t bytes = 0;
    for (const auto& [name, tensor] : reader.tensors()) {
      if (name.starts_with("random.")) continue;
      EXPECT_NE(name, "model.0.again") << lying.describe();
      for (const SavedChunk& chunk : tensor.chunks) bytes += static_cast<int64_t>(chunk.length);
    }
    if (expected == 0) expected = bytes;
    EXPECT_EQ(bytes, expected) << lying.describe();
    EXPECT_EQ(reader.metadata().at("tied:model.0.again"), "model.0.last") << lying.describe();
    EXPECT_GE(bytes, 3 * 4 * PartsTraining::kElements);
  }
}

// Rank 0 of four has no elements of the tied one; the last rank none of the first.
TEST_F(ShardCheckpoints, RanksWithoutElementsKnowTiesAndNamesToo) {
  compared_ranks(8, [&](int rank) {
    PartsTraining training({8, Way::kFlat});
    const StateDict state = training.model.state_dict();
    EXPECT_EQ(state.at("last").numel() > 0, rank >= 6);
    TiedNames tied;
    for (const auto& [name, tensor] : state) {
      const std::string* first = tied.first_name(name, tensor);
      EXPECT_EQ(first == nullptr ? "" : *first, name == "again" ? "last" : "") << name;
    }
  });
}

// What each rank writes, of a table large enough to be dealt by chunks.
std::vector<int64_t> bytes_by_rank(const std::string& folder, int ranks) {
  std::vector<int64_t> bytes(static_cast<size_t>(ranks));
  const CheckpointReader reader(folder);
  for (const auto& [name, tensor] : reader.tensors()) {
    for (const SavedChunk& chunk : tensor.chunks) {
      const int rank = std::stoi(chunk.file.substr(chunk.file.find('-') + 1));
      bytes[static_cast<size_t>(rank)] += static_cast<int64_t>(chunk.length);
    }
  }
  return bytes;
}

TEST_F(ShardCheckpoints, RanksThatHoldTheSameShareTheWriting) {
  const Shape shape = {128, 16};
  const int64_t total = 128 * 16 * 4, chunk = 512;
  const Placements cases[] = {
      {Replicate(), Shard(0)}, {Shard(0), Replicate()},    {Replicate(), FlatShard{0, 1024}},
      {Shard(1), Replicate()}, {Replicate(), Replicate()}, {Shard(0), Shard(0)},
  };
  for (const Placements& placements : cases) {
    compared_ranks(4, [&](int rank) {
      Mesh mesh(world(), {{"a", 2}, {"b", 2}});
      const Tensor w = distribute_tensor(randn(shape), mesh, placements);
      const std::vector<SaveItem> items = items_of("w", w, world());
      EXPECT_EQ(items.size(), 1u);
      CheckpointSaver().save(path("w"), items, {.chunk_bytes = chunk});
      if (rank != 0) return;
      const std::vector<int64_t> bytes = bytes_by_rank(path("w"), 4);
      EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), total);
      for (const int64_t own : bytes) EXPECT_EQ(own, total / 4) << describe(placements);
    });
  }
}

TEST_F(ShardCheckpoints, ARankReadsOnlyWhatItNeeds) {
  const Shape shape = {64, 8};
  CheckpointSaver saver;
  const Tensor whole = reshape(to(arange(512), kF32), shape);
  const SaveItem item = SaveItem::whole("w", whole);
  saver.save(path("w"), std::span(&item, 1), {.chunk_bytes = 64});
  // Damage to the last row is seen by who reads it.
  {
    const CheckpointReader reader(path("w"));
    const SavedChunk& last = reader.tensor("w").chunks.back();
    std::fstream file(path("w/" + last.file), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(last.offset));
    file.put('\7');
  }
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world());
    for (const Placement& placement : {Placement(Shard(0)), Placement(FlatShard{3, 130})}) {
      CheckpointReader reader(path("w"));
      const DTensorSpec spec{&mesh, {placement}, shape};
      if (rank == 3) {
        EXPECT_THROW(read_as(reader, "w", spec), FormatError);
      } else {
        const Tensor part = read_as(reader, "w", spec);
        EXPECT_EQ(spec_of(part), spec);
        EXPECT_EQ(to_local(part).to_vector(),
                  to_local(redistribute(from_local(whole, mesh, {Replicate()}), {placement}))
                      .to_vector());
      }
    }
  });
}

TEST_F(ShardCheckpoints, ATensorWithoutElementsKeepsItsName) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    for (const Placement& placement : {Placement(Shard(0)), Placement(FlatShard{2, 1})}) {
      const Tensor none = distribute_tensor(zeros({0, 4}), mesh, {placement});
      CheckpointSaver().save(path("none"), items_of("none", none, world()));
      CheckpointReader reader(path("none"));
      EXPECT_EQ(describe(read_as(reader, "none", spec_of(none))), describe(none));
    }
  });
}

TEST_F(ShardCheckpoints, AnAsynchronousSaveHoldsThePartsOfItsCall) {
  const std::string saved = bits_after(3);
  for (const Lying& lying :
       {Lying{3, Way::kRows}, Lying{3, Way::kFlat}, Lying{4, Way::kFlat, true}}) {
    compared_ranks(lying.ranks, [&](int) {
      PartsTraining training(lying);
      training.train(3);
      // The second half of its bytes is written when this rank has trained on.
      std::atomic<bool> trained{false};
      StateIoOptions options;
      options.asynchronous = true;
      options.at_stage = [&](SaveStage stage) {
        if (stage == SaveStage::kHalfWritten) trained.wait(false);
      };
      StateIo io(options);
      io.save_state(training.state(), path("later"));
      training.train(2);
      trained = true;
      trained.notify_all();
      io.wait();
      io.load_state(training.state(), path("later"));
      EXPECT_TRUE(training.bits() == saved) << lying.describe();
    });
  }
}

// The comparison above is worth something: one rank that saves what it had a step ago shows.
TEST_F(ShardCheckpoints, AStaleShardIsNoticed) {
  const std::string saved = bits_after(3);
  for (const Way way : {Way::kRows, Way::kFlat}) {
    compared_ranks(3, [&](int rank) {
      PartsTraining training({3, way});
      training.train(2);
      const StateDict before = training.model.state_dict().clone();
      training.train(1);
      const std::string name = way == Way::kRows ? "bias" : "cube";
      if (rank == 1) {
        const NoGradGuard no_grad;
        copy_(to_local(training.model.state_dict().at(name)), to_local(before.at(name)));
      }
      StateIo().save_state(training.state(), path("stale"));
      PartsTraining other({3, Way::kReplicate});
      StateIo().load_state(other.state(), path("stale"));
      EXPECT_TRUE(other.bits() != saved);
    });
  }
}

// ---- What does not fit -------------------------------------------------------------------------

TEST_F(ShardCheckpoints, OneErrorListsAllThatDoesNotFitAlikeOnAllRanks) {
  save_after(1, {2, Way::kRows}, path("five"));
  for (const Way way : {Way::kRows, Way::kFlat, Way::kReplicate}) {
    std::mutex mutex;
    std::vector<std::string> texts;
    compared_ranks(3, [&](int) {
      struct Other : nn::Module<Other> {
        explicit Other(PartsTraining& like) {
          Mesh& mesh = *like.mesh;
          parameter("extra", distribute_tensor(zeros({4}), mesh, {Shard(0)}));
          parameter("table", distribute_tensor(zeros({1, 6}), mesh, {Shard(1)}));
          parameter("cube",
                    distribute_tensor(zeros({6, 3, 4}), mesh, {Shard(0)}));  // local [2, 3, 4]
          parameter("bias", distribute_tensor(zeros({7}), mesh, {Shard(0)}));
        }
        Tensor forward(const Tensor& x) { return x; }
      };
      PartsTraining training({3, way});
      const std::string before = training.bits();
      Other other(training);
      accelerate::TrainingState state = training.state();
      state.models = {&other};
      const std::string text =
          message_of<ValueError>([&] { StateIo().load_state(state, path("five")); });
      for (const char* part : {
               "missing in the state (1):\n    extra",
               "unexpected in the state",
               "\n    scale",
               "of another shape (2):\n    table: the module has f32[1, 6] on mesh(dp=3): "
               "[Shard(1)], the state has f32[5, 3] cpu\n    cube: the module has f32[6, 3, 4]",
           }) {
        EXPECT_NE(text.find(part), std::string::npos) << part << " is not in " << text;
      }
      EXPECT_TRUE(training.bits() == before) << "nothing was written";
      const std::lock_guard lock(mutex);
      texts.push_back(text);
    });
    ASSERT_EQ(texts.size(), 3u);
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  }
}

TEST_F(ShardCheckpoints, WhatCannotBeSavedInPartsIsATypedErrorOnEveryRank) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}});
    const auto save = [&](const Tensor& tensor) {
      CheckpointSaver().save(
          path("x"), [&](const std::string&, auto&) { return items_of("x", tensor, world()); });
    };
    const Tensor pair = distribute_tensor(zeros({4}), mesh["b"], {Shard(0)});
    EXPECT_NE(message_of<ConfigError>([&] { save(pair); })
                  .find("'x' lies on mesh(b=2) of mesh(a=2, b=2), and the 4 ranks that save are "
                        "not its ranks"),
              std::string::npos);
    const Tensor summand = from_local(zeros({4}), mesh, {Partial(), Replicate()});
    EXPECT_NE(
        message_of<UnsupportedError>([&] { save(summand); }).find("[Partial(sum), Replicate]"),
        std::string::npos);
    const Tensor meta =
        distribute_tensor(zeros({4}, {.device = kMeta}), mesh, {Replicate(), Shard(0)});
    EXPECT_THROW(save(meta), DeviceError);
    // Two parts under one name must be of one tensor, and not the same part.
    const Tensor x = zeros({2});
    const auto parts = [&](const Shape& shape, int64_t first) {
      return std::vector<SaveItem>{SaveItem::part("x", x, {4}, {0}),
                                   SaveItem::part("x", x, shape, {first})};
    };
    EXPECT_THROW(plan_chunks(parts({4}, 1), rank, 4), ValueError);
    EXPECT_THROW(plan_chunks(parts({5}, 3), rank, 4), ValueError);
    EXPECT_EQ(plan_chunks(parts({4}, 2), rank, 4).size(), 2u);
    EXPECT_FALSE(std::filesystem::exists(path("x")));
  });
}

TEST_F(ShardCheckpoints, AReadTensorHasTheShapeThatWasSaved) {
  const SaveItem item = SaveItem::whole("w", zeros({3, 4}));
  CheckpointSaver().save(path("w"), std::span(&item, 1));
  Mesh mesh(world());
  CheckpointReader reader(path("w"));
  EXPECT_THROW(read_as(reader, "w", {&mesh, {Shard(0)}, {4, 3}}), ShapeError);
  EXPECT_THROW(read_as(reader, "w", {&mesh, {Partial()}, {3, 4}}), UnsupportedError);
}

// ---- Objects of the caller ---------------------------------------------------------------------

TEST_F(ShardCheckpoints, RegisteredObjectsHaveTheirPartsToo) {
  struct Average {
    Tensor value;
    StateDict state_dict() const {
      StateDict state;
      state.set("value", value);
      return state;
    }
    void load_state_dict(const StateDict& state) { value = state.at("value"); }
  };
  const auto begin = [&](Mesh& mesh, const Placement& placement, double first) {
    const Tensor whole = reshape(to(arange(21), kF32) + Scalar(first), {7, 3});
    return Average{distribute_tensor(whole, mesh, {placement})};
  };
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    Average average = begin(mesh, Shard(0), 1);
    StateIo io;
    io.register_for_checkpointing(average);
    io.save_state({}, path("average"));
  });
  compared_ranks(2, [&](int) {
    manual_seed(7);
    Mesh mesh(world());
    Average average = begin(mesh, FlatShard{3, 14}, 50);
    const std::string described = describe(average.value);
    StateIo io;
    io.register_for_checkpointing(average);
    io.load_state({}, path("average"), {.random = accelerate::RandomNumbers::kKeep});
    EXPECT_EQ(describe(average.value), described);
    EXPECT_EQ(full_tensor(average.value).to_vector(),
              full_tensor(begin(mesh, Replicate(), 1).value).to_vector());
  });
}

}  // namespace
}  // namespace tessera::distributed::test_checkpoint_shards
