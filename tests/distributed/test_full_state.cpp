// Whole tensors of states that lie in parts: gathered to rank 0, written as safetensors, and read
// back into parts.
// ctest labels: threads
#include <filesystem>
#include <sstream>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/distributed/checkpoint/full_state.h>

#include "distributed/dtensor_fixture.h"
#include "distributed/parts_training.h"
#include "finished_process.h"

namespace tessera::distributed::test_full_state {
namespace {

using accelerate::load_model;
using accelerate::save_model;
using Way = Lying::Way;

class FullState : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(1); }
  std::string path(const std::string& name) const { return folder_.path(name); }
  TestFolder folder_;
};

const std::vector<Lying> kWays = {
    {1, Way::kFlat}, {2, Way::kRows},    {3, Way::kRows},       {3, Way::kColumns},
    {3, Way::kFlat}, {4, Way::kColumns}, {4, Way::kRows, true}, {4, Way::kFlat, true},
    {8, Way::kFlat}, {3, Way::kPlain},   {3, Way::kReplicate},
};

TEST_F(FullState, RankZeroHasEveryTensorWholeAndTheOthersNone) {
  PartsTraining plain({1, Way::kPlain});
  plain.train(2);
  const StateDict expected = plain.model.state_dict();
  for (const Lying& lying : kWays) {
    compared_ranks(lying.ranks, [&](int rank) {
      PartsTraining training(lying);
      training.train(2);
      StateDict whole;
      const std::string calls =
          calls_of([&] { whole = full_state_dict(training.model.state_dict()); });
      // Beside what the ranks agree by: a gather for each tensor that is cut, the tied one once.
      int cut = 0, gathers = 0;
      for (const auto& [name, tensor] : training.model.state_dict()) {
        if (lying.ranks == 1 || name == "again" || !is_dtensor(tensor)) continue;
        cut += is_sharding(placements_of(tensor).back());
      }
      std::istringstream words(calls);
      for (std::string word; words >> word;) gathers += word == "gather";
      EXPECT_EQ(gathers, lying.two_axes && rank >= 2 ? 0 : cut) << calls;
      EXPECT_EQ(calls.find("broadcast"), std::string::npos) << calls;
      if (rank != 0) {
        EXPECT_TRUE(whole.empty());
        return;
      }
      ASSERT_EQ(whole.size(), expected.size());
      for (const auto& [name, tensor] : whole) {
        EXPECT_FALSE(is_dtensor(tensor));
        EXPECT_EQ(tensor.device(), kCpu);
        expect_equal(tensor, expected.at(name), name + " of " + lying.describe());
      }
      EXPECT_EQ(whole.at("again").data(), whole.at("last").data()) << "tied as before";
    });
  }
}

TEST_F(FullState, EveryCutOfTwoAndThreeAxesIsPutTogether) {
  compared_ranks(8, [&](int rank) {
    Mesh mesh(world(), {{"a", 2}, {"b", 2}, {"c", 2}});
    const Tensor values = numbered({11, 5});
    const Placements cases[] = {
        {Shard(0), Shard(0), Shard(0)},
        {Shard(1), Shard(0), Shard(1)},
        {StridedShard(0, 2), Shard(1), Shard(0)},
        {Replicate(), Shard(0), Shard(0)},
        {Shard(0), Replicate(), Shard(0)},
        {FlatShard{3, 40}, Replicate(), Replicate()},
        {Replicate(), FlatShard{3, 40}, Replicate()},
    };
    StateDict state;
    for (const Placements& placements : cases) {
      state.set(describe(placements), distribute_tensor(values, mesh, placements));
    }
    const StateDict whole = full_state_dict(state);
    EXPECT_EQ(whole.size(), rank == 0 ? std::size(cases) : 0);
    for (const auto& [name, tensor] : whole) expect_equal(tensor, values, name);
    const Tensor summand = from_local(values, mesh, {Partial(), Replicate(), Replicate()});
    state.set("summand", summand);
    EXPECT_THROW(full_state_dict(state), UnsupportedError);
    StateDict meta;
    meta.set("meta", distribute_tensor(zeros({3, 4}, {.device = kMeta}), mesh, cases[0]));
    EXPECT_THROW(full_state_dict(meta), DeviceError);
    StateDict half;
    half.set("half", distribute_tensor(values, mesh["c"], {Shard(0)}));
    EXPECT_THROW(full_state_dict(half), ConfigError);
  });
}

std::string file_text(const std::string& path) {
  const MappedFile file(path);
  return std::string(file.text());
}

TEST_F(FullState, AModelInPartsIsSavedAsTheSameFilesAndLoadedIntoAnyParts) {
  PartsTraining plain({1, Way::kPlain});
  plain.train(2);
  save_model(plain.model, path("plain"));
  save_model(plain.model, path("plain_pieces"), {.max_shard_size = "90B"});
  for (const Lying& lying : kWays) {
    compared_ranks(lying.ranks, [&](int rank) {
      PartsTraining training(lying);
      training.train(2);
      if (rank == 0) std::filesystem::remove_all(path("pieces"));  // a second save has other names
      const auto saved = save_model(training.model, path("parts"));
      const auto pieces = save_model(training.model, path("pieces"), {.max_shard_size = "90B"});
      if (rank == 0) {
        EXPECT_EQ(saved.files.size(), 1u);
        EXPECT_GT(pieces.files.size(), 3u);
        for (const std::string& file : saved.files) {
          EXPECT_TRUE(file_text(path("parts/" + file)) == file_text(path("plain/" + file)))
              << lying.describe();
        }
        for (const std::string& file : pieces.files) {
          EXPECT_TRUE(file_text(path("pieces/" + file)) == file_text(path("plain_pieces/" + file)))
              << lying.describe() << ' ' << file;
        }
      }
      // Each rank takes its boxes out of the mapped file; nothing travels.
      for (const char* from : {"plain", "plain_pieces"}) {
        PartsTraining other(lying);
        EXPECT_EQ(calls_of([&] { EXPECT_TRUE(load_model(other.model, path(from)).complete()); }),
                  "");
        for (const auto& [name, tensor] : other.model.state_dict()) {
          expect_equal(is_dtensor(tensor) ? full_tensor(tensor) : tensor,
                       plain.model.state_dict().at(name), name + " of " + lying.describe());
        }
      }
    });
  }
}

TEST_F(FullState, NoRankHoldsMoreThanOneWholeTensorBesideTheResult) {
  struct Tables : nn::Module<Tables> {
    Tables(Mesh& mesh, const Placement& placement) {
      for (const char* name : {"a", "b", "c"}) {
        parameter(name, distribute_tensor(numbered({64, 256}), mesh, {placement}));
      }
    }
    Tensor forward(const Tensor& x) { return x; }
  };
  constexpr int64_t kBytes = 64 * 256 * 4, kSlack = kBytes / 2;
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world());
    for (const Placement& placement :
         {Placement(Shard(0)), Placement(Shard(1)), Placement(FlatShard{0, 4096})}) {
      const Tables model(mesh, placement);
      // What `body` needs at most beside what there is.
      const auto peak_of = [&](const auto& body) {
        const auto stats = memory_stats();
        const int64_t before = stats->current();
        stats->reset_peak();
        body();
        return stats->peak() - before;
      };
      const int64_t one = placement == Placement(Shard(1)) ? 2 * kBytes : kBytes;
      StateDict whole;
      EXPECT_LT(peak_of([&] { whole = full_state_dict(model.state_dict()); }),
                rank == 0 ? 2 * kBytes + one + kSlack : kSlack)
          << describe(placement);
      whole = {};
      EXPECT_LT(peak_of([&] { save_model(model, path("tables")); }),
                rank == 0 ? one + kSlack : kSlack)
          << describe(placement);
    }
  });
}

TEST_F(FullState, AFailureOfRankZeroEndsTheSavingOnAllRanks) {
  folder_.write("file", "is none");
  compared_ranks(3, [&](int) {
    for (const Way way : {Way::kRows, Way::kFlat, Way::kPlain}) {
      PartsTraining training({3, way});
      EXPECT_THROW(save_model(training.model, path("file")), IoError);
      int taken = 0;
      const auto body = [&](const WholeTensor& whole) {
        whole("cube"), whole("table"), ++taken;
        throw FormatError("the third is refused");
      };
      const std::string text = message_of<FormatError>(
          [&] { with_whole_tensors(training.model.state_dict(), world(), "test", body); });
      EXPECT_EQ(text, "test: rank 0: the third is refused");
      EXPECT_EQ(taken, rank() == 0 ? 1 : 0);
    }
  });
}

TEST_F(FullState, AModelOfAnotherShapeIsRefusedWithTheWholeShapes) {
  PartsTraining plain({1, Way::kPlain});
  save_model(plain.model, path("plain"));
  for (const Way way : {Way::kRows, Way::kFlat}) {
    compared_ranks(2, [&](int) {
      PartsTraining training({2, way}, 4);
      const std::string text =
          message_of<ValueError>([&] { load_model(training.model, path("plain")); });
      EXPECT_NE(text.find("table: the module has f32[4, 3] on mesh(dp=2)"), std::string::npos)
          << text;
      EXPECT_NE(text.find("the state has f32[5, 3] cpu"), std::string::npos) << text;
    });
  }
}

TEST_F(FullState, ACheckpointOfPartsIsExportedAsTheModel) {
  PartsTraining plain({1, Way::kPlain});
  plain.train(2);
  save_model(plain.model, path("plain"));
  for (const Lying& lying : kWays) {
    compared_ranks(lying.ranks, [&](int) {
      PartsTraining training(lying);
      training.train(2);
      accelerate::StateIo().save_state(training.state(), path("state"));
    });
    accelerate::export_checkpoint(path("state"), path("exported"));
    // The order of tensors is the manifest's, by name.
    const StateDict exported = load_weights(path("exported"));
    const StateDict expected = load_weights(path("plain"));
    EXPECT_EQ(exported.size(), expected.size());
    for (const auto& [name, tensor] : expected) {
      expect_equal(exported.at(name), tensor, name + " of " + lying.describe());
    }
  }
}

}  // namespace
}  // namespace tessera::distributed::test_full_state
