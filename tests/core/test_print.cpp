// repr() against the texts that torch 2.15 prints for the same tensors.
#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/core/factory/factory.h>
#include <tessera/core/factory/print.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_print {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(Print, TextsAreThoseOfTorch) {
  const struct {
    Tensor x;
    const char* expected;
  } cases[] = {
      {tensor({1, 2, 3}), "tensor([1., 2., 3.])"},
      {tensor({1.5, -2.25, 3}), "tensor([ 1.5000, -2.2500,  3.0000])"},
      {tensor(std::vector<double>{1, 2, 3, 4}, {2, 2}),
       "tensor([[1., 2.],\n"
       "        [3., 4.]])"},
      {raw::full({}, 3.25, kF32), "tensor(3.2500)"},
      {raw::full({}, 7, kI64), "tensor(7)"},
      {raw::full({}, true, kBool), "tensor(True)"},
      {tensor({1, 0, 1}, kBool), "tensor([ True, False,  True])"},
      {tensor({-1, 100, 7}, kI64), "tensor([ -1, 100,   7])"},
      {tensor({-1, 100, 7}, kI32), "tensor([ -1, 100,   7], dtype=torch.int32)"},
      {tensor({1, 2.5}, kF64), "tensor([1.0000, 2.5000], dtype=torch.float64)"},
      {tensor({1, 2.5}, kBF16), "tensor([1.0000, 2.5000], dtype=torch.bfloat16)"},
      {tensor({0.1, 3e-5, -448}, kF8E4M3),
       "tensor([ 1.0156e-01,  0.0000e+00, -4.4800e+02], dtype=torch.float8_e4m3fn)"},
      {tensor({1e-5, 1, 0}), "tensor([1.0000e-05, 1.0000e+00, 0.0000e+00])"},
      {tensor({1e10, 1, -3}), "tensor([ 1.0000e+10,  1.0000e+00, -3.0000e+00])"},
      {tensor({123456, 1.5}), "tensor([1.2346e+05, 1.5000e+00])"},
      {tensor({kNan, kInf, -kInf, 1}), "tensor([nan, inf, -inf, 1.])"},
      {tensor({kNan, kInf, -kInf, 1.5}), "tensor([   nan,    inf,   -inf, 1.5000])"},
      {tensor({-kNan, 0, -0.0}), "tensor([nan, 0., -0.])"},
      {tensor({1e-45, 3e38}), "tensor([1.4013e-45, 3.0000e+38])"},
      {raw::empty({0}, kF32), "tensor([])"},
      {raw::empty({0}, kI64), "tensor([], dtype=torch.int64)"},
      {raw::empty({2, 0, 3}, kF32), "tensor([], size=(2, 0, 3))"},
      {raw::empty({2, 0}, kBool), "tensor([], size=(2, 0), dtype=torch.bool)"},
      {raw::empty({2, 3}, kF32, kMeta), "tensor(..., device='meta', size=(2, 3))"},
      {raw::empty({5}, kI64, kMeta), "tensor(..., device='meta', size=(5,), dtype=torch.int64)"},
      {raw::empty({}, kF16, kMeta), "tensor(..., device='meta', size=(), dtype=torch.float16)"},
      {raw::arange(0, 1, 30, kI64),
       "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n"
       "        18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])"},
      {raw::arange(0, 0.5, 40, kF32),
       "tensor([ 0.0000,  0.5000,  1.0000,  1.5000,  2.0000,  2.5000,  3.0000,  3.5000,\n"
       "         4.0000,  4.5000,  5.0000,  5.5000,  6.0000,  6.5000,  7.0000,  7.5000,\n"
       "         8.0000,  8.5000,  9.0000,  9.5000, 10.0000, 10.5000, 11.0000, 11.5000,\n"
       "        12.0000, 12.5000, 13.0000, 13.5000, 14.0000, 14.5000, 15.0000, 15.5000,\n"
       "        16.0000, 16.5000, 17.0000, 17.5000, 18.0000, 18.5000, 19.0000, 19.5000])"},
      {raw::view(raw::arange(0, 1, 24, kF32), {2, 3, 4}),
       "tensor([[[ 0.,  1.,  2.,  3.],\n"
       "         [ 4.,  5.,  6.,  7.],\n"
       "         [ 8.,  9., 10., 11.]],\n"
       "\n"
       "        [[12., 13., 14., 15.],\n"
       "         [16., 17., 18., 19.],\n"
       "         [20., 21., 22., 23.]]])"},
      {raw::transpose(raw::view(raw::arange(0, 1, 6, kI64), {2, 3}), 0, 1),
       "tensor([[0, 3],\n"
       "        [1, 4],\n"
       "        [2, 5]])"},
      {raw::arange(0, 1, 1001, kI64), "tensor([   0,    1,    2,  ...,  998,  999, 1000])"},
      {raw::view(raw::arange(0, 1, 2000, kF64), {40, 50}),
       "tensor([[0.0000e+00, 1.0000e+00, 2.0000e+00,  ..., 4.7000e+01, 4.8000e+01,\n"
       "         4.9000e+01],\n"
       "        [5.0000e+01, 5.1000e+01, 5.2000e+01,  ..., 9.7000e+01, 9.8000e+01,\n"
       "         9.9000e+01],\n"
       "        [1.0000e+02, 1.0100e+02, 1.0200e+02,  ..., 1.4700e+02, 1.4800e+02,\n"
       "         1.4900e+02],\n"
       "        ...,\n"
       "        [1.8500e+03, 1.8510e+03, 1.8520e+03,  ..., 1.8970e+03, 1.8980e+03,\n"
       "         1.8990e+03],\n"
       "        [1.9000e+03, 1.9010e+03, 1.9020e+03,  ..., 1.9470e+03, 1.9480e+03,\n"
       "         1.9490e+03],\n"
       "        [1.9500e+03, 1.9510e+03, 1.9520e+03,  ..., 1.9970e+03, 1.9980e+03,\n"
       "         1.9990e+03]], dtype=torch.float64)"},
      {raw::view(raw::arange(0, 0.25, 4096, kF32), {8, 4, 128}),
       "tensor([[[0.0000e+00, 2.5000e-01, 5.0000e-01,  ..., 3.1250e+01,\n"
       "          3.1500e+01, 3.1750e+01],\n"
       "         [3.2000e+01, 3.2250e+01, 3.2500e+01,  ..., 6.3250e+01,\n"
       "          6.3500e+01, 6.3750e+01],\n"
       "         [6.4000e+01, 6.4250e+01, 6.4500e+01,  ..., 9.5250e+01,\n"
       "          9.5500e+01, 9.5750e+01],\n"
       "         [9.6000e+01, 9.6250e+01, 9.6500e+01,  ..., 1.2725e+02,\n"
       "          1.2750e+02, 1.2775e+02]],\n"
       "\n"
       "        [[1.2800e+02, 1.2825e+02, 1.2850e+02,  ..., 1.5925e+02,\n"
       "          1.5950e+02, 1.5975e+02],\n"
       "         [1.6000e+02, 1.6025e+02, 1.6050e+02,  ..., 1.9125e+02,\n"
       "          1.9150e+02, 1.9175e+02],\n"
       "         [1.9200e+02, 1.9225e+02, 1.9250e+02,  ..., 2.2325e+02,\n"
       "          2.2350e+02, 2.2375e+02],\n"
       "         [2.2400e+02, 2.2425e+02, 2.2450e+02,  ..., 2.5525e+02,\n"
       "          2.5550e+02, 2.5575e+02]],\n"
       "\n"
       "        [[2.5600e+02, 2.5625e+02, 2.5650e+02,  ..., 2.8725e+02,\n"
       "          2.8750e+02, 2.8775e+02],\n"
       "         [2.8800e+02, 2.8825e+02, 2.8850e+02,  ..., 3.1925e+02,\n"
       "          3.1950e+02, 3.1975e+02],\n"
       "         [3.2000e+02, 3.2025e+02, 3.2050e+02,  ..., 3.5125e+02,\n"
       "          3.5150e+02, 3.5175e+02],\n"
       "         [3.5200e+02, 3.5225e+02, 3.5250e+02,  ..., 3.8325e+02,\n"
       "          3.8350e+02, 3.8375e+02]],\n"
       "\n"
       "        ...,\n"
       "\n"
       "        [[6.4000e+02, 6.4025e+02, 6.4050e+02,  ..., 6.7125e+02,\n"
       "          6.7150e+02, 6.7175e+02],\n"
       "         [6.7200e+02, 6.7225e+02, 6.7250e+02,  ..., 7.0325e+02,\n"
       "          7.0350e+02, 7.0375e+02],\n"
       "         [7.0400e+02, 7.0425e+02, 7.0450e+02,  ..., 7.3525e+02,\n"
       "          7.3550e+02, 7.3575e+02],\n"
       "         [7.3600e+02, 7.3625e+02, 7.3650e+02,  ..., 7.6725e+02,\n"
       "          7.6750e+02, 7.6775e+02]],\n"
       "\n"
       "        [[7.6800e+02, 7.6825e+02, 7.6850e+02,  ..., 7.9925e+02,\n"
       "          7.9950e+02, 7.9975e+02],\n"
       "         [8.0000e+02, 8.0025e+02, 8.0050e+02,  ..., 8.3125e+02,\n"
       "          8.3150e+02, 8.3175e+02],\n"
       "         [8.3200e+02, 8.3225e+02, 8.3250e+02,  ..., 8.6325e+02,\n"
       "          8.6350e+02, 8.6375e+02],\n"
       "         [8.6400e+02, 8.6425e+02, 8.6450e+02,  ..., 8.9525e+02,\n"
       "          8.9550e+02, 8.9575e+02]],\n"
       "\n"
       "        [[8.9600e+02, 8.9625e+02, 8.9650e+02,  ..., 9.2725e+02,\n"
       "          9.2750e+02, 9.2775e+02],\n"
       "         [9.2800e+02, 9.2825e+02, 9.2850e+02,  ..., 9.5925e+02,\n"
       "          9.5950e+02, 9.5975e+02],\n"
       "         [9.6000e+02, 9.6025e+02, 9.6050e+02,  ..., 9.9125e+02,\n"
       "          9.9150e+02, 9.9175e+02],\n"
       "         [9.9200e+02, 9.9225e+02, 9.9250e+02,  ..., 1.0232e+03,\n"
       "          1.0235e+03, 1.0238e+03]]])"},
      {raw::view(raw::arange(0, 1, 1200, kI32), {2, 3, 4, 50}),
       "tensor([[[[   0,    1,    2,  ...,   47,   48,   49],\n"
       "          [  50,   51,   52,  ...,   97,   98,   99],\n"
       "          [ 100,  101,  102,  ...,  147,  148,  149],\n"
       "          [ 150,  151,  152,  ...,  197,  198,  199]],\n"
       "\n"
       "         [[ 200,  201,  202,  ...,  247,  248,  249],\n"
       "          [ 250,  251,  252,  ...,  297,  298,  299],\n"
       "          [ 300,  301,  302,  ...,  347,  348,  349],\n"
       "          [ 350,  351,  352,  ...,  397,  398,  399]],\n"
       "\n"
       "         [[ 400,  401,  402,  ...,  447,  448,  449],\n"
       "          [ 450,  451,  452,  ...,  497,  498,  499],\n"
       "          [ 500,  501,  502,  ...,  547,  548,  549],\n"
       "          [ 550,  551,  552,  ...,  597,  598,  599]]],\n"
       "\n"
       "\n"
       "        [[[ 600,  601,  602,  ...,  647,  648,  649],\n"
       "          [ 650,  651,  652,  ...,  697,  698,  699],\n"
       "          [ 700,  701,  702,  ...,  747,  748,  749],\n"
       "          [ 750,  751,  752,  ...,  797,  798,  799]],\n"
       "\n"
       "         [[ 800,  801,  802,  ...,  847,  848,  849],\n"
       "          [ 850,  851,  852,  ...,  897,  898,  899],\n"
       "          [ 900,  901,  902,  ...,  947,  948,  949],\n"
       "          [ 950,  951,  952,  ...,  997,  998,  999]],\n"
       "\n"
       "         [[1000, 1001, 1002,  ..., 1047, 1048, 1049],\n"
       "          [1050, 1051, 1052,  ..., 1097, 1098, 1099],\n"
       "          [1100, 1101, 1102,  ..., 1147, 1148, 1149],\n"
       "          [1150, 1151, 1152,  ..., 1197, 1198, 1199]]]], dtype=torch.int32)"},
      {raw::expand(raw::arange(0, 1, 3, kF16), {2, 3}),
       "tensor([[0., 1., 2.],\n"
       "        [0., 1., 2.]], dtype=torch.float16)"},
      {tensor({9223372036854775807.0, 1}, kF64),
       "tensor([9.2234e+18, 1.0000e+00], dtype=torch.float64)"},
  };
  for (const auto& [x, expected] : cases) EXPECT_EQ(repr(x), expected) << x;
}

TEST(Print, TheMiddleIsLeftOutAboveAThousandElements) {
  EXPECT_EQ(repr(raw::arange(0, 1, 1000, kI64)).find("..."), std::string::npos);
  EXPECT_EQ(repr(raw::arange(0, 1, 1001, kI64)),
            "tensor([   0,    1,    2,  ...,  998,  999, 1000])");
}

TEST(Print, WhatDoesNotFitTheLineBehindTheValuesGetsOneOfItsOwn) {
  const Tensor x = raw::empty({1, 1000, 1000, 1000, 1000}, kF64, kMeta);
  EXPECT_EQ(repr(x),
            "tensor(..., device='meta', size=(1, 1000, 1000, 1000, 1000),\n"
            "       dtype=torch.float64)");
}

TEST(Print, AnUndefinedTensorSaysSo) { EXPECT_EQ(repr(Tensor()), "undefined"); }

TEST(Print, AStreamGetsTheValuesAndAnErrorTheDescription) {
  const Tensor x = tensor({1, 2, 3});
  std::ostringstream out;
  out << x << ' ' << Tensor();
  EXPECT_EQ(out.str(), "tensor([1., 2., 3.]) undefined");
  try {
    TS_THROW(ValueError, "op", "got ", x, " and ", Tensor());
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "op: got f32[3] cpu and undefined");
  }
}

TEST(Print, WithoutItsBytesATensorShowsItsSize) {
  const Tensor x = tensor({1, 2, 3}, kF64);
  x.storage()->resize(0);
  EXPECT_EQ(repr(x), "tensor(..., size=(3,), dtype=torch.float64)");
}

}  // namespace
}  // namespace tessera::test_print
