// Folders of the box format: what is written comes back, for any number of ranks, or an error says
// why not.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/distributed/checkpoint/checksum.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/checkpoint/manifest.h>
#include <tessera/distributed/checkpoint/reader.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "message_of.h"
#include "refusals.h"

namespace tessera::distributed::test_checkpoint {
namespace {

namespace fs = std::filesystem;

Tensor numbers(const Shape& shape, int64_t first = 0, DType dtype = kF32) {
  return raw::arange(first, 1, numel_of(shape), dtype).view(shape);
}

std::vector<double> values(const Tensor& tensor) { return tensor.to_vector(); }

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

int64_t entries_in(const std::string& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

class Checkpoints : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  TestFolder folder_;
};

TEST(Checksum, IsXXH64ByItsPublishedValuesAndInAnyPieces) {
  EXPECT_EQ(checksum_text(checksum_of("")), "ef46db3751d8e999");
  EXPECT_EQ(checksum_text(checksum_of("a")), "d24ec4f1a98c6e5b");
  EXPECT_EQ(checksum_text(checksum_of("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(checksum_text(checksum_of("Nobody inspects the spammish repetition")),
            "fbcea83c8a378bf1");
  std::string text;
  for (int i = 0; i < 200; ++i) text += static_cast<char>(i * 37);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    Checksum checksum;
    checksum.update(text.data(), cut);
    checksum.update(text.data() + cut, text.size() - cut);
    EXPECT_EQ(checksum.value(), checksum_of(text)) << cut;
  }
  // What checkpoints of earlier versions have: 64 KiB through the loop over stripes.
  std::string long_text;
  for (int i = 0; i < 65536; ++i) long_text += static_cast<char>(i * 131 + i / 256);
  EXPECT_EQ(checksum_text(checksum_of(long_text)), "c1630cca1eaa2e89");
  EXPECT_EQ(parse_checksum("44bc2cf5ad770999"), checksum_of("abc"));
  EXPECT_FALSE(parse_checksum("44BC2CF5AD770999").has_value());
  EXPECT_FALSE(parse_checksum("44bc").has_value());
}

TEST(Boxes, TileATensorOrTheProblemIsNamed) {
  const auto problem = [](const Shape& shape, std::vector<Box> boxes) {
    return tiling_problem(shape, boxes).value_or("none");
  };
  EXPECT_EQ(problem({4, 2}, {{{2, 0}, {2, 2}}, {{0, 0}, {2, 2}}}), "none");
  EXPECT_EQ(problem({4, 2}, {{{0, 0}, {4, 1}}, {{0, 1}, {3, 1}}, {{3, 1}, {1, 1}}}), "none");
  EXPECT_EQ(problem({4, 2}, {{{0, 0}, {1, 2}}, {{2, 0}, {2, 2}}}), "rows [1:2] lie in no part");
  EXPECT_EQ(problem({4, 2}, {{{0, 0}, {3, 2}}}), "rows [3:4] lie in no part");
  EXPECT_EQ(problem({4, 2}, {{{0, 0}, {4, 1}}, {{0, 1}, {3, 1}}}),
            "its parts hold 7 of 8 elements");
  EXPECT_EQ(problem({4, 2}, {{{0, 0}, {3, 2}}, {{2, 1}, {2, 1}}}),
            "the parts [0:3, 0:2] and [2:4, 1:2] share [2:3, 1:2]");
  EXPECT_EQ(problem({}, {{{}, {}}}), "none");
  EXPECT_EQ(problem({}, {}), "its one element lies in 0 parts");
  EXPECT_EQ(problem({0, 3}, {}), "none");
}

TEST_F(Checkpoints, GiveBackEveryDTypeAndLayoutBitForBit) {
  std::vector<SaveItem> items;
  for (const DType dtype : {kF64, kF32, kF16, kBF16, kI64, kI32, kU8}) {
    items.push_back(SaveItem::whole(std::string(name_of(dtype)), numbers({5, 3}).to(dtype)));
  }
  items.push_back(SaveItem::whole("bool", numbers({6}).to(kBool)));
  items.push_back(SaveItem::whole("scalar", scalar_tensor(2.5, kF64)));
  items.push_back(SaveItem::whole("empty", raw::empty({0, 4}, kF32)));
  items.push_back(SaveItem::whole("transposed", numbers({3, 4}).transpose(0, 1)));
  CheckpointSaver saver;
  saver.save(path("a"), items, {.metadata = {{"step", "12"}, {"text", "\"\n\t ü"}}});

  CheckpointReader reader(path("a"));
  EXPECT_EQ(reader.metadata().at("step"), "12");
  EXPECT_EQ(reader.metadata().at("text"), "\"\n\t ü");
  ASSERT_EQ(reader.tensors().size(), items.size());
  for (const SaveItem& item : items) {
    for (const Tensor& loaded : {reader.read(item.name), reader.view(item.name)}) {
      EXPECT_EQ(loaded.dtype(), item.tensor.dtype()) << item.name;
      EXPECT_EQ(loaded.shape(), item.tensor.shape()) << item.name;
      EXPECT_EQ(values(loaded), values(item.tensor)) << item.name;
    }
  }
  EXPECT_TRUE(reader.view("f32").storage()->is_foreign()) << "mapped, not copied";
}

TEST_F(Checkpoints, AnyBoxOfATensorIsReadAlone) {
  const Tensor whole = numbers({7, 5});
  CheckpointSaver saver;
  // Three rows a chunk.
  saver.save(path("a"), std::vector{SaveItem::whole("x", whole)}, {.chunk_bytes = 60});
  CheckpointReader reader(path("a"));
  EXPECT_EQ(reader.tensor("x").chunks.size(), 3u);
  for (int64_t row = 0; row <= 7; ++row) {
    for (int64_t rows = 0; row + rows <= 7; ++rows) {
      for (const auto& [column, columns] : {std::pair{0, 5}, {1, 3}, {4, 1}}) {
        const Box box{{row, column}, {rows, columns}};
        const Tensor expected = whole.narrow(0, row, rows).narrow(1, column, columns);
        EXPECT_EQ(values(reader.read("x", box)), values(expected)) << box;
        EXPECT_EQ(values(reader.view("x", box)), values(expected)) << box;
      }
    }
  }
  EXPECT_THROW(reader.read("x", {{0, 0}, {8, 5}}), ValueError);
  EXPECT_THROW(reader.read("y"), ValueError);
}

// AC-K1: rows that N ranks hold, read by M ranks.
TEST_F(Checkpoints, ACK1PartsThatAnyNumberOfRanksWroteAreReadByAnyOther) {
  const Tensor whole = numbers({10, 3});
  const auto rows_of = [](int rank, int ranks) {  // ceil(10 / ranks) each, as sharding cuts
    const int64_t chunk = (10 + ranks - 1) / ranks;
    const int64_t begin = std::min<int64_t>(10, rank * chunk);
    return std::pair{begin, std::min<int64_t>(10, begin + chunk) - begin};
  };
  for (const int writers : {1, 2, 3, 4}) {
    const std::string folder = path("by" + std::to_string(writers));
    compared_ranks(writers, [&](int rank) {
      const auto [begin, rows] = rows_of(rank, writers);
      const std::vector<SaveItem> items = {
          SaveItem::part("sharded", whole.narrow(0, begin, rows), {10, 3}, {begin, 0}),
          SaveItem::whole("shared", whole),
          SaveItem::part("own." + std::to_string(rank), scalar_tensor(rank, kI64), {}, {})};
      CheckpointSaver saver;
      saver.save(folder, items, {.chunk_bytes = 24});
    });
    for (const int readers : {1, 2, 3, 4}) {
      compared_ranks(readers, [&](int rank) {
        const auto [begin, rows] = rows_of(rank, readers);
        CheckpointReader reader(folder);
        reader.verify(rank, readers);
        EXPECT_EQ(reader.ranks(), writers);
        EXPECT_EQ(values(reader.read("sharded", {{begin, 0}, {rows, 3}})),
                  values(whole.narrow(0, begin, rows)));
        EXPECT_EQ(values(reader.read("shared")), values(whole));
        for (int r = 0; r < writers; ++r) {
          EXPECT_EQ(reader.read("own." + std::to_string(r)).item<int64_t>(), r);
        }
      });
    }
  }
}

// AC-K2
TEST_F(Checkpoints, ACK2WhatAllRanksHoldIsWrittenOnceAndTheWorkIsEven) {
  // A GPT of 6 x 384: one tensor is a third of all.
  std::vector<SaveItem> items = {SaveItem::whole("wte", raw::empty({50257, 384}, kF32)),
                                 SaveItem::whole("wpe", raw::empty({256, 384}, kF32))};
  for (int layer = 0; layer < 6; ++layer) {
    const std::string h = std::to_string(layer);
    items.push_back(SaveItem::whole(h + ".attn", raw::empty({1152, 384}, kF32)));
    items.push_back(SaveItem::whole(h + ".proj", raw::empty({384, 384}, kF32)));
    items.push_back(SaveItem::whole(h + ".fc", raw::empty({1536, 384}, kF32)));
    items.push_back(SaveItem::whole(h + ".out", raw::empty({384, 1536}, kF32)));
    items.push_back(SaveItem::whole(h + ".bias", raw::empty({384}, kF32)));
  }
  for (const int ranks : {2, 3, 4, 8}) {
    std::vector<double> bytes(static_cast<size_t>(ranks));
    std::vector<std::vector<Box>> boxes(items.size());
    for (const PlannedChunk& chunk : plan_chunks(items, 0, ranks)) {
      bytes[static_cast<size_t>(chunk.writer)] += 4.0 * static_cast<double>(chunk.box.numel());
      boxes[chunk.item].push_back(chunk.box);
    }
    double total = 0, most = 0;
    for (const double own : bytes) total += own, most = std::max(most, own);
    EXPECT_LE(most / (total / ranks), 1.3) << ranks << " ranks";
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_FALSE(tiling_problem(items[i].shape, boxes[i])) << items[i].name;
    }
  }
}

TEST_F(Checkpoints, ManyFilesAreWrittenWhereOneWouldGrowTooLarge) {
  CheckpointSaver saver;
  saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({64, 64}))},
             {.chunk_bytes = 1024, .file_bytes = 5000});
  CheckpointReader reader(path("a"));
  EXPECT_GE(reader.manifest().files.size(), 3u);
  EXPECT_EQ(values(reader.read("x")), values(numbers({64, 64})));
}

TEST_F(Checkpoints, AreReplacedInOneStepAndNothingElseEverIs) {
  CheckpointSaver saver;
  const auto save = [&](const std::string& name, double value, bool replace = true) {
    saver.save(path(name), std::vector{SaveItem::whole("x", raw::full({3}, value, kF32))},
               {.replace = replace});
  };
  save("a", 1);
  save("a", 2);
  EXPECT_EQ(values(CheckpointReader(path("a")).read("x"))[0], 2);
  EXPECT_EQ(entries_in(path("")), 1);
  expect_in("exists; it is left alone", message_of<ConfigError>([&] { save("a", 3, false); }));
  EXPECT_EQ(values(CheckpointReader(path("a")).read("x"))[0], 2);

  fs::create_directory(path("thesis"));
  folder_.write("thesis/chapter.txt", "ten years of work");
  expect_in("is no checkpoint", message_of<ConfigError>([&] { save("thesis", 1); }));
  folder_.write("file", "text");
  expect_in("is no checkpoint", message_of<ConfigError>([&] { save("file", 1); }));
  EXPECT_EQ(folder_.read("thesis/chapter.txt"), "ten years of work");
  fs::create_directory(path("empty"));
  save("empty", 4);
  EXPECT_EQ(values(CheckpointReader(path("empty")).read("x"))[0], 4);
  save("deep/er/still", 5);
  EXPECT_EQ(values(CheckpointReader(path("deep/er/still/")).read("x"))[0], 5);
}

TEST_F(Checkpoints, WhatAnInterruptedSaveLeftGoesWithTheNextOne) {
  fs::create_directories(path("a.tmp-77-0"));
  fs::create_directories(path("b.tmp-77-0"));
  CheckpointSaver saver;
  saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({2}))});
  EXPECT_FALSE(fs::exists(path("a.tmp-77-0")));
  EXPECT_TRUE(fs::exists(path("b.tmp-77-0"))) << "another save's";
}

// ---- Errors ------------------------------------------------------------------------------------

TEST_F(Checkpoints, MistakesInTheListAreErrorsOnEveryRank) {
  CheckpointSaver saver;
  const auto save = [&](std::vector<SaveItem> items) { saver.save(path("a"), items); };
  const SaveItem x = SaveItem::whole("x", numbers({2}));
  EXPECT_THROW(SaveItem::whole("x", Tensor()), ValueError);
  EXPECT_THROW(SaveItem::part("x", numbers({2}), {3}, {2}), ShapeError);
  expect_in("was given twice", message_of<ValueError>([&] { save({x, x}); }));
  expect_in("has no elements", message_of<DeviceError>([&] {
              save({SaveItem::whole("x", raw::empty({2}, kF32, kMeta))});
            }));
  expect_in("UTF-8",
            message_of<ValueError>([&] { save({SaveItem::whole("\xff", numbers({2}))}); }));
  expect_in("rows [2:3] lie in no part",
            message_of<ValueError>([&] { save({SaveItem::part("x", numbers({2}), {3}, {0})}); }));
  EXPECT_EQ(entries_in(path("")), 0);

  std::atomic<int> threw{0};
  compared_ranks(3, [&](int rank) {
    CheckpointSaver own;
    const std::string text = message_of<DistributedError>([&] {
      own.save(path("a"), std::vector{SaveItem::whole("x", numbers({rank == 1 ? 3 : 2}))});
    });
    expect_in("rank 1: its list of tensors", text);
    ++threw;
  });
  EXPECT_EQ(threw, 3);
  EXPECT_EQ(entries_in(path("")), 0);
}

TEST_F(Checkpoints, PlacesAndCallsThatCannotBeAreRefused) {
  CheckpointSaver saver;
  const std::vector<SaveItem> items = {SaveItem::whole("x", numbers({2}))};
  saver.save(path("a"), items);
  folder_.write("file", "text");
  const auto verify = [&](int part, int parts) {
    return [this, part, parts] { CheckpointReader(path("a")).verify(part, parts); };
  };
  const std::vector<SaveItem> nameless = {SaveItem::whole("", numbers({2}))};
  EXPECT_NO_THROW(verify(1, 2)());
  expect_refusals({
      {"needs the name of a folder; got none", [&] { saver.save("", items); }},
      {"the root folder cannot be a checkpoint; got '/'", [&] { saver.save("/", items); }},
      {"every tensor has a name; got an empty one", [&] { saver.save(path("b"), nameless); }},
      {"is a file; give the folder of a checkpoint", [&] { CheckpointReader(path("file")); }},
      {"got 0 of 0", verify(0, 0)},
      {"got -1 of 2", verify(-1, 2)},
      {"got 2 of 2", verify(2, 2)},
  });
  EXPECT_EQ(CheckpointReader(path("a")).read("x").to_vector(), (std::vector<double>{0, 1}));
}

TEST_F(Checkpoints, OneRankThatCannotWriteLeavesNothingAndAllNameIt) {
  compared_ranks(3, [&](int rank) {
    CheckpointSaver saver;
    const auto items = std::vector{SaveItem::whole("x", numbers({300}))};
    saver.save(path("a"), items);
    const std::string text = message_of<OutOfMemory>([&] {
      saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({300}, 7))},
                 {.at_stage = [&](SaveStage stage) {
                   if (rank == 2 && stage == SaveStage::kHalfWritten) {
                     throw OutOfMemory("no memory here");
                   }
                 }});
    });
    expect_in("rank 2: no memory here", text);
    EXPECT_EQ(values(CheckpointReader(path("a")).read("x"))[1], 1) << "the old one stands";
  });
  EXPECT_EQ(entries_in(path("")), 1);
}

// The file size limit makes the write itself fail, as a full disk does, without special rights.
// Most errors begin with the operation that they are told for.
TEST_F(Checkpoints, AnErrorOfAllRanksNamesItsOperationOnce) {
  for (const int ranks : {1, 2}) {
    compared_ranks(ranks, [&](int rank) {
      const auto told = [&](const char* own) {
        return message_of<FormatError>([&] {
          throw_together(rank == ranks - 1 ? std::make_exception_ptr(FormatError(own)) : nullptr,
                         "load_state");
        });
      };
      const std::string place = ranks == 1 ? "" : "rank 1: ";
      EXPECT_EQ(told("load_state: it is gone"), "load_state: " + place + "it is gone");
      EXPECT_EQ(told("model.bin: it is gone"), "load_state: " + place + "model.bin: it is gone");
    });
  }
}

TEST_F(Checkpoints, AFullDiskIsATypedErrorAndNothingStandsUnderTheName) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string text;
  try {
    CheckpointSaver saver;
    text = message_of<IoError>(
        [&] { saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({50'000}))}); });
  } catch (...) {
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  expect_in("File too large", text);
  EXPECT_EQ(entries_in(path("")), 0);
}

TEST_F(Checkpoints, AFolderThatMayNotBeWrittenIsAnIoErrorWithARemedy) {
  fs::create_directory(path("locked"));
  fs::permissions(path("locked"), fs::perms(0555));
  fs::permissions(path(""), fs::perms(0755));
  const uid_t user = ::geteuid();
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }  // root may write everywhere: be nobody
  CheckpointSaver saver;
  const std::string text = message_of<IoError>(
      [&] { saver.save(path("locked/a"), std::vector{SaveItem::whole("x", numbers({2}))}); });
  ASSERT_EQ(::seteuid(user), 0);
  expect_in("Permission denied", text);
  expect_in("choose one that can be written", text);
}

// AC-K4
TEST_F(Checkpoints, ACK4DamageIsRefusedWithFileTensorAndRemedy) {
  CheckpointSaver saver;
  const auto save = [&] {
    saver.save(path("a"), std::vector{SaveItem::whole("layer.weight", numbers({2000}))},
               {.metadata = {{"step", "1"}}});
  };
  const std::string bin = path("a/rank-0-0.bin");
  save();
  {
    std::fstream file(bin, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(5000);
    file.put(1);
  }
  std::string text =
      message_of<FormatError>([&] { CheckpointReader(path("a")).read("layer.weight"); });
  expect_in("rank-0-0.bin': tensor 'layer.weight' [0:2000] at byte 0: the checksum", text);
  expect_in("load an older checkpoint", text);
  EXPECT_THROW(CheckpointReader(path("a")).verify(), FormatError);

  fs::resize_file(bin, 7999);
  expect_in("must have 8000 bytes; it has 7999",
            message_of<FormatError>([&] { CheckpointReader(path("a")); }));
  fs::remove(bin);
  expect_in("it is missing", message_of<FormatError>([&] { CheckpointReader(path("a")); }));
  save();
  fs::remove(path("a/manifest.json"));
  expect_in("has no manifest.json", message_of<FormatError>([&] { CheckpointReader(path("a")); }));
  expect_in("there is no folder", message_of<IoError>([&] { CheckpointReader(path("b")); }));
}

// A hook's files lie in folders of their own, some of them empty; each is part of the checkpoint.
TEST_F(Checkpoints, FilesOfHooksAreListedAndVerifiedInEveryFolder) {
  const std::map<std::string, std::string> files = {{"a.txt", "1"},       {"b/a.txt", "22"},
                                                    {"b/c/d.txt", "333"}, {"e/f/g/h.txt", "4444"},
                                                    {"z.txt", ""},        {"zz/y.txt", "5"}};
  CheckpointSaver saver;
  saver.save(path("a"), [&](const std::string& folder, auto&) {
    fs::create_directories(folder + "/empty/within");
    for (const auto& [name, text] : files) {
      const fs::path file = fs::path(folder) / name;
      fs::create_directories(file.parent_path());
      std::ofstream(file) << text;
    }
    return std::vector{SaveItem::whole("x", numbers({2}))};
  });
  const CheckpointReader reader(path("a"));
  std::map<std::string, uint64_t> listed;
  for (const auto& [name, file] : reader.manifest().files) {
    if (file.checksum && !name.ends_with(".json")) listed[name] = file.bytes;
  }
  EXPECT_EQ(listed.size(), files.size());
  for (const auto& [name, text] : files) {
    ASSERT_TRUE(listed.contains(name)) << name;
    EXPECT_EQ(listed[name], text.size()) << name;
    if (text.empty()) continue;
    folder_.write("a/" + name, std::string(text.size(), 'x'));
    expect_in(name, message_of<FormatError>([&] { CheckpointReader(path("a")).verify(); }));
    folder_.write("a/" + name, text);
  }
  CheckpointReader(path("a")).verify();
}

// A manifest that was made to do harm has a right checksum.
TEST_F(Checkpoints, HostileManifestsAreRefusedFieldByField) {
  CheckpointSaver saver;
  saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({4, 2}))});
  const std::string good = folder_.read("a/manifest.json");
  const std::string body(unsealed(good, "a"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = body;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    folder_.write("a/manifest.json", sealed(text));
    return message_of<FormatError>([&] { CheckpointReader(path("a")).verify(); });
  };
  expect_in("version 1 of the format; the folder has 2", with("\"version\": 1", "\"version\": 2"));
  expect_in("'shape'", with("[4, 2], \"chunks\"", "[4, -2], \"chunks\""));
  expect_in("more than 2^63 bytes",
            with("[4, 2], \"chunks\"", "[4611686018427387904, 4], \"chunks\""));
  expect_in("whole number", with("[4, 2], \"chunks\"", "[18446744073709551615], \"chunks\""));
  expect_in("at most 16",
            with("[4, 2], \"chunks\"", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1], \"chunks\""));
  expect_in("rows [4:5] lie in no part", with("[4, 2], \"chunks\"", "[5, 2], \"chunks\""));
  expect_in("must lie within the tensor's", with("[4, 2], \"chunks\"", "[3, 2], \"chunks\""));
  expect_in("'dtype' 'f31' is none", with("\"f32\"", "\"f31\""));
  expect_in("'length' must be the bytes", with("\"length\": 32", "\"length\": 31"));
  expect_in("must lie within 'rank-0-0.bin' of 32 bytes",
            with("\"offset\": 0", "\"offset\": 9223372036854775807"));
  expect_in("must have 33 bytes; it has 32", with("{\"bytes\": 32}", "{\"bytes\": 33}"));
  expect_in("one of the listed files",
            with("\"file\": \"rank-0-0.bin\"", "\"file\": \"/etc/passwd\""));
  expect_in("a path inside the folder", with("\"rank-0-0.bin\": {",
                                             "\"../x\": {\"bytes\": 1, \"checksum\": "
                                             "\"0000000000000000\"}, \"rank-0-0.bin\": {"));
  expect_in("is there twice", with("\"version\": 1", "\"version\": 1, \"version\": 1"));
  expect_in("'tensors' is missing", with("\"tensors\"", "\"sensors\""));
  expect_in("not valid JSON", with("\"tensors\"", "tensors"));
  expect_in("nests deeper", with("\"metadata\": {}", "\"metadata\": " + std::string(5000, '[')));
}

// Sealed and nearly right: numbers that are wrong by one or by an element.
TEST_F(Checkpoints, ManifestsWhoseNumbersAreOffByOneAreRefused) {
  CheckpointSaver saver;
  saver.save(path("a"), std::vector{SaveItem::whole("x", numbers({4, 2})),
                                    SaveItem::whole("y", numbers({4, 2}, 8))});
  const std::string body(unsealed(folder_.read("a/manifest.json"), "a"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = body;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << " in " << body;
    text.replace(at, from.size(), to);
    folder_.write("a/manifest.json", sealed(text));
    return message_of<FormatError>([&] { CheckpointReader(path("a")); });
  };
  // x has bytes [0, 32) and y [64, 96), the file's last.
  const auto number = [](int64_t value) { return std::to_string(value); };
  for (const int64_t by : {-8, -7, -1, 1, 7, 8}) {
    expect_in("'length' must be", with("\"length\": 32", "\"length\": " + number(32 + by)));
    if (by < 0) continue;
    expect_in("must lie within 'rank-0-0.bin' of 96 bytes",
              with("\"offset\": 64", "\"offset\": " + number(64 + by)));
  }
  for (const int64_t offset : {96, 97, 100, 65}) {
    expect_in("must lie within", with("\"offset\": 64", "\"offset\": " + number(offset)));
  }
  for (const int64_t by : {1, 2, 3}) {
    expect_in("a multiple of", with("\"offset\": 0", "\"offset\": " + number(by)));
  }
  for (const int64_t bytes : {95, 64, 63}) {  // of the file
    expect_in("must lie within", with("{\"bytes\": 96}", "{\"bytes\": " + number(bytes) + "}"));
  }
  expect_in("must have 97 bytes", with("{\"bytes\": 96}", "{\"bytes\": 97}"));
  const std::string box = "\"box\": [[0, 0], [4, 2]]";
  for (const char* wrong : {"[[1, 0], [4, 2]]", "[[0, 1], [4, 2]]", "[[0, 0], [5, 2]]",
                            "[[0, 0], [4, 3]]", "[[4, 0], [0, 2]]", "[[0, 0], [4]]", "[[0], [4]]",
                            "[[0, 0]]", "[[0, 0], [4, 2], [4, 2]]"}) {
    with(box, "\"box\": " + std::string(wrong));
  }
  for (const char* ranks : {"0", "10000001"}) {
    expect_in("'ranks' must be", with("\"ranks\": 1", "\"ranks\": " + std::string(ranks)));
  }
  folder_.write("a/manifest.json", sealed(body));
  EXPECT_EQ(values(CheckpointReader(path("a")).read("y")), values(numbers({4, 2}, 8)));
}

// Files of chunks have no checksum of their own, as their chunks have: what only looks like one must
// have it, and holds no chunk.
TEST(Manifests, FilesOfChunksAreKnownByTheirNames) {
  const auto parsed = [](const std::string& name, bool checksum, bool chunk) {
    Manifest manifest;
    manifest.ranks = 1;
    manifest.files[name] = {.bytes = 4};
    if (checksum) manifest.files[name].checksum = 7;
    if (chunk) {
      SavedTensor& tensor = manifest.tensors["x"];
      tensor.dtype = kF32;
      tensor.shape = {1};
      tensor.chunks.push_back({.box = {{0}, {1}}, .file = name, .offset = 0, .length = 4});
    }
    parse_manifest(manifest_text(manifest), "a", true);
  };
  for (const std::string name : {"rank-0-0.bin", "rank-12-345.bin", "rank-999999999-999999999.bin",
                                 "rank-000000000-000000000.bin"}) {
    SCOPED_TRACE(name);
    EXPECT_NO_THROW(parsed(name, false, true));
  }
  for (const std::string name : {"rank--0.bin",
                                 "rank-0-.bin",
                                 "rank--.bin",
                                 "rank-.bin",
                                 "rank-0.bin",
                                 "rank-0-0-0.bin",
                                 "rank-0--0.bin",
                                 "rank-a-0.bin",
                                 "rank-0-a.bin",
                                 "rank-1a-0.bin",
                                 "rank-a1-0.bin",
                                 "rank-0-1a.bin",
                                 "rank-0-a1.bin",
                                 "rank-:-0.bin",
                                 "rank-0-:.bin",
                                 "rank-/-0.bin",
                                 "rank-0-/.bin",
                                 "rank-0-0.bim",
                                 "rank-0-0",
                                 "rack-0-0.bin",
                                 "-0-0.bin",
                                 "0-0.bin",
                                 "rank-0-0.bin.bin",
                                 "folder/rank-0-0.bin",
                                 "rank-1234567890-0.bin",
                                 "rank-0-1234567890.bin",
                                 "rank-+1-0.bin",
                                 "rank- 1-0.bin"}) {
    SCOPED_TRACE(name);
    expect_in("'checksum' is missing",
              message_of<FormatError>([&] { parsed(name, false, false); }));
    EXPECT_NO_THROW(parsed(name, true, false));
    expect_in("one of the listed files",
              message_of<FormatError>([&] { parsed(name, true, true); }));
  }
}

TEST(Manifests, NamesOfFilesStayInTheFolder) {
  const auto refused = [](const std::string& name) {
    Manifest manifest;
    manifest.ranks = 1;
    manifest.files[name] = {.bytes = 4, .checksum = 7};
    const std::string text = manifest_text(manifest);
    try {
      parse_manifest(text, "a", true);
    } catch (const FormatError& error) {
      expect_in("a path inside the folder", error.what());
      return true;
    }
    return false;
  };
  for (const std::string name : {"a", "a/b", "...", "..a", "a..", ".a", "a./b", "a/.b/c"}) {
    EXPECT_FALSE(refused(name)) << name;
  }
  EXPECT_FALSE(refused(std::string(4096, 'a')));
  EXPECT_TRUE(refused(std::string(4097, 'a')));
  for (const std::string& name :
       {std::string(), std::string("/"), std::string("/a"), std::string("a/"), std::string("a//b"),
        std::string("."), std::string(".."), std::string("a/."), std::string("a/.."),
        std::string("./a"), std::string("../a"), std::string("a/../b"), std::string("a\0b", 3),
        std::string("a/b\0", 4), std::string("manifest.json")}) {
    EXPECT_TRUE(refused(name)) << name;
  }
}

// With the right checksum: who reads another value as bool does what is undefined.
TEST_F(Checkpoints, ABoolThatIsNeitherZeroNorOneIsRefused) {
  CheckpointSaver saver;
  for (const size_t place : {0, 1, 2}) {
    for (const int value : {1, 2, 128, 255}) {
      saver.save(path("a"), std::vector{SaveItem::whole("flag", numbers({3}).to(kBool))});
      std::string bytes(3, '\1');
      bytes[place] = static_cast<char>(value);
      std::string text(unsealed(folder_.read("a/manifest.json"), "a"));
      const std::string before = checksum_text(checksum_of(folder_.read("a/rank-0-0.bin")));
      ASSERT_NE(text.find(before), std::string::npos);
      text.replace(text.find(before), before.size(), checksum_text(checksum_of(bytes)));
      folder_.write("a/manifest.json", sealed(text));
      folder_.write("a/rank-0-0.bin", bytes);
      CheckpointReader reader(path("a"));
      if (value == 1) {
        EXPECT_EQ(values(reader.read("flag")), (std::vector<double>{1, 1, 1}));
      } else {
        expect_in("a bool is 0 or 1", message_of<FormatError>([&] { reader.read("flag"); }));
      }
    }
  }
}

// Every byte of every file of a small checkpoint, with two different changes: an error that is
// typed, or what was saved.
TEST_F(Checkpoints, AnyByteThatChangesGivesATypedErrorOrTheSameTensors) {
  CheckpointSaver saver;
  saver.save(path("a"),
             std::vector{SaveItem::whole("x", numbers({4, 2})),
                         SaveItem::whole("flag", numbers({3}).to(kBool))},
             {.metadata = {{"step", "1"}}, .chunk_bytes = 16});
  int refused = 0, same = 0;
  for (const char* name : {"manifest.json", "rank-0-0.bin", "rank-0.json"}) {
    const std::string file = "a/" + std::string(name), good = folder_.read(file);
    const int descriptor = ::open(path(file).c_str(), O_WRONLY | O_CLOEXEC);  // in place: quick
    const auto put = [&](size_t at, char value) {
      ASSERT_EQ(::pwrite(descriptor, &value, 1, static_cast<off_t>(at)), 1);
    };
    for (size_t i = 0; i < good.size(); ++i) {
      for (const int flip : {1, 0x80}) {
        put(i, static_cast<char>(good[i] ^ flip));
        try {
          CheckpointReader reader(path("a"));
          reader.verify();
          EXPECT_EQ(values(reader.read("x")), values(numbers({4, 2}))) << name << " byte " << i;
          EXPECT_EQ(values(reader.read("flag")), values(numbers({3}).to(kBool)));
          EXPECT_EQ(reader.metadata().at("step"), "1");
          ++same;
          EXPECT_STREQ(name, "rank-0-0.bin") << "byte " << i << " is no space between chunks";
        } catch (const Error& error) {
          ++refused;
        }
      }
      put(i, good[i]);
    }
    ::close(descriptor);
    for (size_t size = 0; size < good.size(); size += 31) {  // truncated
      folder_.write(file, good.substr(0, size));
      EXPECT_THROW(CheckpointReader(path("a")).verify(), FormatError) << name << " at " << size;
    }
    folder_.write(file, good);
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(same, 100) << "the space between chunks is not read";
}

// ---- Asynchronous ------------------------------------------------------------------------------

// AC-K5
TEST_F(Checkpoints, ACK5AnAsynchronousSaveHoldsTheValuesOfTheCall) {
  compared_ranks(2, [&](int) {
    CheckpointSaver saver;
    const Tensor x = numbers({1000});
    for (int step = 0; step < 5; ++step) {
      saver.save(path("step-" + std::to_string(step)), std::vector{SaveItem::whole("x", x)},
                 {.asynchronous = true, .chunk_bytes = 512});
      add_(x, 1);
    }
    saver.wait();
    EXPECT_FALSE(saver.is_saving());
  });
  for (int step = 0; step < 5; ++step) {
    CheckpointReader reader(path("step-" + std::to_string(step)));
    EXPECT_EQ(values(reader.read("x")), values(numbers({1000}, step)));
  }
}

// What a save does before it returns: its part is copied, once, and nothing of it is written.
TEST_F(Checkpoints, ACK5ASaveBlocksForOneCopyOfItsPart) {
  constexpr int64_t kElements = 40'000, kRanks = 2;
  std::atomic<int64_t> staged{0};
  compared_ranks(kRanks, [&](int) {
    CheckpointSaver saver;
    const auto items = std::vector{SaveItem::whole("x", numbers({kElements}))};
    std::atomic<bool> returned{false};
    std::atomic<int> writing{0};
    SaveOptions options{.asynchronous = true, .chunk_bytes = 4096};
    options.at_stage = [&, caller = std::this_thread::get_id()](SaveStage stage) {
      if (stage < SaveStage::kHalfWritten) return;
      ++writing;
      EXPECT_NE(std::this_thread::get_id(), caller);
      for (int i = 0; i < 5000 && !returned; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_TRUE(returned) << "the save waits for its writer";
    };
    const int64_t before = memory_stats()->current(MemoryCategory::kStaging);
    memory_stats()->reset_peak();
    saver.save(path("a"), items, options);
    const int64_t own = memory_stats()->current(MemoryCategory::kStaging) - before;
    EXPECT_EQ(memory_stats()->peak(MemoryCategory::kStaging) - before, own);
    staged += own;
    EXPECT_LE(writing, 1) << "at its first stage, where it waits";
    EXPECT_TRUE(saver.is_saving());
    EXPECT_FALSE(fs::exists(path("a")));
    returned = true;
    options.at_stage = {};
    saver.save(path("b"), items, options);  // waits for the one under way
    EXPECT_TRUE(fs::exists(path("a")));
    saver.wait();
  });
  EXPECT_EQ(staged, kElements * 4) << "each element by one rank";
}

TEST_F(Checkpoints, ACK5TheErrorOfAnAsynchronousSaveComesWithTheNextCallOnEveryRank) {
  std::atomic<int> threw{0};
  compared_ranks(2, [&](int rank) {
    CheckpointSaver saver;
    const auto items = std::vector{SaveItem::whole("x", numbers({100}))};
    SaveOptions options{.asynchronous = true};
    options.at_stage = [&](SaveStage stage) {
      if (rank == 1 && stage == SaveStage::kRecordWritten) throw IoError("the disk has gone");
    };
    saver.save(path("a"), items, options);
    expect_in("rank 1: the disk has gone",
              message_of<IoError>([&] { saver.save(path("a"), items); }));
    ++threw;
    saver.save(path("a"), items);  // and then all is well
  });
  EXPECT_EQ(threw, 2);
  EXPECT_EQ(entries_in(path("")), 1);
}

TEST_F(Checkpoints, AsynchronousSavesOfSeveralRanksLeaveNothingInTheirStore) {
  compared_ranks(3, [&](int) {
    CheckpointSaver saver;
    const auto items = std::vector{SaveItem::whole("x", numbers({100}))};
    const auto said = [] { return rank_context().store->list("checkpoint/").size(); };
    for (int i = 0; i < 3; ++i) {
      saver.save(path("a"), items, {.asynchronous = true});
      saver.wait();
      world().barrier();
      EXPECT_LE(said(), 3u) << "what each rank said last";
      world().barrier();
    }
    saver.save(path("a"), items);
    world().barrier();
    EXPECT_EQ(said(), 0u);
  });
}

int64_t open_files() { return entries_in("/proc/self/fd"); }

TEST_F(Checkpoints, ACK5FiftySavesHoldNoMoreMemoryAndFilesThanTwo) {
  CheckpointSaver saver;
  const auto items = std::vector{SaveItem::whole("x", numbers({10'000}))};
  const auto save = [&] {
    saver.save(path("a"), items, {.asynchronous = true});
    saver.wait();
  };
  save(), save();
  const int64_t bytes = memory_stats()->current(MemoryCategory::kStaging);
  const int64_t files = open_files();
  EXPECT_GE(bytes, 40'000);
  for (int i = 0; i < 48; ++i) save();
  EXPECT_EQ(memory_stats()->current(MemoryCategory::kStaging), bytes);
  EXPECT_EQ(open_files(), files);
}

}  // namespace
}  // namespace tessera::distributed::test_checkpoint
