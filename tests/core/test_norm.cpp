#include <gtest/gtest.h>

#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/parallel.h>

namespace tessera::test_norm {
namespace {

Tensor waves(const Shape& shape, DType dtype = kF64, double scale = 1, double offset = 0) {
  std::vector<double> values;
  for (int64_t i = 0; i < numel_of(shape); ++i) {
    values.push_back(offset + scale * std::sin(static_cast<double>(i) * 1.3 + offset));
  }
  return tensor(std::span<const double>(values), shape, dtype);
}
Tensor leaf(const Tensor& x) { return detach(clone(x)).set_requires_grad(); }
void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.shape(), b.shape());
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], tolerance) << "at " << i;
}
using Function = std::function<Tensor(const TensorList&)>;
void expect_gradients(const Function& f, const TensorList& inputs) {
  const auto list = [&](const TensorList& in) { return TensorList{f(in)}; };
  const GradcheckResult once = gradcheck(list, inputs);
  EXPECT_TRUE(once.ok) << once.message;
  const GradcheckResult twice = gradgradcheck(list, inputs);
  EXPECT_TRUE(twice.ok) << "second derivatives: " << twice.message;
}
// The specification in ops.
Tensor composed_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensor centred = sub(x, mean(x, {-1}, true));
  const Tensor y = mul(centred, rsqrt(add(mean(square(centred), {-1}, true), eps)));
  return add(mul(y, weight), bias);
}

TEST(LayerNorm, agrees_with_its_composition_for_rows_of_all_lengths) {
  for (int64_t columns : {1, 2, 7, 31, 32, 33, 768, 1024, 1025, 4096, 5000}) {
    const Tensor x = leaf(waves({5, columns}, kF64, 2, 3)), z = leaf(x);
    const Tensor w = leaf(waves({columns}, kF64, 1, 0.4)), v = leaf(w);
    const Tensor b = leaf(waves({columns}, kF64, 1, 0.7)), c = leaf(b);
    const Tensor up = waves({5, columns}, kF64, 1, 0.1);
    const Tensor fused = layer_norm(x, {columns}, w, b),
                 composed = composed_layer_norm(z, v, c, 1e-5);
    expect_close(fused, composed, 1e-11);
    fused.backward(up);
    composed.backward(up);
    expect_close(x.grad(), z.grad(), columns == 1 ? 1e-7 : 1e-10);
    expect_close(w.grad(), v.grad(), 1e-10);
    expect_close(b.grad(), c.grad(), 1e-12);
  }
}

TEST(LayerNorm, in_low_precision_rounds_once) {
  for (DType dtype : {kF32, kBF16, kF16}) {
    for (int64_t columns : {33, 768, 5000}) {
      const Tensor x = waves({9, columns}, dtype, 2, 1), w = waves({columns}, dtype, 1, 0.4);
      const Tensor b = waves({columns}, kF32, 1, 0.7);  // mixed with f32 parameters
      const Tensor wide = layer_norm(to(x, kF64), {columns}, to(w, kF64), to(b, kF64));
      const Tensor y = layer_norm(x, {columns}, w, b);
      EXPECT_EQ(y.dtype(), dtype);
      const auto got = y.to_vector<double>(), expected = wide.to_vector<double>();
      for (size_t i = 0; i < got.size(); ++i) {
        const double eps =
            is_low_precision(dtype) ? 0.6 * epsilon_of(dtype) : 6 * epsilon_of(dtype);
        ASSERT_NEAR(got[i], expected[i], eps * std::max(1.0, std::abs(expected[i])));
      }
    }
  }
}

TEST(LayerNorm, has_first_and_second_derivatives_by_each_input) {
  const Tensor x = leaf(waves({3, 5})), w = leaf(waves({5}, kF64, 1, 0.4));
  const Tensor b = leaf(waves({5}, kF64, 1, 0.2));
  expect_gradients([](const TensorList& in) { return layer_norm(in[0], {5}, in[1], in[2]); },
                   {x, w, b});
  expect_gradients([](const TensorList& in) { return layer_norm(in[0], {5}); }, {x});
  const Tensor deep = leaf(waves({2, 3, 4}));
  expect_gradients([](const TensorList& in) { return layer_norm(in[0], {3, 4}); }, {deep});
}

TEST(LayerNorm, gives_only_the_gradients_that_are_wanted) {
  const Tensor x = waves({3, 5}), w = leaf(waves({5}, kF64, 1, 0.4));
  const Tensor b = leaf(waves({5}, kF64, 1, 0.2));
  sum(layer_norm(x, {5}, detach(w), b)).backward();
  expect_close(b.grad(), full({5}, 3, {kF64}), 0);
  sum(layer_norm(x, {5}, w, {})).backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST(LayerNorm, takes_transposed_rows_and_empty_batches) {
  const Tensor x = waves({6, 8});
  expect_close(layer_norm(transpose(x, 0, 1), {6}), layer_norm(contiguous(transpose(x, 0, 1)), {6}),
               0);
  EXPECT_EQ(layer_norm(empty({0, 4}), {4}, ones({4})).shape(), (Shape{0, 4}));
  const Tensor none = leaf(empty({0, 4}));
  const Tensor w = leaf(ones({4}));
  sum(layer_norm(none, {4}, w)).backward();
  expect_close(w.grad(), zeros({4}), 0);
}

TEST(LayerNorm, gradients_do_not_depend_on_the_thread_count) {
  const int threads = num_threads();
  std::vector<TensorList> results;
  for (int count : {1, 2}) {
    set_num_threads(count);
    TensorList grads;
    for (DType dtype : {kF32, kBF16}) {
      const Tensor x = leaf(waves({700, 96}, dtype)), w = leaf(waves({96}, dtype, 1, 0.4));
      const Tensor b = leaf(waves({96}, dtype, 1, 0.3));
      layer_norm(x, {96}, w, b).backward(waves({700, 96}, dtype, 1, 0.2));
      for (const Tensor& t : {x, w, b}) grads.push_back(t.grad());
    }
    results.push_back(grads);
  }
  set_num_threads(threads);
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_EQ(results[0][i].to_vector<double>(), results[1][i].to_vector<double>());
  }
}

TEST(LayerNorm, refuses_shapes_that_do_not_fit) {
  EXPECT_THROW(layer_norm(waves({3, 5}), {3}), ShapeError);
  EXPECT_THROW(layer_norm(waves({3, 5}), {5}, ones({4})), ShapeError);
  EXPECT_THROW(layer_norm(to(waves({3, 5}), kI64), {5}), DTypeError);
}

TEST(RmsNorm, follows_its_formula_and_torchs_default_epsilon) {
  const Tensor x = leaf(waves({4, 6})), w = leaf(waves({6}, kF64, 1, 0.4));
  const Tensor expected = mul(mul(x, rsqrt(add(mean(square(x), {-1}, true), epsilon_of(kF64)))), w);
  expect_close(rms_norm(x, {6}, w), expected, 1e-14);
  expect_gradients([](const TensorList& in) { return rms_norm(in[0], {6}, in[1], 1e-5); }, {x, w});
}

TEST(ResidualLayerNorm, is_an_addition_and_a_layer_norm_in_one_pass) {
  for (DType dtype : {kF64, kF32, kBF16}) {
    const Tensor x = leaf(waves({70, 48}, dtype)), r = leaf(waves({70, 48}, dtype, 1, 0.4));
    const Tensor w = leaf(waves({48}, dtype, 1, 0.6)), b = leaf(waves({48}, dtype, 1, 0.9));
    const Tensor x2 = leaf(x), r2 = leaf(r), w2 = leaf(w), b2 = leaf(b);
    const ResidualNorm fused = residual_layer_norm(x, r, {48}, w, b);
    const Tensor total = add(x2, r2), normalized = layer_norm(total, {48}, w2, b2);
    expect_close(fused.residual, total, 0);
    expect_close(fused.normalized, normalized, 0);
    const Tensor up = waves({70, 48}, dtype, 1, 0.2);
    sum(add(mul(fused.residual, 0.5), mul(fused.normalized, up))).backward();
    sum(add(mul(total, 0.5), mul(normalized, up))).backward();
    const double eps = 4 * epsilon_of(dtype);
    expect_close(x.grad(), x2.grad(), eps);
    expect_close(r.grad(), r2.grad(), eps);
    expect_close(w.grad(), w2.grad(), 20 * eps);
    expect_close(b.grad(), b2.grad(), 20 * eps);
  }
}

TEST(ResidualRmsNorm, is_an_addition_and_an_rms_norm_in_one_pass) {
  for (DType dtype : {kF64, kF32, kBF16}) {
    const Tensor x = leaf(waves({70, 48}, dtype)), r = leaf(waves({70, 48}, dtype, 1, 0.4));
    const Tensor w = leaf(waves({48}, dtype, 1, 0.6));
    const Tensor x2 = leaf(x), r2 = leaf(r), w2 = leaf(w);
    const ResidualNorm fused = residual_rms_norm(x, r, {48}, w);
    const Tensor total = add(x2, r2), normalized = rms_norm(total, {48}, w2);
    expect_close(fused.residual, total, 0);
    expect_close(fused.normalized, normalized, 0);
    const Tensor up = waves({70, 48}, dtype, 1, 0.2);
    sum(add(mul(fused.residual, 0.5), mul(fused.normalized, up))).backward();
    sum(add(mul(total, 0.5), mul(normalized, up))).backward();
    const double eps = 4 * epsilon_of(dtype);
    expect_close(x.grad(), x2.grad(), eps);
    expect_close(r.grad(), r2.grad(), eps);
    expect_close(w.grad(), w2.grad(), 20 * eps);
  }
  // Of two dtypes the wider, as addition has it.
  const Tensor low = waves({3, 8}, kBF16), stream = waves({3, 8}, kF32, 1, 0.4);
  const ResidualNorm both = residual_rms_norm(low, stream, {8}, {}, 1e-5);
  expect_close(both.residual, add(low, stream), 0);
  expect_close(both.normalized, rms_norm(add(low, stream), {8}, {}, 1e-5), 0);
  EXPECT_THROW(residual_rms_norm(low, waves({3, 4}), {8}), ShapeError);
}

TEST(ResidualLayerNorm, drops_what_dropout_drops) {
  for (DType dtype : {kF64, kF32, kBF16}) {
    const RandomStream stream{7, 3};
    const Tensor x = leaf(waves({70, 48}, dtype)), r = leaf(waves({70, 48}, dtype, 1, 0.4));
    const Tensor w = leaf(waves({48}, dtype, 1, 0.6)), b = leaf(waves({48}, dtype, 1, 0.9));
    const Tensor x2 = leaf(x), r2 = leaf(r), w2 = leaf(w), b2 = leaf(b);
    const ResidualNorm fused = residual_layer_norm(x, r, {48}, w, b, 1e-5, 0.3, stream);
    const ResidualNorm apart =
        residual_layer_norm(dropout(x2, 0.3, true, stream), r2, {48}, w2, b2, 1e-5);
    expect_close(fused.residual, apart.residual, 0);
    expect_close(fused.normalized, apart.normalized, 0);
    const Tensor up = waves({70, 48}, dtype, 1, 0.2);
    sum(add(mul(fused.residual, 0.5), mul(fused.normalized, up))).backward();
    sum(add(mul(apart.residual, 0.5), mul(apart.normalized, up))).backward();
    for (const auto& [got, expected] : {std::pair(x, x2), {r, r2}, {w, w2}, {b, b2}}) {
      expect_close(got.grad(), expected.grad(), 0);
    }
    x.set_grad({});
    sum(residual_layer_norm(x, r, {48}, w, b, 1e-5, 0.3, stream).residual).backward();
    expect_close(x.grad(), dropout(ones_like(x), 0.3, true, stream), 0);
  }
  const Tensor x = leaf(waves({3, 4})), r = leaf(waves({3, 4}, kF64, 1, 0.3));
  expect_gradients(
      [](const TensorList& in) {
        const ResidualNorm both =
            residual_layer_norm(in[0], in[1], {4}, {}, {}, 1e-5, 0.5, RandomStream{1, 2});
        return add(both.residual, both.normalized);
      },
      {x, r});
  expect_close(residual_layer_norm(x, r, {4}, {}, {}, 1e-5, 1).residual, r, 0);
  EXPECT_THROW(residual_layer_norm(x, r, {4}, {}, {}, 1e-5, 1.5), ValueError);
}

TEST(ResidualLayerNorm, needs_no_gradient_of_either_output) {
  const Tensor x = leaf(waves({3, 4})), r = leaf(waves({3, 4}, kF64, 1, 0.3));
  sum(residual_layer_norm(x, r, {4}).residual).backward();
  expect_close(x.grad(), ones({3, 4}, {kF64}), 0);
  sum(square(residual_layer_norm(x, r, {4}).normalized)).backward();
  EXPECT_TRUE(r.grad().defined());
  expect_gradients(
      [](const TensorList& in) {
        const ResidualNorm both = residual_layer_norm(in[0], in[1], {4});
        return add(both.residual, both.normalized);
      },
      {x, r});
}

// torch.nn.functional.group_norm(torch.arange(16.).reshape(1, 4, 4), 2)[0, :, 0]
TEST(GroupNorm, gives_the_numbers_of_torch) {
  const Tensor x = reshape(arange(0, 16, 1, kF64), {1, 4, 4});
  const Tensor y = group_norm(x, 2);
  expect_close(select(select(y, 0, 0), 1, 0),
               tensor({-1.527523777, 0.218217682, -1.527523777, 0.218217682}, kF64), 1e-8);
  EXPECT_THROW(group_norm(x, 3), ValueError);
}

TEST(GroupNorm, has_first_and_second_derivatives) {
  const Tensor x = leaf(waves({2, 4, 3})), w = leaf(waves({4}, kF64, 1, 0.4));
  const Tensor b = leaf(waves({4}, kF64, 1, 0.2));
  expect_gradients([](const TensorList& in) { return group_norm(in[0], 2, in[1], in[2]); },
                   {x, w, b});
}

// Formula over channels for [N, C] and [N, C, S].
TEST(BatchNorm, follows_its_formula_in_training_and_updates_the_running_statistics) {
  for (const Shape& shape : {Shape{9, 5}, Shape{3, 5, 4}, Shape{2, 5, 3, 2}}) {
    const Tensor x = waves(shape, kF64, 2, 1);
    const Tensor running_mean = full({5}, 0.25, {kF64}), running_var = full({5}, 2, {kF64});
    const Tensor y = batch_norm(x, running_mean, running_var, {}, {}, true, 0.3, 1e-3);
    Shape dims = {0}, parameters = {1, 5};
    for (int d = 2; d < shape.size(); ++d) {
      dims.push_back(d);
      parameters.push_back(1);
    }
    const Tensor m = mean(x, dims, true), v = var(x, dims, 0, true);
    expect_close(y, mul(sub(x, m), rsqrt(add(v, 1e-3))), 1e-13);
    expect_close(running_mean, add(mul(reshape(m, {5}), 0.3), 0.7 * 0.25), 1e-14);
    expect_close(running_var, add(mul(reshape(var(x, dims, 1, true), {5}), 0.3), 0.7 * 2), 1e-14);
    const Tensor evaluated = batch_norm(x, running_mean, running_var, {}, {}, false, 0.3, 1e-3);
    expect_close(evaluated,
                 mul(sub(x, reshape(running_mean, parameters)),
                     rsqrt(add(reshape(running_var, parameters), 1e-3))),
                 1e-13);
  }
}

TEST(BatchNorm, has_first_and_second_derivatives) {
  for (const Shape& shape : {Shape{4, 3}, Shape{2, 3, 3}}) {
    const Tensor x = leaf(waves(shape)), w = leaf(waves({3}, kF64, 1, 0.4));
    const Tensor b = leaf(waves({3}, kF64, 1, 0.2));
    const Tensor m = waves({3}, kF64, 0.1), v = add(waves({3}, kF64, 0.1), 1);
    expect_gradients(
        [](const TensorList& in) { return batch_norm(in[0], {}, {}, in[1], in[2], true); },
        {x, w, b});
    expect_gradients(
        [&](const TensorList& in) { return batch_norm(in[0], m, v, in[1], in[2], false); },
        {x, w, b});
  }
}

TEST(BatchNorm, refuses_one_value_a_channel_and_missing_statistics) {
  EXPECT_THROW(batch_norm(waves({1, 3}), {}, {}, {}, {}, true), ValueError);
  EXPECT_THROW(batch_norm(waves({4, 3}), {}, {}), ValueError);
}

TEST(Norms, of_meta_tensors_have_shapes) {
  const Tensor x = empty({2, 4, 6}, {kBF16, kMeta}), w = empty({6}, {kF32, kMeta});
  EXPECT_EQ(layer_norm(x, {6}, w, w).dtype(), kBF16);
  EXPECT_EQ(group_norm(x, 2).shape(), (Shape{2, 4, 6}));
  EXPECT_EQ(batch_norm(x, {}, {}, {}, {}, true).shape(), (Shape{2, 4, 6}));
}

}  // namespace
}  // namespace tessera::test_norm
