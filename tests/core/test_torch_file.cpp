// Files of torch.save: tensors as torch has them, and nothing else of what a pickle may hold.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <set>

#include <tessera/core/io/zip_reader.h>
#include <tessera/core/state/pickle_reader.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/state/torch_file.h>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::test_torch_file {
namespace {

using tests::golden_path;

std::string file_bytes(const std::string& name) {
  std::ifstream file(golden_path(name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::string little(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

// A zip of stored entries, as small as can be.
std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries,
                   int method = 0) {
  std::string data, directory;
  for (const auto& [name, content] : entries) {
    const std::string sizes = little(content.size(), 4) + little(content.size(), 4);
    directory += little(0x02014b50, 4) + little(0, 6) + little(static_cast<uint64_t>(method), 2) +
                 little(0, 8) + sizes + little(name.size(), 2) + little(0, 12) +
                 little(data.size(), 4) + name;
    data += little(0x04034b50, 4) + little(0, 14) + sizes + little(name.size(), 2) + little(0, 2) +
            name + content;
  }
  return data + directory + little(0x06054b50, 4) + little(0, 4) + little(entries.size(), 2) +
         little(entries.size(), 2) + little(directory.size(), 4) + little(data.size(), 4) +
         little(0, 2);
}

// Opcodes for a dict with the tensor "w" of these numbers.
std::string text_op(const std::string& text) { return "X" + little(text.size(), 4) + text; }
std::string int_op(int64_t value) { return "\x8a\x08" + little(static_cast<uint64_t>(value), 8); }
struct MadeTensor {
  int64_t elements = 6, offset = 0;
  std::vector<int64_t> sizes = {2, 3}, strides = {3, 1};
  std::string storage = "FloatStorage", hooks = "}";
};
std::string tensor_op(const MadeTensor& made) {
  const auto tuple = [](const std::vector<int64_t>& values) {
    std::string text = "(";
    for (const int64_t value : values) text += int_op(value);
    return text + "t";
  };
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text_op("storage") + "ctorch\n" + made.storage +
         "\n" + text_op("0") + text_op("cpu") + int_op(made.elements) + "tQ" + int_op(made.offset) +
         tuple(made.sizes) + tuple(made.strides) + "\x89" + made.hooks + "tR";
}
std::string pickle_of(const std::string& value) {
  return "\x80\x02}" + text_op("w") + value + "s.";
}

class TorchFiles : public testing::Test {
 protected:
  std::string write(const std::string& bytes) {
    std::filesystem::remove(folder_.path("x.pt"));  // file systems flush what is written over
    std::ofstream(folder_.path("x.pt"), std::ios::binary) << bytes;
    return folder_.path("x.pt");
  }
  std::string write_pickle(const std::string& pickle, size_t bytes = 24) {
    return write(zip_of({{"a/data.pkl", pickle}, {"a/data/0", std::string(bytes, '\0')}}));
  }
  template <class E>
  void refused(const std::string& path, const std::string& why) {
    const std::string message = message_of<E>([&] { TorchFile file(path); });
    EXPECT_TRUE(mentions(message, why)) << message;
    EXPECT_TRUE(mentions(message, path.substr(path.rfind('/')))) << message;
  }
  TestFolder folder_;
};

TEST_F(TorchFiles, TensorsAreThoseOfTorch) {
  for (const auto& [name, reference] :
       {std::pair("state.pt", "state.safetensors"), std::pair("state4.pt", "state.safetensors"),
        std::pair("checkpoint.pt", "checkpoint.safetensors")}) {
    const auto expected = load_safetensors(golden_path(std::string("torch/") + reference));
    const TorchFile file(golden_path(std::string("torch/") + name));
    const auto loaded = load_torch_file(file.path());
    EXPECT_EQ(file.entries().size(), expected.size()) << name;
    for (const auto& [key, tensor] : expected) {
      for (const Tensor& got : {file.view(key), file.load(key), loaded.at(key)}) {
        ASSERT_EQ(got.dtype(), tensor.dtype()) << name << " " << key;
        ASSERT_EQ(got.shape(), tensor.shape()) << name << " " << key;
        EXPECT_EQ(got.to_vector(), tensor.to_vector()) << name << " " << key;
      }
      EXPECT_TRUE(file.load(key).is_contiguous()) << key;
    }
  }
}

TEST_F(TorchFiles, StridesAndSharedStoragesAreThoseOfTheFile) {
  const TorchFile file(golden_path("torch/state.pt"));
  EXPECT_EQ(file.entry("transposed").strides, (Shape{1, 6}));
  EXPECT_EQ(file.entry("part").strides, (Shape{6, 2}));
  EXPECT_EQ(file.entry("part").offset, 6);
  EXPECT_EQ(file.entry("expanded").strides, (Shape{1, 0}));
  for (const char* name : {"same", "transposed", "row", "part"}) {
    EXPECT_EQ(file.entry(name).storage, file.entry("base").storage) << name;
    EXPECT_EQ(file.entry(name).is_same_as(file.entry("base")), name == std::string("same"));
  }
  EXPECT_NE(file.entry("parameter").storage, file.entry("base").storage);
  // What is written to a view does not reach the file.
  const Tensor view = file.view("base");
  view.data_as<float>()[0] = 77;
  EXPECT_EQ(file.view("same").to_vector()[0], 77);
  EXPECT_EQ(file.view("transposed").to_vector()[0], 77);
  EXPECT_NE(TorchFile(file.path()).view("base").to_vector()[0], 77);
  EXPECT_THROW(file.entry("none"), ValueError);
}

TEST_F(TorchFiles, WhatIsNoTensorIsNamedAndLeftOut) {
  const TorchFile file(golden_path("torch/checkpoint.pt"));
  const auto& others = file.others();
  for (const char* name : {"epoch", "loss", "big", "name", "best", "done", "shape.0", "history.0",
                           "history.1.0", "optimizer.param_groups.0.lr"}) {
    EXPECT_NE(std::ranges::find(others, name), others.end()) << name;
  }
  EXPECT_NO_THROW(file.entry("optimizer.state.0.exp_avg"));
  EXPECT_NO_THROW(file.entry("history.1.1.0"));
  EXPECT_TRUE(TorchFile(golden_path("torch/state.pt")).others().empty());
}

TEST_F(TorchFiles, OtherObjectsAreNamedAndNeverMade) {
  refused<UnsupportedError>(golden_path("torch/call.pt"), "posix.system");
  refused<UnsupportedError>(golden_path("torch/complex.pt"), "torch.ComplexFloatStorage");
  refused<UnsupportedError>(write_pickle(pickle_of("cbuiltins\neval\n(" + text_op("1") + "tR")),
                            "builtins.eval");
  refused<UnsupportedError>(write_pickle(pickle_of("ctorch\nFloatStorage\n)R")),
                            "made by torch.FloatStorage");
  refused<UnsupportedError>(write_pickle(pickle_of("ca\nB\n)\x81}b")), "made by a.B");
  refused<UnsupportedError>(write_pickle(pickle_of("I1\n")), "opcode 73");
  refused<UnsupportedError>(write_pickle(pickle_of("]}b")), "attributes");
  refused<UnsupportedError>(write(zip_of({{"a/data.pkl", pickle_of("N")}}, 8)), "compressed");
  refused<UnsupportedError>(write(zip_of({{"a/data.pkl", pickle_of("N")}, {"a/byteorder", "big"}})),
                            "big-endian");
  refused<UnsupportedError>(write(zip_of({{"a/model.json", "{}"}})), "before 1.5");
  refused<UnsupportedError>(write(std::string(257, 'x') + "ustar" + std::string(250, '\0')), "tar");
  refused<UnsupportedError>(write("\x80\x02N."), "did not write");
}

// Sets, a Namespace, tensors of dtypes that are not here, a parameter with attributes...
TEST_F(TorchFiles, WhatCannotBeReadHidesNothing) {
  const TorchFile file(golden_path("torch/beside.pt"));
  std::vector<std::string> names;
  for (const TorchFileEntry& entry : file.entries()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"default.k", "w", "parameter", "noted"}));
  EXPECT_EQ(file.load("w").to_vector(), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(file.load("parameter").to_vector(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(file.load("noted").to_vector(), (std::vector<double>{2, 3, 4, 5, 6, 7}));
  for (const char* name : {"set", "frozen", "args", "device", "dtype", "big", "bytes", "slice",
                           "deque", "counter", "array", "complex", "range", "keys.?", "settings"}) {
    EXPECT_NE(std::ranges::find(file.others(), name), file.others().end()) << name;
  }
  for (const auto& [name, what] :
       {std::pair("foreign.int8", "torch.CharStorage"),
        std::pair("foreign.int16", "torch.ShortStorage"),
        std::pair("foreign.uint16", "torch.uint16"), std::pair("foreign.uint32", "torch.uint32"),
        std::pair("foreign.uint64", "torch.uint64"),
        std::pair("foreign.complex64", "torch.ComplexFloatStorage"),
        std::pair("negative", "negatives"), std::pair("sparse", "_rebuild_sparse_tensor")}) {
    const std::string message = message_of<UnsupportedError>([&, n = name] { file.view(n); });
    EXPECT_TRUE(mentions(message, what)) << message;
  }
  testing::internal::CaptureStderr();
  EXPECT_EQ(load_torch_file(file.path()).size(), 4u);
  EXPECT_TRUE(mentions(testing::internal::GetCapturedStderr(), "foreign.int16"));
  EXPECT_EQ(TorchFile(golden_path("torch/object.pt")).view("w").to_vector(),
            (std::vector<double>{1, 1}));
}

TEST_F(TorchFiles, FilesOfTorchBefore16AreReadAsThoseOfToday) {
  EXPECT_EQ(TorchFile(golden_path("torch/legacy.pt")).view("w").to_vector(),
            (std::vector<double>{1, 1}));
  const TorchFile old(golden_path("torch/legacy_state.pt")), now(golden_path("torch/state.pt"));
  ASSERT_EQ(old.entries().size(), now.entries().size());
  for (const TorchFileEntry& entry : now.entries()) {
    EXPECT_EQ(old.entry(entry.name).strides, entry.strides) << entry.name;
    EXPECT_EQ(old.view(entry.name).dtype(), entry.dtype) << entry.name;
    EXPECT_EQ(old.view(entry.name).to_vector<double>(), now.view(entry.name).to_vector<double>())
        << entry.name;
  }
  EXPECT_EQ(old.others(), std::vector<std::string>{"settings"});
}

TEST_F(TorchFiles, ArchivesOfLibtorchAreReadByTheNamesOfTheModule) {
  EXPECT_EQ(TorchFile(golden_path("torch/libtorch_tensor.pt")).view("0").to_vector(),
            (std::vector<double>{0, 1, 2, 3, 4, 5}));
  const TorchFile file(golden_path("torch/libtorch_module.pt"));
  std::vector<std::string> names;
  for (const TorchFileEntry& entry : file.entries()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"scale", "fc.weight", "fc.bias", "bn.weight",
                                             "bn.bias", "bn.running_mean", "bn.running_var",
                                             "bn.num_batches_tracked"}));
  EXPECT_EQ(file.view("fc.weight").to_vector(), (std::vector<double>{0, 1, 2, 3, 4, 5}));
}

// Four bytes of a file are four GiB of a tensor.
TEST_F(TorchFiles, ATensorThatAStrideOfZeroMakesHugeIsRefusedAlone) {
  const TorchFile file(golden_path("torch/huge.pt"));
  EXPECT_EQ(file.view("v").to_vector(), (std::vector<double>{1, 1, 1}));
  const std::string message = message_of<UnsupportedError>([&] { file.load("w"); });
  EXPECT_TRUE(mentions(message, "4294967296 bytes that repeat 4")) << message;
  // Many names of one storage are as many copies of it where each has another geometry.
  std::string many = "\x80\x02}";
  for (int64_t i = 0; i < 300; ++i) {
    many += text_op(std::to_string(i)) +
            tensor_op({.elements = 6, .sizes = {1 << 20, 1 + i % 6}, .strides = {0, i % 2}}) + "s";
  }
  const TorchFile copies(write_pickle(many + "."));
  int64_t bytes = 0;
  std::set<std::string> geometries;
  for (const TorchFileEntry& entry : copies.entries()) {
    const std::string geometry = detail::concatenate(entry.shape, entry.strides);
    if (geometries.insert(geometry).second) bytes += 4 * numel_of(entry.shape);
  }
  EXPECT_GT(bytes, 0);
  EXPECT_LE(bytes, (int64_t{64} << 20) + 300'000 * 8);
  EXPECT_FALSE(copies.refused().empty());
}

TEST_F(TorchFiles, ATensorThatItsStorageDoesNotHoldIsRefused) {
  const auto refuse = [&](const MadeTensor& made, const std::string& why, size_t bytes = 24) {
    refused<FormatError>(write_pickle(pickle_of(tensor_op(made)), bytes), why);
  };
  EXPECT_EQ(TorchFile(write_pickle(pickle_of(tensor_op({})))).view("w").to_vector(),
            std::vector<double>(6));
  const int64_t huge = int64_t{1} << 62;
  refuse({.offset = 1}, "element 6 of 6");
  refuse({.sizes = {3, 3}}, "beyond its storage");
  refuse({.strides = {4, 1}}, "beyond its storage");
  refuse({.offset = -1}, "of no storage");
  refuse({.sizes = {-2, 3}}, "no number");
  refuse({.strides = {3, -1}}, "no number");
  refuse({.sizes = {2}}, "1 sizes and 2 strides");
  refuse({.sizes = {huge, 8}, .strides = {8, 1}}, "beyond its storage");
  refuse({.sizes = {huge, huge}, .strides = {0, 0}}, "more elements");
  refuse({.offset = huge, .sizes = {2, 3}, .strides = {huge, 1}}, "beyond its storage");
  refuse({.elements = 7}, "24 bytes for a storage of 7");
  refuse({.elements = huge}, "bytes for a storage");
  refuse({.hooks = "}(KaKbu"}, "hooks");
  refuse({}, "23 bytes", 23);
  refused<FormatError>(write(zip_of({{"a/data.pkl", pickle_of(tensor_op({}))}})), "data/0");
}

TEST_F(TorchFiles, AStructureThatMakesNoSenseIsRefused) {
  const auto refuse = [&](const std::string& pickle, const std::string& why) {
    refused<FormatError>(write_pickle(pickle), why);
  };
  refuse("", "ends within");
  refuse("\x80\x02", "ends within");
  refuse(std::string("\x80\x06N."), "protocol");
  refuse("\x80\x02.", "0 values");
  refuse("\x80\x02NN.", "2 values");
  refuse("\x80\x02N.N", "behind its end");
  refuse("\x80\x02(N.", "ends with");
  refuse("\x80\x02s.", "not there");
  refuse("\x80\x02t.", "mark");
  refuse("\x80\x02h\x05.", "recalls");
  refuse("\x80\x02N(NNu.", "takes none");
  refuse("\x80\x02}(Nu.", "without a value");
  refuse("\x80\x02X\xff\xff\xff\xff.", "ends within a value");
  refuse("\x80\x02N" + std::string("NQ."), "storage that is none");
  refuse("\x80\x02" + text_op("x") + ")R.", "no name");
  refuse(pickle_of(text_op("a")).substr(0, 9) + tensor_op({}) + "s" + text_op("w") + tensor_op({}) +
             "s.",
         "twice");
  refused<UnsupportedError>(write_pickle("\x80\x02}}Ns."), "key");
  refused<FormatError>(write("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."), "ends");
}

// ---- Opcodes -----------------------------------------------------------------------------------

// What a pickle holds, as Python would show it.
std::string shown(const PickleValue& value) {
  using Kind = PickleValue::Kind;
  const auto joined = [&](size_t from, const char* between) {
    std::string text;
    for (size_t i = from; i < value.items.size(); ++i) {
      if (i > from) text += i % 2 == 1 && *between == ':' ? ": " : ", ";
      text += shown(*value.items[i]);
    }
    return text;
  };
  const std::string dtype = value.dtype ? std::string(name_of(*value.dtype)) : "bytes";
  switch (value.kind) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return value.integer != 0 ? "True" : "False";
    case Kind::kInt:
      return std::to_string(value.integer);
    case Kind::kFloat:
      return std::to_string(value.number);
    case Kind::kText:
      return "'" + value.text + "'";
    case Kind::kList:
      return "[" + joined(0, ",") + "]";
    case Kind::kTuple:
      return "(" + joined(0, ",") + ")";
    case Kind::kDict:
      return "{" + joined(0, ":") + "}";
    case Kind::kGlobal:
      return "<" + value.text + ">";
    case Kind::kStorage:
      return dtype + " storage " + value.text + " of " + std::to_string(value.integer) +
             (value.items.empty() ? "" : " (" + value.items[0]->text + ")");
    case Kind::kTensor:
      return dtype + " tensor at " + std::to_string(value.integer) + " of " + joined(0, ",");
    case Kind::kObject:
      return (value.integer == 1 ? "unreadable " : "object ") + value.text +
             (value.items.empty() ? "" : " {" + joined(0, ":") + "}");
  }
  return "";
}

struct Opcodes {
  std::string bytes, expected;
};
void expect_values(const std::vector<Opcodes>& rows) {
  for (const auto& [bytes, expected] : rows) {
    try {
      const Pickle read = read_pickle(bytes, "table");
      EXPECT_EQ(shown(*read.root), expected) << testing::PrintToString(bytes);
    } catch (const Error& error) {
      EXPECT_TRUE(!expected.empty() && mentions(error.what(), expected))
          << testing::PrintToString(bytes) << ": " << error.what();
    }
  }
}
std::string global_op(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
// A number's opcode, K; one byte.
std::string byte_op(int value) { return std::string("K") + static_cast<char>(value); }

TEST(PickleOpcodes, ScalarsAndTexts) {
  using namespace std::string_literals;
  expect_values({
      {"N.", "None"},
      {"\x88.", "True"},
      {"\x89.", "False"},
      {"J\xfe\xff\xff\xff.", "-2"},
      {"K\xff.", "255"},
      {"M\x34\x12.", "4660"},
      {"\x8a\x00."s, "0"},
      {"\x8a\x01\xff.", "-1"},
      {"\x8a\x01\x7f.", "127"},
      {"\x8a\x02\xff\x00."s, "255"},
      {"\x8a\x02\x00\x80."s, "-32768"},
      {"\x8a\x08" + little(uint64_t{1} << 62, 8) + ".", "4611686018427387904"},
      {"\x8a\x09" + std::string(9, '\x01') + ".", "object a large integer"},
      {"\x8b" + little(9, 4) + std::string(9, '\x01') + ".", "object a large integer"},
      {"G\x3f\xf8" + std::string(6, '\0') + ".", "1.500000"},
      {"X" + little(2, 4) + "ab.", "'ab'"},
      {"\x8c" + little(2, 1) + "ab.", "'ab'"},
      {"\x8d" + little(2, 8) + "ab.", "'ab'"},
      {"U" + little(2, 1) + "ab.", "'ab'"},
      {"T" + little(2, 4) + "ab.", "'ab'"},
      {"C" + little(2, 1) + "ab.", "object bytes"},
      {"B" + little(2, 4) + "ab.", "object bytes"},
      {"\x8e" + little(2, 8) + "ab.", "object bytes"},
      {"\x96" + little(2, 8) + "ab.", "object bytes"},
      {"\x80\x05\x95" + little(2, 8) + "N.", "None"},
      {"\x80\x06N.", "protocol after 5"},
      {"cos\nsystem\n.", "<os.system>"},
      {"\x8c" + little(2, 1) + "os\x8c" + little(6, 1) + "system\x93.", "<os.system>"},
      {byte_op(1) + "\x8c" + little(1, 1) + "x\x93.", "a name that is no text"},
      {"\x8c" + little(1, 1) + "x" + byte_op(1) + "\x93.", "a name that is no text"},
      {"cos\n", "ends within a name"},
      {"i.", "opcode 105"},
  });
}

TEST(PickleOpcodes, ContainersAndTheStack) {
  const std::string one = byte_op(1), two = byte_op(2), three = byte_op(3), four = byte_op(4);
  const std::string mark = "(";
  expect_values({
      {").", "()"},
      {one + "\x85.", "(1)"},
      {one + two + "\x86.", "(1, 2)"},
      {one + two + three + "\x87.", "(1, 2, 3)"},
      {mark + one + two + three + four + "t.", "(1, 2, 3, 4)"},
      {"].", "[]"},
      {mark + one + two + "l.", "[1, 2]"},
      {"]" + one + "a.", "[1]"},
      {"](" + one + two + "e.", "[1, 2]"},
      {"}.", "{}"},
      {mark + one + two + "d.", "{1: 2}"},
      {mark + one + "d.", "a key without a value"},
      {"}" + one + two + "s.", "{1: 2}"},
      {"}(" + one + two + three + four + "u.", "{1: 2, 3: 4}"},
      {"}(" + one + "u.", "a key without a value"},
      {"]" + one + two + "s.", "adds items to what takes none"},
      {"}" + one + "a.", "adds items to what takes none"},
      {"\x8f(" + one + "\x90.", "object set"},
      {mark + one + "\x91.", "object frozenset"},
      {one + "2\x86.", "(1, 1)"},
      {one + two + "0.", "1"},
      {one + "(" + two + three + "1.", "1"},
      {one + "q\x05" + "0h\x05.", "1"},
      {one + "r" + little(300, 4) + "0j" + little(300, 4) + ".", "1"},
      {one + "\x94" + two + "\x94h" + little(0, 1) + "\x87.", "(1, 2, 1)"},
      {one + two + ".", "ends with 2 values"},
      {one + "(.", "ends with 1 values"},
      {"(.", "ends with 0 values"},
      {one + "(" + two + "\x86.", "takes a value that is not there"},
      {"(\x94.", "takes a value that is not there"},
      {"1.", "takes a mark that is not there"},
      {"h\x05.", "recalls the value 5"},
  });
}

TEST(PickleOpcodes, CallsAreDoneByNameOrLeaveTheirName) {
  const std::string one = byte_op(1), two = byte_op(2);
  const std::string size = global_op("torch", "Size"),
                    dict = global_op("collections", "OrderedDict");
  const std::string defaults = global_op("collections", "defaultdict");
  const std::string type = global_op("my", "Type"), pair = one + two + "\x86";
  expect_values({
      {size + "(" + one + two + "t\x85R.", "(1, 2)"},
      {size + ")R.", "makes a size of no tuple"},
      {size + one + "\x85R.", "makes a size of no tuple"},
      {dict + ")R.", "{}"},
      {dict + "](" + pair + pair + "e\x85R.", "{1: 2, 1: 2}"},
      {dict + "](" + pair + pair + "e" + one + "\x86R.", "makes a dict of no list"},
      {dict + one + "\x85R.", "makes a dict of no list"},
      {dict + "]" + one + "a\x85R.", "makes a dict of no pairs"},
      {dict + "]" + one + "\x85" + "a\x85R.", "makes a dict of no pairs"},
      {defaults + type + "\x85R.", "{}"},
      {type + ")R.", "object my.Type"},
      {type + ")R)R.", "object my.Type"},
      {type + ")\x81.", "object my.Type"},
      {type + ")}\x92.", "object my.Type"},
      {type + ")\x81)\x81.", "object my.Type"},
      {one + ")\x81.", "makes an object of no class"},
      {one + ")R.", "calls what is no name"},
      {type + one + "R.", "calls what is no name"},
      {type + ")\x81" + one + two + "s.", "object my.Type {1: 2}"},
      {type + ")\x81" + one + "a.", "object my.Type"},
      {type + ")\x81}" + one + two + "sb.", "object my.Type"},
      {global_op("__torch__", "M") + ")\x81}" + one + two + "sb.", "object __torch__.M {1: 2}"},
      {"}}b.", "{}"},
      {"}" + one + "b.", "attributes that are no dict"},
      {"]}b.", "sets attributes of what is no dict"},
      {global_op("torch.jit._pickle", "restore_type_tag") + pair + "R.", "1"},
      {global_op("torch._utils", "_rebuild_sparse_tensor") + ")R.",
       "unreadable torch._utils._rebuild_sparse_tensor"},
  });
}

// persistent_load(("storage", class, key, device, elements)), and what makes tensors of it.
TEST(PickleOpcodes, TensorsAndTheirStorages) {
  const auto storage = [](const std::string& type, const std::string& elements = byte_op(6),
                          const std::string& view = "") {
    const std::string module = type == "UntypedStorage" ? "torch.storage" : "torch";
    return "(" + text_op("storage") + global_op(module, type) + text_op("7") + text_op("cpu") +
           elements + view + "tQ";
  };
  const std::string floats = storage("FloatStorage");
  const auto tuple = [](const std::string& items) { return "(" + items + "t"; };
  const std::string sizes = tuple(byte_op(2) + byte_op(3)),
                    strides = tuple(byte_op(3) + byte_op(1));
  const std::string v2 = global_op("torch._utils", "_rebuild_tensor_v2");
  const std::string v3 = global_op("torch._utils", "_rebuild_tensor_v3");
  const auto tensor2 = [&](const std::string& of, const std::string& further = "") {
    return v2 + "(" + of + byte_op(4) + sizes + strides + "\x89}" + further + "tR";
  };
  const auto tensor3 = [&](const std::string& dtype, const std::string& further = "") {
    return v3 + "(" + storage("UntypedStorage") + byte_op(4) + sizes + strides + "\x89}" +
           global_op("torch", dtype) + further + "tR";
  };
  const std::string read = "f32 tensor at 4 of f32 storage 7 of 6, (2, 3), (3, 1)";
  const std::string parameter = global_op("torch._utils", "_rebuild_parameter");
  const std::string stateful = global_op("torch._utils", "_rebuild_parameter_with_state");
  const std::string typed = global_op("torch._tensor", "_rebuild_from_type_v2");
  std::string most, ones;
  for (int i = 0; i < kMaxDims; ++i) most += byte_op(1), ones += ", 1";
  const std::string many = most + byte_op(1);
  ones = "(" + ones.substr(2) + ")";
  expect_values({
      {floats + ".", "f32 storage 7 of 6"},
      {storage("DoubleStorage") + ".", "f64 storage 7 of 6"},
      {storage("UntypedStorage") + ".", "bytes storage 7 of 6"},
      {storage("QInt8Storage") + ".", "bytes storage 7 of 6 (torch.QInt8Storage)"},
      {storage("FloatStorage", byte_op(6), "N") + ".", "f32 storage 7 of 6"},
      {storage("FloatStorage", byte_op(6), ")") + ".", "f32 storage 7 of 6 (part of a storage)"},
      {storage("FloatStorage", int_op(-1)) + ".", "a storage that is none"},
      {storage("Float") + ".", "a storage of torch.Float"},
      {"(" + text_op("module") + global_op("my", "Net") + "NNtQ.", "<my.Net>"},
      {"(" + text_op("storage") + global_op("torch", "FloatStorage") + "NNNtQ.",
       "a storage that is none"},
      {tensor2(floats) + ".", read},
      {tensor2(floats, "N") + ".", read},
      {tensor2(floats, "}") + ".", read},
      {tensor2(floats, "}" + text_op("conj") + "\x88s") + ".",
       "unreadable elements that are read as their conjugates or negatives"},
      {tensor2(floats, "NN") + ".", "makes a tensor of 8 arguments"},
      {tensor2("N") + ".", "makes a tensor of no storage"},
      {tensor2(storage("QInt8Storage")) + ".", "unreadable torch.QInt8Storage"},
      {tensor2(storage("UntypedStorage")) + ".", "makes a tensor without a dtype"},
      {v2 + "(" + floats + int_op(-1) + sizes + strides + "\x89}tR.",
       "makes a tensor of no storage"},
      {v2 + "(" + floats + byte_op(0) + sizes + tuple(byte_op(1)) + "\x89}tR.",
       "2 sizes and 1 strides"},
      {v2 + "(" + floats + byte_op(0) + byte_op(1) + strides + "\x89}tR.", "sizes are no tuple"},
      {v2 + "(" + floats + byte_op(0) + tuple(most) + tuple(most) + "\x89}tR.",
       "f32 tensor at 0 of f32 storage 7 of 6, " + ones + ", " + ones},
      {v2 + "(" + floats + byte_op(0) + tuple(many) + tuple(many) + "\x89}tR.",
       "sizes are no tuple of at most"},
      {v2 + "(" + floats + byte_op(0) + tuple(int_op(-1)) + tuple(byte_op(1)) + "\x89}tR.",
       "a size that is no number"},
      {v2 + "(" + floats + byte_op(0) + tuple(byte_op(1)) + tuple(int_op(-1)) + "\x89}tR.",
       "a size that is no number"},
      {tensor3("bfloat16") + ".", "bf16 tensor at 4 of bytes storage 7 of 6, (2, 3), (3, 1)"},
      {tensor3("uint16") + ".", "unreadable torch.uint16"},
      {tensor3("float32", "N") + ".", "f32 tensor at 4 of bytes storage 7 of 6, (2, 3), (3, 1)"},
      {tensor3("float32", "NN") + ".", "makes a tensor of 9 arguments"},
      {parameter + "(" + tensor2(floats) + "\x88}tR.", read},
      {parameter + "(" + tensor2(floats) + "\x88tR.", "makes a parameter of 2 arguments"},
      {parameter + "(N\x88}tR.", "makes a parameter of no tensor"},
      {parameter + "(" + tensor2(storage("QInt8Storage")) + "\x88}tR.",
       "unreadable torch.QInt8Storage"},
      {stateful + "(" + tensor2(floats) + "\x88}}tR.", read},
      {stateful + "(" + tensor2(floats) + "\x88}tR.", "makes a parameter of 3 arguments"},
      {typed + "(" + v2 + global_op("my", "Tensor") + "(" + floats + byte_op(4) + sizes + strides +
           "\x89}t}tR.",
       read},
      {typed + "(" + typed + "N)}tR.", "makes a tensor of no function"},
      {typed + "(" + v2 + "N)tR.", "makes a tensor of no function"},
      {typed + "(" + v2 + "NN}tR.", "makes a tensor of no function"},
  });
}

TEST(PickleOpcodes, AreReadOneByOneFromSeveral) {
  std::string_view bytes = "K\x01.K\x02.";
  EXPECT_EQ(take_pickle(bytes, "several").root->integer, 1);
  EXPECT_EQ(take_pickle(bytes, "several").root->integer, 2);
  EXPECT_TRUE(bytes.empty());
}

// A list in itself, and forty pairs, each of which holds the one before it twice: 2^40 leaves of
// 200 bytes.
TEST_F(TorchFiles, ListsThatHoldEachOtherEnd) {
  const Pickle read = read_pickle(std::string("\x80\x02]q\x01h\x01") + "a.", "loop");
  EXPECT_EQ(read.root->items.at(0), read.root);
  refused<UnsupportedError>(write_pickle(std::string("\x80\x02]q\x01h\x01") + "a."), "levels");
  std::string nested = "\x80\x02)";
  for (int i = 0; i < 40; ++i) nested += "q\x01h\x01\x86";  // (x, x)
  refused<UnsupportedError>(write_pickle(nested + "."), "values");
}

TEST_F(TorchFiles, AContainerThatDoesNotFitTogetherIsRefused) {
  const std::string good =
      zip_of({{"a/data.pkl", pickle_of(tensor_op({}))}, {"a/data/0", std::string(24, '\0')}});
  EXPECT_NO_THROW(TorchFile(write(good)));
  EXPECT_NO_THROW(TorchFile(write(good.substr(0, good.size() - 2) + little(3, 2) + "abc")));
  const auto changed = [&](size_t from_end, uint64_t value, int bytes) {
    std::string text = good;
    text.replace(text.size() - from_end, static_cast<size_t>(bytes), little(value, bytes));
    return write(text);
  };
  refused<FormatError>(changed(18, 1, 2), "several parts");
  refused<FormatError>(changed(12, 3, 2), "several parts");
  refused<FormatError>(changed(10, 5, 4), "does not end");
  refused<FormatError>(changed(6, 5, 4), "does not end");
  refused<FormatError>(changed(6, 0xFFFFFFFF, 4), "place");
  refused<FormatError>(write("PK"), "shorter");
  refused<FormatError>(write(std::string(100, 'x')), "no directory");
  refused<FormatError>(write(zip_of({{"a/x", "1"}})), "without data.pkl");
  refused<FormatError>(write(zip_of({{"a/x", "1"}, {"a/x", "1"}})), "twice");
  refused<FormatError>(write(zip_of({{"a/data.pkl", "N."}, {"b/data.pkl", "N."}})),
                       "two structures");
  EXPECT_THROW(TorchFile(folder_.path("missing")), IoError);
}

// Whatever is cut off or changed in a file: a typed error or tensors within the file.
class DamagedTorchFiles : public TorchFiles, public testing::WithParamInterface<const char*> {};

TEST_P(DamagedTorchFiles, EveryCutAndEveryChangedByteIsATypedErrorOrReadable) {
  const std::string whole = file_bytes(std::string("torch/") + GetParam());
  const auto look = [&](const std::string& bytes) {
    try {
      const TorchFile file(write(bytes));
      for (const TorchFileEntry& entry : file.entries()) {
        if (numel_of(entry.shape) < 1000) file.load(entry.name);
      }
      return true;
    } catch (const FormatError&) {
    } catch (const UnsupportedError&) {
    }
    return false;
  };
  EXPECT_TRUE(look(whole));
  for (size_t size = 0; size < whole.size(); size += size < 64 ? 1 : 13) {
    EXPECT_FALSE(look(whole.substr(0, size))) << size;
  }
  int refused = 0;
  for (size_t at = 0; at < whole.size(); at += 2) {
    for (const int flip : {0x01, 0x80}) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ flip);
      refused += look(bytes) ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 100);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DamagedTorchFiles,
                         testing::Values("checkpoint.pt", "legacy_state.pt", "libtorch_module.pt",
                                         "beside.pt"),
                         [](const auto& info) {
                           const std::string name = info.param;
                           return name.substr(0, name.find('.'));
                         });

}  // namespace
}  // namespace tessera::test_torch_file
