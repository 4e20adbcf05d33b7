// Weights in 8 and 4 bits beside bitsandbytes' of golden/packed_cases.py, and products with them.
#include <tessera/core/kernels/gemm/int8_rows.h>
#include <tessera/core/kernels/quantize/packed_weight.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/state/safetensors.h>

#include "message_of.h"
#include "source_dir.h"

namespace tessera::test_packed_weight {
namespace {

using kernels::pack;
using kernels::PackedFormat;
using kernels::PackedWeight;
using kernels::PackOptions;

SafeTensorsFile golden() {
  return SafeTensorsFile(std::string(tests::source_dir()) + "/tests/golden/packed.safetensors");
}

// The same bits, where any NaN is the same as any other.
testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || a.numel() != b.numel()) {
    return testing::AssertionFailure() << a.describe() << " and " << b.describe();
  }
  const auto bytes = static_cast<size_t>(size_of(a.dtype()));
  const std::vector<double> values = a.to_vector(), others = b.to_vector();
  const auto *from = static_cast<const char*>(a.data()), *to = static_cast<const char*>(b.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i]) && std::isnan(others[i])) continue;
    if (std::memcmp(from + i * bytes, to + i * bytes, bytes) != 0) {
      return testing::AssertionFailure() << "element " << i << " of " << values.size() << ": "
                                         << values[i] << " and " << others[i];
    }
  }
  return testing::AssertionSuccess();
}

struct Format {
  const char* name;
  PackOptions options;
};
const std::vector<Format>& formats() {
  static const std::vector<Format> all = {
      {"int8", {.format = PackedFormat::kInt8}},
      {"nf4", {.format = PackedFormat::kNf4}},
      {"fp4", {.format = PackedFormat::kFp4}},
      {"nf4_128", {.format = PackedFormat::kNf4, .block_size = 128}},
  };
  return all;
}
const std::vector<std::string> kWeights = {"random", "random_bf16", "random_f16", "constant",
                                           "zero",   "zero_odd",    "special",    "special_odd",
                                           "odd",    "one",         "ties",       "halves"};

Tensor random(const Shape& shape, DType dtype = kF32) { return randn(shape).to(dtype).detach(); }

TEST(PackedWeight, TablesAreThoseOfBitsandbytes) {
  const SafeTensorsFile file = golden();
  const auto as_tensor = [](std::span<const float> values) {
    return tensor(values, Shape{static_cast<int64_t>(values.size())});
  };
  EXPECT_TRUE(same_bits(as_tensor(kernels::dynamic_map()), file.load("dynamic_map")));
  for (const PackedFormat format : {PackedFormat::kNf4, PackedFormat::kFp4}) {
    EXPECT_TRUE(same_bits(as_tensor(kernels::codes_of(format)),
                          file.load(std::string("codes.") + kernels::name_of(format))));
  }
}

TEST(PackedWeight, BytesAndScalesAreThoseOfBitsandbytes) {
  const SafeTensorsFile file = golden();
  for (const std::string& name : kWeights) {
    const Tensor weight = file.load("weight." + name);
    for (const Format& format : formats()) {
      const std::string prefix = name + "/" + format.name;
      SCOPED_TRACE(prefix);
      const PackedWeight packed = pack(weight, format.options);
      EXPECT_TRUE(same_bits(packed.values, file.load(prefix + ".values")));
      EXPECT_EQ(packed.values.shape(), file.load(prefix + ".values").shape());
      EXPECT_TRUE(same_bits(packed.absmax, file.load(prefix + ".absmax")));
    }
  }
}

TEST(PackedWeight, NumbersThatAreReadAreThoseOfBitsandbytes) {
  const SafeTensorsFile file = golden();
  for (const std::string& name : kWeights) {
    const Tensor weight = file.load("weight." + name);
    for (const Format& format : formats()) {
      const PackedWeight packed = pack(weight, format.options);
      for (const DType dtype : {kF32, kBF16}) {
        const std::string key = name + "/" + format.name + (dtype == kF32 ? ".f32" : ".bf16");
        EXPECT_TRUE(same_bits(kernels::unpack(packed, dtype), file.load(key))) << key;
      }
    }
  }
}

TEST(PackedWeight, ScalesInBytesAreThoseOfBitsandbytesButForTheOrderOfAMean) {
  const SafeTensorsFile file = golden();
  int64_t compared = 0;
  for (const std::string& name : kWeights) {
    if (name.starts_with("special")) continue;
    const Tensor weight = file.load("weight." + name);
    for (const Format& format : formats()) {
      if (format.options.format == PackedFormat::kInt8) continue;
      const std::string prefix = name + "/" + format.name + "_nested";
      SCOPED_TRACE(prefix);
      PackOptions options = format.options;
      options.double_quantize = true;
      const PackedWeight packed = pack(weight, options);
      const Tensor offset = file.load(prefix + ".offset");
      // A sum of n positive numbers in f32.
      const double sum_error = 1.2e-7 * static_cast<double>(packed.absmax.numel());
      EXPECT_NEAR(packed.nested_offset.item(), offset.item(),
                  std::max(1.2e-7, sum_error) * offset.item());
      if (packed.nested_offset.item() != offset.item()) continue;  // another mean, other bytes
      ++compared;
      EXPECT_TRUE(same_bits(packed.absmax, file.load(prefix + ".scales")));
      EXPECT_TRUE(same_bits(packed.nested_absmax, file.load(prefix + ".absmax")));
      EXPECT_TRUE(same_bits(kernels::unpack(packed, kF32), file.load(prefix + ".f32")));
    }
  }
  EXPECT_GE(compared, 20);
}

TEST(PackedWeight, TheDynamicMapTakesNumbersAsBitsandbytesDoes) {
  const SafeTensorsFile file = golden();
  const kernels::PackedBytes packed = kernels::pack_bytes(file.load("numbers"));
  EXPECT_TRUE(same_bits(packed.values, file.load("numbers.bytes")));
  EXPECT_TRUE(same_bits(packed.absmax, file.load("numbers.absmax")));
}

TEST(PackedWeight, PlacesHaveTheShapesOfWhatIsPacked) {
  for (Format format : formats()) {
    for (const bool nested : {false, true}) {
      if (nested && format.options.format == PackedFormat::kInt8) continue;
      format.options.double_quantize = nested;
      const PackedWeight packed = pack(random({37, 515}), format.options);
      const PackedWeight places = kernels::packed_places(37, 515, format.options);
      EXPECT_EQ(places.is_nested(), nested);
      for (const auto part : {&PackedWeight::values, &PackedWeight::absmax,
                              &PackedWeight::nested_absmax, &PackedWeight::nested_offset}) {
        ASSERT_EQ((packed.*part).defined(), (places.*part).defined());
        if (!(packed.*part).defined()) continue;
        EXPECT_EQ((packed.*part).shape(), (places.*part).shape());
        EXPECT_EQ((packed.*part).dtype(), (places.*part).dtype());
      }
    }
  }
}

// Products with the numbers that are read differ from products with tiles of them by the order of
// sums alone, so by the bound of a sum of n products.
void expect_product(const Tensor& y, const Tensor& exact, const Tensor& magnitudes, DType dtype,
                    int64_t n) {
  const double eps = dtype == kF32 ? 1.2e-7 : dtype == kBF16 ? 7.9e-3 : 9.8e-4;
  const std::vector<double> got = y.to_vector(), expected = exact.to_vector(),
                            sizes = magnitudes.to_vector();
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double sum = 1.2e-7 * std::sqrt(static_cast<double>(n)) * sizes[i];
    ASSERT_NEAR(got[i], expected[i], eps * std::fabs(expected[i]) + 4 * sum) << i;
  }
}

TEST(PackedWeight, ProductsAndTheirGradientsReadTiles) {
  struct Case {
    int64_t rows, in, out;
  };
  // One row, odd sizes, blocks over ends of rows, and more numbers than a tile has in both.
  for (const Case& c : {Case{1, 64, 96}, Case{5, 37, 33}, Case{3, 1030, 515}, Case{2, 513, 2600},
                        Case{70, 130, 300}}) {
    const Tensor weight = random({c.out, c.in});
    for (Format format : formats()) {
      format.options.double_quantize = format.options.format == PackedFormat::kFp4;
      const PackedWeight packed = pack(weight, format.options);
      for (const DType dtype : {kF32, kBF16, kF16}) {
        SCOPED_TRACE(std::string(format.name) + " " + std::to_string(c.in) + " " +
                     std::string(name_of(dtype)));
        const Tensor read = kernels::unpack(packed, dtype).to(kF64);
        // Few rows read bytes as they lie.
        const bool lies = packed.format == PackedFormat::kInt8 && c.rows <= kernels::kMostInt8Rows;
        const Tensor in_place = lies ? kernels::unpack(packed, kF32).to(kF64) : read;
        const Tensor x = random({c.rows, c.in}, dtype), bias = random({c.out}, dtype);
        expect_product(kernels::packed_product(x, packed, bias),
                       linear(x.to(kF64), in_place, bias.to(kF64)),
                       linear(abs(x.to(kF64)), abs(in_place), abs(bias.to(kF64))), dtype, c.in);
        const Tensor dy = random({c.rows, c.out}, dtype);
        expect_product(kernels::packed_product_gradient(dy, packed), matmul(dy.to(kF64), read),
                       matmul(abs(dy.to(kF64)), abs(read)), dtype, c.out);
      }
    }
  }
}

TEST(PackedWeight, BytesThatAreReadAsTheyLieAreTheNumbersThatAreUnpacked) {
  const PackedWeight packed = pack(random({500, 16}), {.format = PackedFormat::kInt8});
  const Tensor y = kernels::packed_product(eye(16), packed, {});
  EXPECT_TRUE(same_bits(y.t().contiguous(), kernels::unpack(packed, kF32)));
}

TEST(PackedWeight, BitsOfProductsDoNotDependOnTheNumberOfThreads) {
  const PackedWeight packed = pack(random({700, 900}), {});
  const Tensor x = random({9, 900}), dy = random({9, 700});
  const int before = num_threads();
  set_num_threads(1);
  const Tensor y = kernels::packed_product(x, packed, {});
  const Tensor grad = kernels::packed_product_gradient(dy, packed);
  set_num_threads(3);
  EXPECT_TRUE(same_bits(kernels::packed_product(x, packed, {}), y));
  EXPECT_TRUE(same_bits(kernels::packed_product_gradient(dy, packed), grad));
  set_num_threads(before);
}

// A limit under which 64 bytes more are given, and no lower one: it counts workspaces too.
int64_t bytes_in_use() {
  int64_t refused = 0, given = int64_t{1} << 40;
  while (given - refused > 1) {
    const int64_t limit = refused + (given - refused) / 2;
    set_cpu_memory_limit(limit);
    try {
      cpu_allocator().deallocate(cpu_allocator().allocate(64), 64);
      given = limit;
    } catch (const OutOfMemory&) {
      refused = limit;
    }
  }
  set_cpu_memory_limit(0);
  return given - 64;
}

TEST(PackedWeight, TheWholeWeightIsNeverInMemory) {
  const int64_t size = 4096;
  const PackedWeight packed = pack(random({size, size}), {});
  const Tensor x = random({1, size});
  const int threads = num_threads();
  set_num_threads(2);
  // Less than the bytes of the packed weight itself.
  set_cpu_memory_limit(bytes_in_use() + size * size / 2 - 1);
  EXPECT_NO_THROW(kernels::packed_product(x, packed, {}));
  EXPECT_NO_THROW(kernels::packed_product_gradient(x, packed));
  set_cpu_memory_limit(0);
  set_num_threads(threads);
}

TEST(PackedWeight, MemoryThatEndsInsideALoopOverTilesIsATypedError) {
  const PackedWeight packed = pack(random({1024, 1024}), {});
  const Tensor x = random({40, 1024});
  const int threads = num_threads();
  set_num_threads(2);
  for (const auto& call :
       {std::function<Tensor()>([&] { return kernels::packed_product(x, packed, {}); }),
        std::function<Tensor()>([&] { return kernels::packed_product_gradient(x, packed); })}) {
    const Tensor expected = call();
    const int64_t before = bytes_in_use();
    Tensor y;
    int refused = 0;
    for (int64_t more = 0; !y.defined(); more += 16 * 1024) {
      set_cpu_memory_limit(before + 64 + more);
      try {
        y = call();
      } catch (const OutOfMemory&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 0);
    EXPECT_TRUE(same_bits(y, expected));
    y = Tensor();
    EXPECT_EQ(bytes_in_use(), before);
  }
  set_num_threads(threads);
}

TEST(PackedWeight, WhatCannotBePackedIsATypedError) {
  const Tensor weight = random({4, 64});
  EXPECT_THROW(pack(weight, {.block_size = 48}), ValueError);
  EXPECT_THROW(pack(weight, {.block_size = 16}), ValueError);
  EXPECT_THROW(pack(weight, {.block_size = 8192}), ValueError);
  EXPECT_THROW(pack(weight, {.format = PackedFormat::kInt8, .double_quantize = true}),
               UnsupportedError);
  EXPECT_THROW(pack(weight.to(kF64), {}), DTypeError);
  EXPECT_THROW(pack(random({64}), {}), ShapeError);
  const PackedWeight packed = pack(weight, {});
  EXPECT_THROW(kernels::packed_product(random({2, 63}), packed, {}), ShapeError);
  EXPECT_THROW(kernels::packed_product(random({2, 64}), packed, random({5})), ShapeError);
  EXPECT_THROW(kernels::packed_product(random({2, 64}), packed, random({4}, kBF16)), DTypeError);
  EXPECT_THROW(kernels::packed_product(random({2, 64}).to(kF64), packed, {}), DTypeError);
  EXPECT_THROW(kernels::packed_product_gradient(random({2, 5}), packed), ShapeError);
  PackedWeight other = packed;
  other.block_size = 128;  // of a folder with other blocks
  EXPECT_THROW(kernels::unpack(other, kF32), ShapeError);
  other = packed;
  other.absmax = packed.absmax.to(kBF16);
  EXPECT_THROW(kernels::unpack(other, kF32), DTypeError);
  EXPECT_THROW(kernels::codes_of(PackedFormat::kInt8), ValueError);
}

}  // namespace
}  // namespace tessera::test_packed_weight
