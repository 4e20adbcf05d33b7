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
