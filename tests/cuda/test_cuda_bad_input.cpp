// What a program can do wrong on a GPU is a typed error with the remedy, and leaves the device as
// it was: after each of them the same process calculates what it did before. Only the public
// interface is used: gpu_bad_input runs this file on hardware.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/optimizers.h>

namespace tessera::test_cuda_bad_input {
namespace {

// A few steps of a small training: products, a norm, a loss, gradients, an update.
std::vector<double> trained_on(const Device& device) {
  manual_seed(11);
  nn::Linear layer(12, 5);
  const Tensor inputs = randn({8, 12}).to(device);
  const Tensor targets = tensor({0, 1, 2, 3, 4, 0, 1, 2}, kI64).to(device);
  layer.to(device);
  optim::AdamW optimizer(layer.named_parameters(), {.lr = 1e-2});
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    const Tensor loss = cross_entropy(layer(layer_norm(inputs, {12})), targets);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item());
  }
  return losses;
}

class CudaBadInput : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::device_count() == 0) GTEST_SKIP() << gpu::unavailable_reason();
    before_ = trained_on(cuda(0));
  }
  // The call fails with E, whose text has all parts; then the device calculates as before.
  template <class E>
  void expect_failure(const char* what, const std::function<void()>& call,
                      const std::vector<std::string>& parts) {
    std::string text;
    try {
      call();
      gpu::synchronize(0);
      ADD_FAILURE() << what << ": no error";
    } catch (const E& error) {
      text = error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << what << ": an error of another kind: " << error.what();
    }
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << what << ": '" << part << "' in " << text;
    }
    gpu::synchronize(0);  // nothing is left behind
    EXPECT_EQ(trained_on(cuda(0)), before_) << "after " << what;
  }

  std::vector<double> before_;
};

TEST_F(CudaBadInput, TheDeviceCalculatesWhatTheCpuDoes) {
  const std::vector<double> expected = trained_on(kCpu);
  ASSERT_EQ(before_.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(before_[i], expected[i], 1e-5 * expected[i]);
  }
}

TEST_F(CudaBadInput, ADeviceThatIsNotThere) {
  const Device beyond = cuda(gpu::device_count());
  const std::vector<std::string> parts = {"there is no cuda:" + std::to_string(beyond.index),
                                          "this machine has cuda:0"};
  expect_failure<DeviceError>(
      "a tensor there", [&] { raw::zeros({2}, kF32, beyond); }, parts);
  expect_failure<DeviceError>(
      "a copy to it", [&] { raw::zeros({2}, kF32).to(beyond); }, parts);
  expect_failure<DeviceError>(
      "a model there", [&] { nn::Linear(2, 2).to(beyond); }, parts);
  expect_failure<DeviceError>(
      "a stream of it", [&] { gpu::make_stream(beyond.index); }, parts);
  expect_failure<DeviceError>(
      "waiting for it", [&] { gpu::synchronize(beyond.index); }, parts);
  expect_failure<ValueError>("a name of none", [] { parse_device("cuda:x"); },
                             {"cpu, meta, cuda or cuda:N"});
}

TEST_F(CudaBadInput, MoreMemoryThanThereIs) {
  const std::vector<std::string> parts = {"bytes on cuda:0", "bytes free", "in use",
                                          "memory in bytes"};
  const int64_t many = int64_t{1} << 40;  // elements: 4 TiB
  expect_failure<OutOfMemory>(
      "a tensor", [&] { raw::empty({many}, kF32, cuda(0)); }, parts);
  expect_failure<OutOfMemory>(
      "a result",
      [&] {
        const Tensor line = raw::zeros({1 << 20, 1}, kF32, cuda(0));
        line + line.t();  // [2^20, 2^20]
      },
      parts);
  expect_failure<OutOfMemory>("pinned memory",
                              [] { gpu::pinned_allocator().allocate(size_t{1} << 60); },
                              {"page-locked memory"});
}

TEST_F(CudaBadInput, OperandsOfOtherDevices) {
  const Tensor there = raw::zeros({2, 2}, kF32, cuda(0)), here = raw::zeros({2, 2}, kF32);
  expect_failure<DeviceError>("a sum", [&] { there + here; }, {"cuda:0", "cpu"});
  expect_failure<DeviceError>("a product", [&] { matmul(there, here); }, {"cuda:0", "cpu"});
  expect_failure<DeviceError>("an index", [&] { embedding(tensor({1}, kI64), there); },
                              {"cuda:0", "cpu"});
}

TEST_F(CudaBadInput, DtypesThatAKernelDoesNotTake) {
  const Tensor x = raw::zeros({4, 4}, kF32, cuda(0)), whole = raw::zeros({4, 4}, kI64, cuda(0));
  const Tensor low = x.to(kF8E4M3);
  expect_failure<DTypeError>("a sum of fp8", [&] { low.sum(); }, {"fp8"});
  expect_failure<DTypeError>("a float index",
                             [&] { index_select(x, 0, raw::zeros({2}, kF32, cuda(0))); },
                             {"index of dtype i64 or i32"});
  expect_failure<DTypeError>("a norm of integers", [&] { layer_norm(whole, {4}); }, {"i64"});
  expect_failure<DTypeError>("a product of two dtypes", [&] { matmul(x, whole); }, {"i64"});
  expect_failure<ShapeError>("a product that does not fit",
                             [&] {
                               matmul(x, raw::zeros({3, 2}, kF32, cuda(0)));
                             },
                             {"f32[3, 2] cuda:0"});
}

// Rows that begin at any element: vectors are taken where the address allows, single elements where
// it does not.
TEST_F(CudaBadInput, AddressesThatAreNotAlignedAreNoError) {
  manual_seed(4);
  const Tensor host = randn({67}), there = host.to(cuda(0));
  for (int64_t start = 0; start < 4; ++start) {
    for (const DType dtype : {kF32, kBF16}) {
      const Tensor expected = host.to(dtype).narrow(0, start, 60).reshape({4, 15}).softmax(1);
      const Tensor got = there.to(dtype).narrow(0, start, 60).reshape({4, 15}).softmax(1);
      const std::vector<double> a = got.to_vector(), b = expected.to_vector();
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_NEAR(a[i], b[i], dtype == kF32 ? 1e-6 : 1e-2) << start;
      }
    }
  }
}

// Found by the kernels, told by the next call that waits.
TEST_F(CudaBadInput, IndicesOutOfRangeInDeviceData) {
  const Tensor table = raw::zeros({4, 3}, kF32, cuda(0));
  const Tensor wrong = tensor({1, 9, 2}, kI64).to(cuda(0));
  const Tensor negative = tensor({1, -1, 2}, kI64).to(cuda(0));
  const Tensor plane = raw::view(tensor({0, 1, 9, 0, 2, 1}, kI64), {2, 3}).to(cuda(0));
  const Tensor ones = raw::full({3, 3}, 1, kF32, cuda(0));
  const std::vector<std::pair<const char*, std::function<void()>>> calls = {
      {"embedding", [&] { embedding(wrong, table); }},
      {"index_select", [&] { index_select(table, 0, wrong); }},
      {"gather", [&] { gather(table, 0, plane); }},
      {"scatter", [&] { scatter(table, 0, plane, 1.0); }},
      {"scatter_add",
       [&] {
         scatter_add(table, 0, plane, raw::zeros({2, 3}, kF32, cuda(0)));
       }},
      {"index_add", [&] { index_add(table, 0, wrong, ones); }},
      {"index", [&] { index(table, {wrong}); }},
      {"index_put", [&] { index_put(table, {wrong}, ones); }},
      {"cross_entropy",
       [&] {
         cross_entropy(raw::zeros({3, 4}, kF32, cuda(0)), wrong);
       }},
      {"one_hot", [&] { one_hot(wrong, 4); }}};
  for (const auto& [op, call] : calls) {
    expect_failure<IndexError>(op, call,
                               {op, "index 9 at element", "is outside [", "4)",
                                "check where the indices come from", "cuda:0"});
  }
  expect_failure<IndexError>("a negative one", [&] { embedding(negative, table); },
                             {"index -1 at element 1"});
  expect_failure<ValueError>("bincount", [&] { bincount(negative); },
                             {"bincount", "must not be negative"});
}

TEST_F(CudaBadInput, OneErrorOfManyIsToldOnce) {
  const Tensor table = raw::zeros({4, 3}, kF32, cuda(0));
  const Tensor wrong = tensor({8, 9}, kI64).to(cuda(0));
  const Tensor first = embedding(wrong, table), second = index_select(table, 0, wrong);
  EXPECT_THROW(second.to_vector(), IndexError);
  EXPECT_EQ(first.to_vector(), std::vector<double>(6, 0));
  EXPECT_EQ(second.to_vector(), std::vector<double>(6, 0));
}

}  // namespace
}  // namespace tessera::test_cuda_bad_input
