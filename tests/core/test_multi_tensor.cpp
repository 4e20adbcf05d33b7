#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels::test_multi_tensor {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Values in [-1, 1) that look random and depend on nothing but (i, seed).
double value_at(int64_t i, int seed) {
  uint64_t h = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed) * 977;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9u;
  h ^= h >> 29;
  return static_cast<double>(h >> 11) * 0x1p-52 - 1;
}
Tensor filled(int64_t size, int seed, DType dtype = kF32, double scale = 1) {
  std::vector<double> values(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) values[static_cast<size_t>(i)] = scale * value_at(i, seed);
  return tensor(std::span<const double>(values), {size}, dtype);
}
Tensor zeros_of(const Tensor& x) { return raw::zeros(x.shape(), x.dtype() == kF64 ? kF64 : kF32); }
Tensor copy_of(const Tensor& x) {
  return tensor(std::span<const double>(x.to_vector<double>()), x.shape(), x.dtype());
}
std::vector<double> scalars_of(double lr, double step, double gradient_scale = 1) {
  return {lr, step, gradient_scale, 0};
}
double largest_difference(const Tensor& x, const std::vector<double>& expected) {
  const std::vector<double> values = x.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    largest = std::max(largest, std::abs(values[i] - expected[i]));
  }
  return largest;
}
bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.nbytes() == 0 || b.nbytes() == 0) return a.nbytes() == b.nbytes();  // no address to compare
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}

// The update of one element in f64, as its paper and torch's documentation write it.
struct ReferenceAdam {
  double p, m = 0, v = 0, largest = 0;
  void step(double g, double lr, int t, const rules::AdamW::Options& o, bool decoupled,
            bool amsgrad) {
    if (o.maximize) g = -g;
    if (decoupled) {
      p *= 1 - lr * o.weight_decay;
    } else {
      g += o.weight_decay * p;
    }
    m = o.betas[0] * m + (1 - o.betas[0]) * g;
    v = o.betas[1] * v + (1 - o.betas[1]) * g * g;
    largest = std::max(largest, v);
    const double corrected = (amsgrad ? largest : v) / (1 - std::pow(o.betas[1], t));
    p -= lr * (m / (1 - std::pow(o.betas[0], t))) / (std::sqrt(corrected) + o.eps);
  }
};

struct AdamCase {
  DType dtype;
  bool decoupled, amsgrad, maximize;
  double weight_decay;
};
class Adam : public testing::TestWithParam<AdamCase> {};

TEST_P(Adam, follows_its_formula_for_ten_steps) {
  const AdamCase c = GetParam();
  const rules::AdamW::Options options{.weight_decay = c.weight_decay, .maximize = c.maximize};
  const rules::Adam::Options coupled{.weight_decay = c.weight_decay, .maximize = c.maximize};
  const int64_t size = 3000;  // several stages, and a rest that fills no register
  const Tensor param = filled(size, 1, c.dtype);
  UpdateTensors entry{param, {}, {zeros_of(param), zeros_of(param)}};
  if (c.amsgrad) entry.states[2] = zeros_of(param);
  std::vector<ReferenceAdam> reference;
  for (double p : param.to_vector<double>()) reference.push_back({p});
  for (int t = 1; t <= 10; ++t) {
    entry.grad = filled(size, 10 + t, c.dtype);
    const std::vector<double> grad = entry.grad.to_vector<double>();
    const std::vector<double> scalars = scalars_of(1e-2, t, 0.5);
    if (c.decoupled) {
      multi_tensor_update<rules::AdamW>({&entry, 1}, options, scalars.data());
    } else {
      multi_tensor_update<rules::Adam>({&entry, 1}, coupled, scalars.data());
    }
    for (size_t i = 0; i < reference.size(); ++i) {
      reference[i].step(0.5 * grad[i], 1e-2, t, options, c.decoupled, c.amsgrad);
    }
    // Low-precision parameters are rounded at every step; go on from the rounded value.
    if (is_low_precision(c.dtype)) {
      const std::vector<double> rounded = param.to_vector<double>();
      for (size_t i = 0; i < reference.size(); ++i) {
        ASSERT_NEAR(rounded[i], reference[i].p, 1.01 * epsilon_of(c.dtype));
        reference[i].p = rounded[i];
      }
    }
  }
  std::vector<double> expected;
  for (const ReferenceAdam& r : reference) expected.push_back(r.p);
  EXPECT_LT(largest_difference(param, expected), 20 * epsilon_of(c.dtype));
}
INSTANTIATE_TEST_SUITE_P(Variants, Adam,
                         testing::Values(AdamCase{kF32, true, false, false, 0.1},
                                         AdamCase{kF32, false, false, false, 0.1},
                                         AdamCase{kF32, true, true, true, 0},
                                         AdamCase{kF64, true, false, false, 0.1},
                                         AdamCase{kF64, false, true, false, 0.1},
                                         AdamCase{kBF16, true, false, false, 0.1},
                                         AdamCase{kF16, true, false, false, 0.0}));

// torch.optim.AdamW([1., -2., 0.5], lr=0.1, weight_decay=0.1), gradients [0.3, -0.1, 2.] times the
// step's number, three steps.
TEST(MultiTensor, AdamW_gives_the_numbers_of_torch) {
  const Tensor param = tensor({1.0, -2.0, 0.5});
  const UpdateTensors entry{param, {}, {zeros_of(param), zeros_of(param)}};
  for (int t = 1; t <= 3; ++t) {
    UpdateTensors now = entry;
    now.grad = tensor({0.3 * t, -0.1 * t, 2.0 * t});
    multi_tensor_update<rules::AdamW>({&now, 1}, {.weight_decay = 0.1}, scalars_of(0.1, t).data());
  }
  EXPECT_LT(largest_difference(param, {0.680935864, -1.651234877, 0.195786358}), 3e-7);
}

TEST(MultiTensor, SGD_gives_the_numbers_of_torch) {
  const auto run = [](const rules::SGD::Options& options) {
    const Tensor param = tensor({1.0, -2.0, 0.5});
    UpdateTensors entry{param, {}, {zeros_of(param)}};
    for (int t = 1; t <= 3; ++t) {
      entry.grad = tensor({0.3 * t, -0.1 * t, 2.0 * t});
      multi_tensor_update<rules::SGD>({&entry, 1}, options, scalars_of(0.1, t).data());
    }
    return param;
  };
  EXPECT_LT(
      largest_difference(run({.weight_decay = 0.1}), {0.791496000, -1.880997000, -0.706870500}),
      3e-7);
  EXPECT_LT(largest_difference(run({.momentum = 0.9, .dampening = 0.5}),
                               {0.816700000, -1.938900000, -0.722000000}),
            3e-7);
  EXPECT_LT(largest_difference(run({.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}),
                               {0.489358764, -1.697942823, -2.416454209}),
            3e-7);
}

TEST(MultiTensor, Adagrad_gives_the_numbers_of_torch) {
  const Tensor param = tensor({1.0, -2.0, 0.5});
  UpdateTensors entry{param, {}, {raw::full({3}, 0.2, kF32)}};
  for (int t = 1; t <= 3; ++t) {
    entry.grad = tensor({0.3 * t, -0.1 * t, 2.0 * t});
    multi_tensor_update<rules::Adagrad>({&entry, 1}, {.lr_decay = 0.1, .weight_decay = 0.1},
                                        scalars_of(0.1, t).data());
  }
  EXPECT_LT(largest_difference(param, {0.803552540, -1.841323182, 0.255103905}), 3e-7);
}

TEST(MultiTensor, RMSprop_gives_the_numbers_of_torch) {
  const Tensor param = tensor({1.0, -2.0, 0.5});
  UpdateTensors entry{param, {}, {zeros_of(param), zeros_of(param), zeros_of(param)}};
  for (int t = 1; t <= 3; ++t) {
    entry.grad = tensor({0.3 * t, -0.1 * t, 2.0 * t});
    multi_tensor_update<rules::RMSprop>({&entry, 1}, {.weight_decay = 0.1, .momentum = 0.9},
                                        scalars_of(0.01, t).data());
  }
  EXPECT_LT(largest_difference(param, {0.482940921, -1.504698677, -0.024650493}), 1e-6);
}

TEST(MultiTensor, Lion_moves_by_the_sign_and_decays) {
  const Tensor param = tensor({1.0, -2.0, 0.5});
  UpdateTensors entry{param, tensor({0.3, -0.1, 0.0}), {zeros_of(param)}};
  multi_tensor_update<rules::Lion>({&entry, 1}, {.weight_decay = 0.1}, scalars_of(0.1, 1).data());
  EXPECT_LT(largest_difference(param, {0.89, -1.88, 0.495}), 1e-6);
  EXPECT_LT(largest_difference(entry.states[0], {0.003, -0.001, 0}), 1e-8);
  entry.grad = tensor({-0.3, -0.1, 0.0});  // 0.9 * 0.003 - 0.1 * 0.3 < 0: the sign turns
  multi_tensor_update<rules::Lion>({&entry, 1}, {}, scalars_of(0.1, 2).data());
  EXPECT_LT(largest_difference(param, {0.99, -1.78, 0.495}), 1e-6);
}

TEST(MultiTensor,
     many_tensors_of_all_sizes_have_the_bits_of_one_at_a_time_and_of_any_thread_count) {
  const std::vector<int64_t> sizes = {1,    0, 7, 768, kMultiTensorChunk, kMultiTensorChunk + 1,
                                      50001};
  const auto make = [&] {
    std::vector<UpdateTensors> list;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Tensor param = filled(sizes[i], static_cast<int>(i));
      list.push_back(
          {param, filled(sizes[i], 100 + static_cast<int>(i)), {zeros_of(param), zeros_of(param)}});
    }
    return list;
  };
  const std::vector<double> scalars = scalars_of(1e-3, 1);
  const int threads = num_threads();
  std::vector<UpdateTensors> one_by_one = make(), single = make(), two = make();
  for (UpdateTensors& t : one_by_one)
    multi_tensor_update<rules::AdamW>({&t, 1}, {}, scalars.data());
  set_num_threads(1);
  multi_tensor_update<rules::AdamW>(single, {}, scalars.data());
  set_num_threads(2);
  multi_tensor_update<rules::AdamW>(two, {}, scalars.data());
  set_num_threads(threads);
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_TRUE(same_bits(one_by_one[i].param, single[i].param)) << "size " << sizes[i];
    EXPECT_TRUE(same_bits(single[i].param, two[i].param)) << "size " << sizes[i];
    EXPECT_TRUE(same_bits(single[i].states[1], two[i].states[1])) << "size " << sizes[i];
  }
}

TEST(MultiTensor, a_model_copy_receives_the_rounded_new_value) {
  const Tensor master = filled(2000, 1), model_copy = raw::zeros({2000}, kBF16);
  const UpdateTensors entry{
      master, filled(2000, 2, kBF16), {zeros_of(master), zeros_of(master)}, model_copy};
  multi_tensor_update<rules::AdamW>({&entry, 1}, {}, scalars_of(0.1, 1).data());
  const std::vector<float> values = master.to_vector<float>();
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(model_copy.data_as<bf16>()[i].bits, from_float<bf16>(values[i]).bits) << "at " << i;
  }
}

// What a pass does with narrow tensors is what it does with their widened copies, rounded.
TEST(MultiTensor, narrow_operands_give_the_bits_of_widened_ones) {
  const std::vector<double> scalars = scalars_of(0.1, 3, 0.5);
  const auto widened = [](const Tensor& x) { return convert(x, kF32); };
  for (const DType narrow : {kBF16, kF16}) {
    for (const int64_t size : {7, 1000, 20001}) {  // less than a register, a block; two chunks
      const Tensor grad = filled(size, 2, narrow), values = filled(size, 1, narrow);
      const auto check = [&](const char* name, auto&& pass) {
        SCOPED_TRACE(testing::Message() << name << ' ' << narrow << ' ' << size);
        const auto state = [&](int seed) {
          const Tensor x = filled(size, seed);
          for (int64_t i = 0; i < size; ++i) x.data_as<float>()[i] += 2;  // squares are positive
          return x;
        };
        const Tensor expected = widened(values), expected_state = state(5);
        pass(expected, widened(grad), expected_state, Tensor());
        const Tensor master = widened(values), model_copy = raw::zeros({size}, narrow);
        const Tensor master_state = state(5);
        pass(master, grad, master_state, model_copy);
        EXPECT_TRUE(same_bits(master, expected));
        EXPECT_TRUE(same_bits(master_state, expected_state));
        EXPECT_TRUE(same_bits(model_copy, convert(expected, narrow)));
        const Tensor own = copy_of(values), own_state = state(5);
        pass(own, grad, own_state, Tensor());
        EXPECT_TRUE(same_bits(own, convert(expected, narrow)));
        EXPECT_TRUE(same_bits(own_state, expected_state));
      };
      check("sgd",
            [&](const Tensor& p, const Tensor& g, const Tensor& s, const Tensor& model_copy) {
              const UpdateTensors entry{p, g, {s}, model_copy};
              multi_tensor_update<rules::SGD>({&entry, 1}, {.momentum = 0.9, .nesterov = true},
                                              scalars.data());
            });
      check("adam",
            [&](const Tensor& p, const Tensor& g, const Tensor& s, const Tensor& model_copy) {
              const UpdateTensors entry{p, g, {zeros_of(s), s}, model_copy};
              multi_tensor_update<rules::AdamW>({&entry, 1}, {}, scalars.data());
            });
      check("lion",
            [&](const Tensor& p, const Tensor& g, const Tensor& s, const Tensor& model_copy) {
              const UpdateTensors entry{p, g, {s}, model_copy};
              multi_tensor_update<rules::Lion>({&entry, 1}, {.weight_decay = 0.1}, scalars.data());
            });
      check("adagrad", [&](const Tensor& p, const Tensor& g, const Tensor& s,
                           const Tensor& model_copy) {
        const UpdateTensors entry{p, g, {s}, model_copy};
        multi_tensor_update<rules::Adagrad>({&entry, 1}, {.weight_decay = 0.1}, scalars.data());
      });
      check("rmsprop",
            [&](const Tensor& p, const Tensor& g, const Tensor& s, const Tensor& model_copy) {
              const UpdateTensors entry{p, g, {s}, model_copy};
              multi_tensor_update<rules::RMSprop>({&entry, 1}, {}, scalars.data());
            });
      const std::vector<Tensor> one{grad}, wide{widened(grad)};
      EXPECT_EQ(multi_tensor_norm(one), multi_tensor_norm(wide));
    }
  }
}

TEST(MultiTensor, a_transposed_gradient_meets_its_own_elements) {
  const Tensor param = raw::view(filled(12, 1), {3, 4});
  const Tensor grad = raw::transpose(raw::view(filled(12, 2), {4, 3}), 0, 1);
  std::vector<double> expected = param.to_vector<double>();
  const std::vector<double> g = grad.to_vector<double>();
  for (size_t i = 0; i < expected.size(); ++i) expected[i] -= 0.1 * g[i];
  const UpdateTensors entry{param, grad};
  multi_tensor_update<rules::SGD>({&entry, 1}, {}, scalars_of(0.1, 1).data());
  EXPECT_LT(largest_difference(param, expected), 2e-7);
}

TEST(MultiTensor, a_step_marks_what_it_wrote_and_a_skipped_one_writes_nothing) {
  const Tensor param = filled(10, 1), before = copy_of(param);
  const UpdateTensors entry{param, filled(10, 2), {zeros_of(param), zeros_of(param)}};
  const uint32_t version = param.version();
  multi_tensor_update<rules::AdamW>({&entry, 1}, {}, std::vector<double>{0.1, 1, 1, 1}.data());
  EXPECT_TRUE(same_bits(param, before));
  EXPECT_EQ(param.version(), version);
  multi_tensor_update<rules::AdamW>({&entry, 1}, {}, scalars_of(0.1, 1).data());
  EXPECT_FALSE(same_bits(param, before));
  EXPECT_GT(param.version(), version);
}

TEST(MultiTensor, wrong_tensors_are_named_before_anything_is_written) {
  const Tensor param = filled(10, 1), before = copy_of(param);
  const std::vector<double> scalars = scalars_of(0.1, 1);
  const UpdateTensors good{param, filled(10, 2), {zeros_of(param), zeros_of(param)}};
  UpdateTensors bad = good;
  bad.grad = filled(9, 2);
  EXPECT_THROW(multi_tensor_update<rules::AdamW>(std::vector{good, bad}, {}, scalars.data()),
               ShapeError);
  bad = good;
  bad.states[0] = raw::zeros({10}, kBF16);
  EXPECT_THROW(multi_tensor_update<rules::AdamW>(std::vector{good, bad}, {}, scalars.data()),
               DTypeError);
  bad = good;
  const Tensor elsewhere = raw::empty({10}, kF32, kMeta);
  for (Tensor* x : {&bad.param, &bad.grad, &bad.states[1], &bad.model_copy}) *x = elsewhere;
  EXPECT_THROW(multi_tensor_update<rules::AdamW>(std::vector{good, bad}, {}, scalars.data()),
               DeviceError);
  const std::vector<Tensor> two_devices = {param, elsewhere};
  const double two = 2;
  EXPECT_THROW(multi_tensor_scale(two_devices, &two), DeviceError);
  EXPECT_THROW(multi_tensor_clamp(two_devices, 0.1), DeviceError);
  EXPECT_THROW(multi_tensor_zero(two_devices), DeviceError);
  EXPECT_THROW(multi_tensor_lerp(two_devices, two_devices, 0.1), DeviceError);
  bad = good;
  bad.states[0] = Tensor();
  EXPECT_THROW(multi_tensor_update<rules::AdamW>(std::vector{good, bad}, {}, scalars.data()),
               ValueError);
  // One that the options ask for, behind one that they do not.
  const UpdateTensors without_momentum{param, filled(10, 2), {zeros_of(param)}};
  EXPECT_THROW(multi_tensor_update<rules::RMSprop>({&without_momentum, 1}, {.momentum = 0.9},
                                                   scalars.data()),
               ValueError);
  EXPECT_TRUE(same_bits(param, before));
}

TEST(MultiTensor, the_global_norm_is_exact_to_f64_and_does_not_depend_on_threads) {
  const std::vector<Tensor> list = {filled(100000, 1), filled(1, 2), filled(777, 3, kBF16),
                                    filled(40000, 4, kF64)};
  for (double p : {1.0, 2.0, 3.0, kInfinity}) {
    double expected = 0;
    for (const Tensor& x : list) {
      for (double v : x.to_vector<double>()) {
        expected =
            std::isinf(p) ? std::max(expected, std::abs(v)) : expected + std::pow(std::abs(v), p);
      }
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    const int threads = num_threads();
    set_num_threads(1);
    const double single = multi_tensor_norm(list, p);
    set_num_threads(2);
    const double two = multi_tensor_norm(list, p);
    set_num_threads(threads);
    EXPECT_EQ(single, two);
    EXPECT_NEAR(single / expected, 1, 1e-12) << "p " << p;
  }
}

TEST(MultiTensor, the_norm_tells_of_elements_that_are_not_finite) {
  Tensor x = filled(40000, 1);
  x.data_as<float>()[33333] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Tensor> list = {filled(10, 2), x, filled(10, 3)};
  EXPECT_TRUE(std::isnan(multi_tensor_norm(list)));
  EXPECT_TRUE(std::isnan(multi_tensor_norm(list, kInfinity)));
  x.data_as<float>()[33333] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(multi_tensor_norm(list)));
  EXPECT_EQ(multi_tensor_norm(std::vector<Tensor>{}), 0);
}

TEST(MultiTensor, scaling_clamping_zeroing_and_averaging_work_in_place) {
  const Tensor a = filled(3000, 1), b = filled(3000, 2, kBF16);
  const std::vector<double> was = a.to_vector<double>();
  const double half = 0.5;
  multi_tensor_scale(std::vector{a, b}, &half);
  for (size_t i = 0; i < was.size(); ++i) ASSERT_EQ(a.data_as<float>()[i], 0.5 * was[i]);
  multi_tensor_clamp(std::vector{a, b}, 0.25);
  for (const Tensor& x : {a, b}) {
    for (double v : x.to_vector<double>()) ASSERT_LE(std::abs(v), 0.25);
  }
  const Tensor average = raw::zeros({3000}, kF32);
  multi_tensor_lerp(std::vector{average}, std::vector{b}, 0.125);
  const std::vector<double> source = b.to_vector<double>();
  for (size_t i = 0; i < source.size(); ++i) {
    ASSERT_EQ(average.data_as<float>()[i], 0.125 * source[i]);
  }
  multi_tensor_zero(std::vector{a, b});
  for (double v : b.to_vector<double>()) ASSERT_EQ(v, 0);
}

TEST(MultiTensor, meta_tensors_are_checked_and_left_alone) {
  const Tensor meta = raw::empty({4}, kF32, kMeta);
  const UpdateTensors entry{meta, meta, {meta, meta}};
  EXPECT_NO_THROW(multi_tensor_update<rules::AdamW>({&entry, 1}, {}, scalars_of(0.1, 1).data()));
}

// ---- Copies -------------------------------------------------------------------------------------

TEST(MultiTensorCopy, GivesTheBitsOfCopiesOneByOne) {
  const std::vector<int64_t> lengths = {0, 1, 7, 40000, 16384, 3};
  for (const DType from : {kF64, kF32, kF16, kBF16}) {
    for (const DType to : {kF64, kF32, kF16, kBF16}) {
      const Tensor flat = raw::empty({57000}, to), expected = raw::full({57000}, 5, to);
      fill(flat, 5);
      std::vector<Tensor> sources, targets;
      int64_t place = 1;
      for (const int64_t length : lengths) {
        sources.push_back(filled(length, static_cast<int>(length), from, 1e4));
        targets.push_back(raw::narrow(flat, 0, place, length));
        copy_into(raw::narrow(expected, 0, place, length), sources.back());
        place += length + 3;
      }
      const int64_t version = flat.version();
      multi_tensor_copy(targets, sources);
      EXPECT_TRUE(same_bits(flat, expected)) << from << " to " << to;
      EXPECT_GT(flat.version(), version);
    }
  }
}

TEST(MultiTensorCopy, TakesSourcesOfAnyLayoutAndMovesEqualDtypesAsBits) {
  const Tensor x = raw::view(filled(12, 1), {3, 4}), bytes = raw::arange(0, 1, 12, kU8);
  const std::vector<Tensor> sources = {raw::transpose(x, 0, 1), bytes};
  const std::vector<Tensor> targets = {raw::empty({4, 3}, kBF16), raw::empty({12}, kU8)};
  multi_tensor_copy(targets, sources);
  EXPECT_TRUE(same_bits(targets[0], kernels::contiguous(convert(sources[0], kBF16))));
  EXPECT_TRUE(same_bits(targets[1], bytes));
}

TEST(MultiTensorCopy, RefusesWhatDoesNotFitAndWritesNothing) {
  const Tensor a = raw::zeros({4}, kF32), b = raw::full({4}, 1, kF32),
               whole = raw::zeros({2, 4}, kF32);
  const auto copy_all = [](std::vector<Tensor> targets, std::vector<Tensor> sources) {
    multi_tensor_copy(targets, sources);
  };
  EXPECT_THROW(copy_all({a}, {}), ShapeError);
  EXPECT_THROW(copy_all({a, a}, {b, raw::zeros({5}, kF32)}), ShapeError);
  EXPECT_THROW(copy_all({a, raw::transpose(whole, 0, 1)}, {b, raw::zeros({4, 2}, kF32)}),
               ShapeError);
  EXPECT_THROW(copy_all({a, raw::zeros({4}, kI64)}, {b, b}), DTypeError);
  EXPECT_THROW(copy_all({a, raw::empty({4}, kF32, kMeta)}, {b, b}), DeviceError);
  EXPECT_EQ(a.to_vector<double>(), std::vector<double>(4, 0));
  copy_all({}, {});
  copy_all({raw::empty({4}, kF16, kMeta)}, {raw::empty({4}, kF32, kMeta)});
}

// Segments of two flat buffers, in an order and at places of their own: the target's are those of
// the source in another order, with padding between them.
struct Cut {
  int64_t from, to, numel;  // from < 0: padding
};
std::vector<Cut> cuts_of(const std::vector<int64_t>& lengths, int64_t& total) {
  std::vector<Cut> cuts;
  int64_t place = 1;
  for (const int64_t length : lengths) {
    cuts.push_back({place, 0, length});
    place += length + 1;
  }
  total = 3;  // odd places for what is not aligned by itself
  std::reverse(cuts.begin(), cuts.end());
  std::vector<Cut> padded;
  for (Cut& cut : cuts) {
    cut.to = total;
    padded.push_back(cut);
    total += cut.numel;
    padded.push_back({-1, total, cut.numel % 5});
    total += cut.numel % 5 + cut.numel % 2;  // an element that nobody writes
  }
  total += 9;
  return padded;
}

TEST(CopySegments, hold_what_a_loop_over_elements_writes) {
  std::vector<int64_t> few = {0, 1, 7, 40000, 16384, 3, 16385, 16383, 70001}, many;
  for (int64_t i = 0; i < 3000; ++i) many.push_back(i * 7 % 23);
  const int threads = num_threads();
  for (const std::vector<int64_t>& lengths : {few, many}) {
    int64_t total = 0;
    const std::vector<Cut> cuts = cuts_of(lengths, total);
    for (const DType from : {kF64, kF32, kF16, kBF16}) {
      const Tensor source = filled(200000, 3, from, 1e4);
      for (const DType to : {kF64, kF32, kF16, kBF16}) {
        const Tensor converted = convert(source, to), expected = raw::full({total}, 5, to);
        const auto size = size_of(to);
        auto* const bytes = static_cast<char*>(expected.data());
        for (const Cut& cut : cuts) {
          for (int64_t i = 0; i < cut.numel; ++i) {
            char* const element = bytes + (cut.to + i) * size;
            if (cut.from < 0) {
              std::memset(element, 0, static_cast<size_t>(size));
            } else {
              std::memcpy(element,
                          static_cast<const char*>(converted.data()) + (cut.from + i) * size,
                          static_cast<size_t>(size));
            }
          }
        }
        for (const int count : {1, 4}) {
          SCOPED_TRACE(testing::Message() << lengths.size() << " of " << from << " to " << to
                                          << " on " << count << " threads");
          set_num_threads(count);
          const Tensor target = raw::full({total}, 5, to);
          std::vector<CopySegment> segments;
          for (const Cut& cut : cuts) {
            segments.push_back(
                {cut.from < 0 ? nullptr
                              : static_cast<const char*>(source.data()) + cut.from * size_of(from),
                 static_cast<char*>(target.data()) + cut.to * size, cut.numel});
          }
          copy_segments(segments, from, to, kCpu);
          EXPECT_TRUE(same_bits(target, expected));
        }
      }
    }
  }
  set_num_threads(threads);
}

TEST(CopySegments, move_equal_dtypes_of_any_kind_as_bits) {
  const Tensor x = raw::arange(0, 1, 300, kU8);
  for (const DType dtype : {kU8, kBool, kF8E4M3, kI32, kI64}) {
    const int64_t n = 32;
    const Tensor y = raw::empty({300}, kU8);
    fill(y, 9);
    const CopySegment segment{x.data_as<uint8_t>() + 8, y.data_as<uint8_t>() + 16, n};
    copy_segments({&segment, 1}, dtype, dtype, kCpu);
    const int64_t bytes = n * size_of(dtype);
    for (int64_t i = 0; i < 300; ++i) {
      const bool written = i >= 16 && i < 16 + bytes;
      ASSERT_EQ(y.data_as<uint8_t>()[i], written ? static_cast<uint8_t>(i - 8) : 9)
          << dtype << " " << i;
    }
  }
}

TEST(CopySegments, refuse_what_does_not_fit_and_write_nothing) {
  const Tensor x = raw::full({4}, 1, kF32), y = raw::zeros({4}, kF32);
  const auto copied = [&](std::vector<CopySegment> segments, DType from, DType to,
                          const Device& device = kCpu) {
    copy_segments(segments, from, to, device);
  };
  const CopySegment good{x.data(), y.data(), 4};
  EXPECT_THROW(copied({good}, kF32, kI32), DTypeError);
  EXPECT_THROW(copied({good}, kF32, kF8E4M3), DTypeError);
  EXPECT_THROW(copied({good, {x.data(), nullptr, 1}}, kF32, kF32), ValueError);
  EXPECT_THROW(copied({good, {x.data(), y.data(), -1}}, kF32, kF32), ValueError);
  copied({}, kF32, kBF16);
  copied({{nullptr, nullptr, 0}}, kF32, kBF16);
  copied({good, {nullptr, nullptr, 7}}, kF32, kF32, kMeta);
  EXPECT_EQ(y.to_vector<double>(), std::vector<double>(4, 0));
}

// ---- Sums of several tensors --------------------------------------------------------------------

// Whole chunks: one more or one fewer of a tensor's partials would be its neighbour's.
TEST(MultiTensor, sums_of_whole_chunks_are_those_of_their_own_tensor) {
  const int64_t chunk = kMultiTensorChunk;
  const std::vector<int64_t> sizes = {chunk, 2 * chunk, 0, 1, chunk + 1, 3 * chunk, chunk - 1};
  for (const DType dtype : {kF32, kBF16, kF64}) {
    std::vector<Tensor> tensors;
    for (size_t t = 0; t < sizes.size(); ++t) {
      // Powers of two, whose sums are exact in f64.
      tensors.push_back(raw::full({sizes[t]}, t % 2 == 0 ? 0x1p-3 : -0x1p2, dtype));
    }
    const std::vector<double> sums = multi_tensor_power_sums(tensors, 1);
    const std::vector<double> largest = multi_tensor_power_sums(tensors, kInfinity);
    ASSERT_EQ(sums.size(), sizes.size());
    ASSERT_EQ(largest.size(), sizes.size());
    double total = 0;
    for (size_t t = 0; t < sizes.size(); ++t) {
      const double magnitude = t % 2 == 0 ? 0x1p-3 : 0x1p2;
      EXPECT_EQ(sums[t], magnitude * static_cast<double>(sizes[t])) << t << " of " << dtype;
      EXPECT_EQ(largest[t], sizes[t] == 0 ? 0 : magnitude) << t << " of " << dtype;
      total += sums[t];
    }
    EXPECT_EQ(multi_tensor_norm(tensors, 1), total);
    EXPECT_EQ(multi_tensor_norm(tensors, kInfinity), 0x1p2);
  }
}

}  // namespace
}  // namespace tessera::kernels::test_multi_tensor
