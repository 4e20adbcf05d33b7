#include <tessera/core/state/safetensors.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include <tessera/core/factory/factory.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/core/tensor/raw_views.h>

#include "refusals.h"

namespace tessera::test_safetensors {
namespace {

class SafeTensors : public testing::Test {
 protected:
  SafeTensors()
      : folder_(std::filesystem::path(testing::TempDir()) /
                ("tessera_safetensors_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~SafeTensors() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name = "file.safetensors") const { return folder_ / name; }
  std::string read(const std::string& file) const {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
  }
  std::string write(const std::string& bytes) const {
    std::filesystem::remove(path());  // file systems flush a file that is truncated and rewritten
    std::ofstream(path(), std::ios::binary) << bytes;
    return path();
  }
  // A file of this header and so many bytes of data.
  std::string write_file(const std::string& header, size_t data_bytes) const {
    const uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return write(bytes + header + std::string(data_bytes, '\1'));
  }
  // The text of the FormatError that opening the file throws.
  std::string refusal(const std::string& file) const {
    try {
      SafeTensorsFile opened(file);
    } catch (const FormatError& error) {
      return error.what();
    }
    return "it was accepted";
  }

  std::filesystem::path folder_;
};

Tensor counting(const Shape& shape, DType dtype) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = dtype == kBool ? i % 2 : double(i) - 3;
  if (dtype == kU8) {
    for (double& value : values) value += 3;
  }
  return tensor(values, shape, dtype);
}

void expect_same(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype());
  ASSERT_EQ(a.shape(), b.shape());
  EXPECT_EQ(a.to_vector<double>(), b.to_vector<double>());
}

TEST_F(SafeTensors, EveryDTypeAndShapeComesBackAsItWasWritten) {
  std::map<std::string, Tensor> tensors;
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    const std::string name(name_of(dtype));
    tensors[name + ".matrix"] = counting({3, 5}, dtype);
    tensors[name + ".scalar"] = counting({}, dtype);
    tensors[name + ".empty"] = counting({2, 0, 3}, dtype);
  }
  tensors["name with \"quotes\", \\ and \u00e9"] = counting({2}, kF32);
  save_safetensors(path(), tensors, {{"format", "pt"}, {"note", "line\nbreak"}});

  const SafeTensorsFile file(path());
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "line\nbreak");
  for (const auto& [name, expected] : tensors) {
    SCOPED_TRACE(name);
    expect_same(file.load(name), expected);
    expect_same(file.view(name), expected);
  }
  expect_same(load_safetensors(path()).at("i64.matrix"), tensors.at("i64.matrix"));
}

TEST_F(SafeTensors, ADTypeThatIsNotHereHidesNothing) {
  for (const auto& [dtype, bytes] :
       {std::pair("I8", 3), std::pair("I16", 6), std::pair("U16", 6), std::pair("U32", 12),
        std::pair("U64", 24), std::pair("C64", 24), std::pair("F8_E8M0", 3)}) {
    const std::string end = std::to_string(bytes), last = std::to_string(bytes + 8);
    write_file(R"({"__metadata__": null, "foreign": {"dtype": ")" + std::string(dtype) +
                   R"(", "shape": [3], "data_offsets": [0, )" + end +
                   R"(]}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [)" + end + ", " +
                   last + "]}}",
               static_cast<size_t>(bytes) + 8);
    const SafeTensorsFile file(path());
    EXPECT_EQ(file.load("w").numel(), 2) << dtype;
    EXPECT_THROW(file.view("foreign"), UnsupportedError) << dtype;
    EXPECT_TRUE(file.metadata().empty());
    testing::internal::CaptureStderr();
    EXPECT_EQ(load_safetensors(path()).size(), 1u) << dtype;
    const StateDict weights = load_weights(path());
    EXPECT_EQ(weights.size(), 1u) << dtype;
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("'foreign' is " + std::string(dtype)), std::string::npos) << said;
  }
  EXPECT_NE(refusal(write_file(R"({"w": null})", 0)).find("got null"), std::string::npos);
}

// UTL-1
TEST_F(SafeTensors, ASavedViewIsNotItsWholeStorage) {
  const Tensor large = counting({1000, 100}, kF32);
  save_safetensors(path(), {{"row", raw::narrow(large, 0, 7, 1)}});
  EXPECT_LT(std::filesystem::file_size(path()), 100 * 4 + 200u);
  expect_same(load_safetensors(path()).at("row"), raw::narrow(large, 0, 7, 1));
}

TEST_F(SafeTensors, AnyLayoutIsWrittenRowMajor) {
  const Tensor x = counting({4, 6}, kF32);
  const std::map<std::string, Tensor> views = {
      {"transposed", raw::transpose(x, 0, 1)},
      {"sliced", raw::slice(x, 1, 1, 6, 2)},
      {"narrow", raw::narrow(x, 0, 1, 2)},
      {"expanded", raw::expand(raw::narrow(x, 0, 0, 1), {3, 6})},
      {"column", raw::select(x, 1, 2)}};
  save_safetensors(path(), views);
  for (const auto& [name, loaded] : load_safetensors(path())) expect_same(loaded, views.at(name));
}

TEST_F(SafeTensors, TheSameTensorsGiveTheSameBytesAndEightByteAlignment) {
  const std::map<std::string, Tensor> tensors = {
      {"b", counting({3}, kBF16)}, {"a", counting({1}, kU8)}, {"z", counting({2}, kF64)}};
  save_safetensors(path("1"), tensors, {{"k", "v"}});
  save_safetensors(path("2"), tensors, {{"k", "v"}});
  EXPECT_EQ(read(path("1")), read(path("2")));
  const SafeTensorsFile file(path("1"));
  EXPECT_EQ(file.entries()[0].name, "z");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.view("z").data()) % 8, 0u);
  EXPECT_TRUE(file.view("z").storage()->is_foreign());
  EXPECT_FALSE(file.load("z").storage()->is_foreign());
}

TEST_F(SafeTensors, AViewKeepsTheMappingAliveAndWritesDoNotReachTheFile) {
  save_safetensors(path(), {{"x", counting({4}, kF32)}});
  const std::string before = read(path());
  Tensor x = SafeTensorsFile(path()).view("x");
  std::filesystem::remove(path());
  x.data_as<float>()[1] = 42;
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{-3, 42, -1, 0}));
  save_safetensors(path(), {{"x", x}});  // also over a file that is mapped
  Tensor again = SafeTensorsFile(path()).view("x");
  again.data_as<float>()[1] = -2;
  save_safetensors(path(), {{"x", again}});
  EXPECT_EQ(read(path()), before);
}

TEST_F(SafeTensors, AMisalignedTensorIsCopied) {
  const std::string file = write_file(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
      5);
  const Tensor b = SafeTensorsFile(file).view("b");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % 4, 0u);
  uint32_t bits = 0;
  std::memcpy(&bits, b.data(), 4);
  EXPECT_EQ(bits, 0x01010101u);
}

TEST_F(SafeTensors, DTypesThatTesseraLacksAreRefusedOnlyWhenAskedFor) {
  const SafeTensorsFile file(write_file(
      R"({"a":{"dtype":"U16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"I32","shape":[1],"data_offsets":[4,8]}})",
      8));
  EXPECT_EQ(file.view("b").dtype(), kI32);
  EXPECT_THROW(file.view("a"), UnsupportedError);
  EXPECT_THROW(file.view("c"), ValueError);
}

TEST_F(SafeTensors, EachDamagedHeaderIsRefusedWithItsReason) {
  struct Case {
    std::string header;
    size_t data_bytes;
    std::string reason;
  };
  const auto one = [](const std::string& fields) { return "{\"w\":{" + fields + "}}"; };
  const std::string deep = std::string(100000, '[');
  const std::vector<Case> cases = {
      {"", 0, "begins with '{'"},
      {" {}", 0, "begins with '{'"},
      {"[]", 0, "begins with '{'"},
      {"{", 0, "not valid JSON"},
      {"{}", 4, "fill the file"},
      {"{}{}", 0, "not valid JSON"},
      {R"({"w":1})", 0, "an entry is an object"},
      {R"({"w":"x"})", 0, "an entry is an object"},
      {R"({"w":[]})", 0, "an entry is an object"},
      {"{\"w\":" + deep, 0, "an entry is an object"},
      {"{\"w\xff\":{}}", 0, "not valid JSON"},
      {R"({"w":{}})", 0, "'dtype' is missing"},
      {one(R"("dtype":"F32","shape":[1])"), 4, "'data_offsets' is missing"},
      {one(R"("dtype":"F32","data_offsets":[0,4])"), 4, "'shape' is missing"},
      {one(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"), 4, "none of the format"},
      {one(R"("dtype":7,"shape":[1],"data_offsets":[0,4])"), 4, "dtype is a string"},
      {one(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4, "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":[1.5],"data_offsets":[0,4])"), 4, "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), 4, "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), 4, "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), 4, "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])"), 4,
       "sizes of at least 0"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4, "does not fill"},
      {one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "does not fill"},
      {one(R"("dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "does not fill"},
      {one(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), 4,
       "at most 16 dimensions"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), 4, "two numbers"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4, "two numbers"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4, "must lie within"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615])"), 4,
       "must lie within"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8, "without overlap or hole"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 8, "fill the file"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 3, "must lie within"},
      {one(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"), 4, "there twice"},
      {one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), 4, "has the fields"},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "there twice"},
      {R"({"v":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "without overlap or hole"},
      {R"({"__metadata__":{"a":1}})", 0, "a metadata value is a string"},
      {R"({"__metadata__":{"a":{}}})", 0, "a metadata value is a string"},
      {R"({"__metadata__":[]})", 0, "an entry is an object"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "there twice"},
  };
  for (const Case& damaged : cases) {
    SCOPED_TRACE(damaged.header.substr(0, 100));
    const std::string text = refusal(write_file(damaged.header, damaged.data_bytes));
    EXPECT_NE(text.find(damaged.reason), std::string::npos) << text;
    EXPECT_NE(text.find(path()), std::string::npos) << text;
    EXPECT_LT(text.size(), 500u) << text;
  }
}

TEST_F(SafeTensors, AHeaderLengthBeyondTheLimitOrTheFileIsRefused) {
  for (const uint64_t length :
       {uint64_t{100'000'001}, UINT64_MAX, UINT64_MAX - 7, uint64_t{1000}}) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    EXPECT_NE(refusal(write(bytes + "{}")).find(length == 1000 ? "truncated" : "at most 100000000"),
              std::string::npos);
  }
}

TEST_F(SafeTensors, AHeaderMayEndWithTheFileAndNotOneByteBehindIt) {
  const std::string header = "{}    ";
  for (uint64_t length = 2; length <= header.size() + 16; ++length) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    write(bytes + header);
    if (length == header.size()) {
      EXPECT_TRUE(SafeTensorsFile(path()).entries().empty());
    } else {
      // Shorter ones leave bytes that belong to no tensor.
      const char* reason = length < header.size() ? "the tensors fill the file" : "must lie within";
      EXPECT_NE(refusal(path()).find(reason), std::string::npos) << length;
    }
  }
}

// Offsets and lengths that are wrong by one, and by the size of an element.
TEST_F(SafeTensors, OffsetsThatAreNearlyRightAreRefused) {
  const auto header = [](int64_t begin, int64_t end, int64_t rows) {
    return R"({"x":{"dtype":"F16","shape":[)" + std::to_string(rows) + R"(],"data_offsets":[)" +
           std::to_string(begin) + "," + std::to_string(end) + "]}}";
  };
  EXPECT_EQ(SafeTensorsFile(write_file(header(0, 16, 8), 16)).entries().size(), 1u);
  for (const int64_t by : {-8, -7, -2, -1, 1, 2, 7, 8}) {
    EXPECT_THROW(SafeTensorsFile(write_file(header(0, 16 + by, 8), 16)), FormatError) << by;
    EXPECT_THROW(SafeTensorsFile(write_file(header(0, 16 + by, 8 + by / 2), 16)), FormatError)
        << by;
    EXPECT_THROW(SafeTensorsFile(write_file(header(0, 16, 8 + by), 16)), FormatError) << by;
    EXPECT_THROW(SafeTensorsFile(write_file(header(0, 16, 8), static_cast<size_t>(16 + by))),
                 FormatError)
        << by;
    if (by > 0) {
      EXPECT_THROW(SafeTensorsFile(write_file(header(by, 16, 8), 16)), FormatError) << by;
      EXPECT_THROW(SafeTensorsFile(write_file(header(by, 16 + by, 8), 16)), FormatError) << by;
    }
  }
}

TEST_F(SafeTensors, AFileCutAnywhereIsRefused) {
  save_safetensors(path(), {{"x", counting({2, 3}, kF32)}, {"y", counting({3}, kI64)}},
                   {{"a", "b"}});
  const std::string whole = read(path());
  for (size_t length = 0; length < whole.size(); ++length) {
    write(whole.substr(0, length));
    EXPECT_THROW(SafeTensorsFile{path()}, FormatError) << length;
  }
}

TEST_F(SafeTensors, NoChangedByteCrashesTheReader) {
  save_safetensors(path(), {{"x", counting({2, 3}, kF32)}, {"y", counting({3}, kBool)}},
                   {{"a", "b"}});
  const std::string whole = read(path());
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 800; ++round) {
    std::string bytes = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    write(bytes);
    try {
      const SafeTensorsFile file(path());
      for (const SafeTensorsEntry& entry : file.entries()) {
        if (!entry.dtype) continue;
        EXPECT_LE(file.load(entry.name).nbytes(), int64_t(whole.size()));
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 400);
}

TEST_F(SafeTensors, WhatCannotBeWrittenIsATypedErrorAndLeavesTheOldFile) {
  save_safetensors(path(), {{"x", counting({2}, kF32)}});
  const std::string before = read(path());
  EXPECT_THROW(save_safetensors(path(), {{"x", Tensor()}}), ValueError);
  EXPECT_THROW(save_safetensors(path(), {{"__metadata__", counting({2}, kF32)}}), ValueError);
  EXPECT_THROW(save_safetensors(path(), {{"\xff", counting({2}, kF32)}}), ValueError);
  EXPECT_THROW(save_safetensors(path(), {{"x", raw::empty({2}, kF32, kMeta)}}), DeviceError);
  EXPECT_EQ(read(path()), before);
  EXPECT_THROW(save_safetensors(path("no/such/folder"), {}), IoError);
  EXPECT_THROW(SafeTensorsFile(path("missing")), IoError);
  EXPECT_THROW(SafeTensorsFile(folder_.string()), IoError);
}

TEST_F(SafeTensors, ErrorsSayWhatCannotBeWrittenOrRead) {
  const auto save = [&](const std::string& name, const Tensor& tensor) {
    return [this, name, tensor] { save_safetensors(path(), {{name, tensor}}); };
  };
  const std::vector<SafeTensorsWriter::Entry> two = {{"a", kF32, {2}}, {"b", kF32, {1}}};
  const float zeros[4] = {};
  const auto written = [&](const std::function<void(SafeTensorsWriter&)>& write) {
    return [this, two, write] {
      SafeTensorsWriter writer(path(), two);
      write(writer);
      writer.commit();
    };
  };
  EXPECT_NO_THROW(written(
      [&](auto& w) { w.write("a", zeros, 4), w.write("a", zeros, 4), w.write("b", zeros, 4); })());
  const SafeTensorsFile file(path());
  expect_refusals({
      {"'x' is undefined; leave it out", save("x", Tensor())},
      {"expects tensors on the cpu; 'x' is", save("x", raw::empty({2}, kF32, kMeta))},
      {"'__metadata__'", save("__metadata__", counting({2}, kF32))},
      {"must be valid UTF-8", save("\xff", counting({2}, kF32))},
      {"every name stands once",
       [&] {
         SafeTensorsWriter(
             path(), std::vector<SafeTensorsWriter::Entry>{{"a", kF32, {2}}, {"a", kF32, {1}}});
       }},
      {"in order; the next is 'a', given 'b'", written([&](auto& w) { w.write("b", zeros, 4); })},
      {"'a' has 8 bytes left; given 12", written([&](auto& w) { w.write("a", zeros, 12); })},
      {"'a' has 4 bytes left; given 8",
       written([&](auto& w) { w.write("a", zeros, 4), w.write("a", zeros, 8); })},
      {"elements of", written([&](auto& w) { w.write("a", zeros, 8); })},
      {"there is no tensor 'c' among its 2", [&] { file.load("c"); }},
      {"there is no tensor 'c' among its 2", [&] { file.view("c"); }},
  });
}

// A text that is a part of a longer one ends where it ends.
TEST(ByteSize, IsANumberAndAUnit) {
  struct Row {
    const char* text;
    int64_t bytes;
  };
  for (const auto& [text, bytes] : std::vector<Row>{{"1", 1},
                                                    {"123", 123},
                                                    {"0.5KB", 500},
                                                    {"1.5 MB", 1'500'000},
                                                    {"1.2345KB", 1234},
                                                    {"10GB", 10'000'000'000},
                                                    {"3TB", 3'000'000'000'000},
                                                    {"2KiB", 2048},
                                                    {"2MiB", 2 << 20},
                                                    {"2GiB", int64_t{2} << 30},
                                                    {"2  TiB", int64_t{2} << 40},
                                                    {"7B", 7},
                                                    {"1.B", 1},
                                                    {".5KB", 500}}) {
    EXPECT_EQ(parse_byte_size(text), bytes) << text;
    const std::string longer = std::string(text) + "5";
    EXPECT_EQ(parse_byte_size(std::string_view(longer).substr(0, longer.size() - 1)), bytes);
  }
  for (const char* bad : {"", "B", "GB", ".", "-1", "0", "0.5", "0.0001KB", "1.5", "1.2.3KB",
                          "10kB", "10XB", "10Gb", "9999999999999999999", "5000000TB", "1e3"}) {
    EXPECT_THROW(parse_byte_size(bad), ConfigError) << bad;
  }
  expect_refusals({{"a small b counts bits: write B", [] { parse_byte_size("10Gb"); }},
                   {"such as 10GB, 500MB, 2GiB", [] {
                      parse_byte_size(
                          "10"
                          "XB");
                    }}});
}

// What an earlier save left goes, and what only looks like it stays.
TEST_F(SafeTensors, ASaveRemovesItsOwnEarlierFilesAlone) {
  const std::vector<std::string> stale = {"model-00001-of-00002.safetensors",
                                          "model-00002-of-00002-b.safetensors",
                                          "model.safetensors.index.json"};
  const std::vector<std::string> others = {
      "model-0x1-of-00002.safetensors",    "model-00001-of-2x.safetensors",
      "model--of-00002.safetensors",       "model-00001-of-.safetensors",
      "model-00001.safetensors",           "model-00001-of-00002.bin",
      "a-model-00001-of-00002.safetensors"};
  for (const auto& names : {stale, others}) {
    for (const std::string& name : names) std::ofstream(path(name)) << "{}";
  }
  StateDict state;
  state.set("x", counting({2}, kF32));
  EXPECT_EQ(save_weights(state, folder_.string()).files,
            (std::vector<std::string>{"model.safetensors"}));
  for (const std::string& name : stale) EXPECT_FALSE(std::filesystem::exists(path(name))) << name;
  for (const std::string& name : others) EXPECT_TRUE(std::filesystem::exists(path(name))) << name;
}

TEST_F(SafeTensors, FoldersOfWeightsThatAreNone) {
  const auto load = [&](const std::string& index) {
    return [this, index] {
      std::filesystem::remove(path("model.safetensors"));
      std::ofstream(path("model.safetensors.index.json")) << index;
      load_weights(folder_.string());
    };
  };
  save_safetensors(path("shard.safetensors"), {{"x", counting({2}, kF32)}});
  EXPECT_NO_THROW(load(R"({"weight_map": {"x": "shard.safetensors"}})")());
  const char* const object = "a JSON object with a 'weight_map'";
  const char* const beside = "a shard is a file beside the index";
  const auto map = [&](const std::string& shard) {
    return load(R"({"weight_map": {"x": ")" + shard + R"("}})");
  };
  expect_refusals({
      {object, load("{")},
      {object, load("[]")},
      {object, load("{}")},
      {object, load(R"({"weight_map": []})")},
      {"the shard of 'x' must be a file's name", load(R"({"weight_map": {"x": 1}})")},
      {beside, map("")},
      {beside, map(".")},
      {beside, map("..")},
      {beside, map("../shard.safetensors")},
      {"the index says that 'y' is here, and it is not",
       load(R"({"weight_map": {"y": "shard.safetensors"}})")},
      {"has neither model.safetensors nor model.safetensors.index.json",
       [&] {
         std::filesystem::remove(path("model.safetensors.index.json"));
         load_weights(folder_.string());
       }},
      {"'x' is undefined; leave it out",
       [&] {
         StateDict state;
         state.set("x", Tensor());
         save_weights(state, folder_.string());
       }},
      {"has no elements; load the model first",
       [&] {
         StateDict state;
         state.set("x", raw::empty({2}, kF32, kMeta));
         save_weights(state, folder_.string());
       }},
  });
}

TEST_F(SafeTensors, ABooleanThatIsNeitherZeroNorOneIsRefused) {
  const std::string header = R"({"x":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})";
  std::string bytes = read(write_file(header, 2));  // of ones
  EXPECT_EQ(SafeTensorsFile(path()).load("x").to_vector<double>(), (std::vector<double>{1, 1}));
  bytes.back() = 2;
  const SafeTensorsFile file(write(bytes));
  EXPECT_THROW(file.load("x"), FormatError);
}

TEST_F(SafeTensors, AFileWithoutTensorsIsValid) {
  save_safetensors(path(), {});
  EXPECT_TRUE(SafeTensorsFile(path()).entries().empty());
}

}  // namespace
}  // namespace tessera::test_safetensors
