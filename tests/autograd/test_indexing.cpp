// x[{...}] as torch has it: what it reads, what assigning to it writes, its gradients.
#include <functional>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/module.h>

#include "message_of.h"

namespace tessera::test_indexing {
namespace {

using Values = std::vector<double>;
using Function = std::function<TensorList(const TensorList&)>;

Tensor counting(const Shape& shape) { return arange(numel_of(shape)).to(kF32).view(shape); }
Tensor list(std::initializer_list<double> values) { return tensor(values, kI64); }
Tensor mask(std::initializer_list<double> values) { return tensor(values, kBool); }

// ---- Reading ------------------------------------------------------------------------------------

TEST(Indexing, IntegersSlicesNoneAndEllipsisAreViews) {
  const Tensor x = counting({2, 3, 4});
  const struct {
    Tensor got;
    Shape shape;
    Values values;
  } cases[] = {
      {x[1], {3, 4}, {12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}},
      {x[{1, 2}], {4}, {20, 21, 22, 23}},
      {x[{1, -1, 0}], {}, {20}},
      {x[{0, Slice(1, 3)}], {2, 4}, {4, 5, 6, 7, 8, 9, 10, 11}},
      {x[{Ellipsis, 0}], {2, 3}, {0, 4, 8, 12, 16, 20}},
      {x[{1, Ellipsis, Slice(None, None, 2)}], {3, 2}, {12, 14, 16, 18, 20, 22}},
      {x[{0, None, 1, Ellipsis, None}], {1, 4, 1}, {4, 5, 6, 7}},
      {x[{Slice(), Slice(-1), Slice(None, 2)}], {2, 1, 2}, {8, 9, 20, 21}},
      {x[Slice(1)], {1, 3, 4}, {12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}},
      {x[None][{0, 0, 0}], {4}, {0, 1, 2, 3}},
      {x[{0, 0}][Ellipsis], {4}, {0, 1, 2, 3}},
      {x.index({1, 2, Slice(1, 3)}), {2}, {21, 22}},
      {x[{list({1}).view(Shape()), 2}], {4}, {20, 21, 22, 23}},  // a number in a tensor is a number
  };
  for (const auto& [got, shape, values] : cases) {
    EXPECT_EQ(got.shape(), shape);
    EXPECT_EQ(got.to_vector(), values);
    EXPECT_EQ(got.storage(), x.storage());
  }
}

TEST(Indexing, MasksAndIndexTensorsAreCopies) {
  const Tensor x = counting({2, 3, 4});
  const Tensor places = mask({1, 0, 1, 0, 1, 0}).view(2, 3);
  const struct {
    Tensor got;
    Shape shape;
    Values values;
  } cases[] = {
      // shapes and values are torch's
      {x[x > 20], {3}, {21, 22, 23}},
      {x[{places, Slice(0, 2)}], {3, 2}, {0, 1, 8, 9, 16, 17}},
      {x[{places, 1}], {3}, {1, 9, 17}},
      {x[{places, list({0, 1, 2})}], {3}, {0, 9, 18}},
      {x[{Ellipsis, mask({1, 0, 0, 1})}], {2, 3, 2}, {0, 3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23}},
      {x[list({1, 0})][{0, 0}], {4}, {12, 13, 14, 15}},
      {x[{0, Slice(), list({0, 3})}], {3, 2}, {0, 3, 4, 7, 8, 11}},
      {x[{list({0, 1}), Slice(), list({0, 3})}], {2, 3}, {0, 4, 8, 15, 19, 23}},
      {x[{list({0, 1}), None, 2}], {2, 1, 4}, {8, 9, 10, 11, 20, 21, 22, 23}},
      {x[{list({1}), Tensor(), list({2})}], {1, 3}, {14, 18, 22}},
      {x[{0, 0, list({3, 1}).to(kI32)}], {2}, {3, 1}},
      {x[{0, 0, tensor({1}, kBool).view(Shape())}], {1, 4}, {0, 1, 2, 3}},
  };
  for (const auto& [got, shape, values] : cases) {
    EXPECT_EQ(got.shape(), shape);
    EXPECT_EQ(got.to_vector(), values);
    EXPECT_NE(got.storage(), x.storage());
  }
}

TEST(Indexing, MistakesAreErrors) {
  const Tensor x = counting({2, 3});
  EXPECT_THROW((x[{0, 0, 0}]), IndexError);
  EXPECT_THROW((x[{0, 3}]), IndexError);
  EXPECT_THROW((x[{Ellipsis, Ellipsis}]), IndexError);
  EXPECT_THROW((x[list({2})]), IndexError);
  EXPECT_THROW((x[{0, mask({1, 0})}]), ShapeError);
  EXPECT_THROW((x[tensor({0.0})]), DTypeError);
  EXPECT_THROW((x[{Slice(0, 2, 0)}]), ValueError);
  EXPECT_THROW((x[0] = zeros({2})), ShapeError);
  EXPECT_THROW((x[list({0})] = zeros({1, 3}, kF64)), DTypeError);  // as in torch
  EXPECT_THROW((x[0] = Tensor()), ValueError);
  EXPECT_TRUE(mentions(message_of<ValueError>([] { Tensor()[{0, 1}]; }), "undefined"));
}

// ---- Writing ------------------------------------------------------------------------------------

// What writing left, and that it bumped the version.
Values after(const Shape& shape, const std::function<void(const Tensor& x)>& write) {
  const Tensor x = counting(shape);
  const uint32_t version = x.version();
  write(x);
  EXPECT_GT(x.version(), version);
  return x.to_vector();
}

TEST(Indexing, AssignmentWritesIntoViews) {
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[0] = tensor({8, 9}); }), (Values{8, 9, 2, 3}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[0] = x[1]; }), (Values{2, 3, 2, 3}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[1] = 7; }), (Values{0, 1, 7, 7}));
  EXPECT_EQ(after({2, 2},
                  [](const Tensor& x) {
                    x[{Ellipsis, 0}] = 7.5;
                  }),
            (Values{7.5, 1, 7.5, 3}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[Ellipsis] = 0; }), (Values{0, 0, 0, 0}));
  EXPECT_EQ(after({2, 2},
                  [](const Tensor& x) {
                    x[{0, 1}] = scalar_tensor(5, kF64);
                  }),
            (Values{0, 5, 2, 3}));
  EXPECT_EQ(after({4},
                  [](const Tensor& x) {
                    x[Slice(1, 3)] = tensor({8, 9}).view(1, 1, 2);
                  }),
            (Values{0, 8, 9, 3}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[0] += 10; }), (Values{10, 11, 2, 3}));
  EXPECT_EQ(after({2, 2},
                  [](const Tensor& x) {
                    x[{Slice(), 1}] *= tensor({2, 3});
                  }),
            (Values{0, 2, 2, 9}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[1] -= x[0]; }), (Values{0, 1, 2, 2}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[1] /= 2; }), (Values{0, 1, 1, 1.5}));
  const Tensor n = list({7, 6});
  n[0] &= 3, n[1] |= 1, n[Slice(1)] ^= list({2});
  EXPECT_EQ(n.to_vector(), (Values{3, 5}));
  EXPECT_THROW(n[0] += 0.5, DTypeError);  // in place, as in torch
}

TEST(Indexing, AssignmentWritesWhereMasksAndIndexTensorsPoint) {
  EXPECT_EQ(after({4}, [](const Tensor& x) { x[x > 1] = 0; }), (Values{0, 1, 0, 0}));
  EXPECT_EQ(after({4}, [](const Tensor& x) { x[{x > 1}] = tensor({8, 9}); }), (Values{0, 1, 8, 9}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[mask({0, 1})] = 5; }), (Values{0, 1, 5, 5}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[{0, list({1})}] = 5; }), (Values{0, 5, 2, 3}));
  EXPECT_EQ(after({2, 2}, [](const Tensor& x) { x[list({1, 0})] = x; }), (Values{2, 3, 0, 1}));
  EXPECT_EQ(after({2, 3},
                  [](const Tensor& x) {
                    x[{Slice(0, 1), list({0, 2})}] = tensor({8, 9});
                  }),
            (Values{8, 1, 9, 3, 4, 5}));
  EXPECT_EQ(after({4}, [](const Tensor& x) { x[x > 1] += 10; }), (Values{0, 1, 12, 13}));
  EXPECT_EQ(after({4},
                  [](const Tensor& x) {
                    x[list({3, 1})] *= tensor({2, 5});
                  }),
            (Values{0, 5, 2, 6}));
  EXPECT_EQ(after({3}, [](const Tensor& x) { x[list({0, 0})] += 1; }), (Values{1, 1, 2}));  // once
  EXPECT_EQ(after({3},
                  [](const Tensor& x) {
                    x.index_put_({list({0, 0})}, 1, true);
                  }),
            (Values{2, 1, 2}));
  EXPECT_EQ(after({2, 2},
                  [](const Tensor& x) {
                    x.index_put_({1, Slice()}, tensor({8, 9}));
                  }),
            (Values{0, 1, 8, 9}));
  EXPECT_EQ(after({2, 2},
                  [](const Tensor& x) {
                    x.index_put_({1, Slice()}, 1, true);
                  }),
            (Values{0, 1, 3, 4}));
}

TEST(Indexing, AVariableIsATensorAndAssignmentNamesAnother) {
  const Tensor x = counting({2, 2});
  auto row = x[0];
  row = tensor({8, 9});
  EXPECT_EQ(x.to_vector(), (Values{0, 1, 2, 3}));
  EXPECT_EQ(row.to_vector(), (Values{8, 9}));
  row = x[1];
  row += 1;  // a view, in place
  EXPECT_EQ(x.to_vector(), (Values{0, 1, 3, 4}));
  auto picked = x[x > 2];
  picked += 1;  // a copy
  picked = picked * 2;
  EXPECT_EQ(x.to_vector(), (Values{0, 1, 3, 4}));
  EXPECT_EQ(picked.to_vector(), (Values{8, 10}));
  Tensor y = x[0];
  y = x[1];
  EXPECT_EQ(y.to_vector(), (Values{3, 4}));
  const TensorList rows = {x[0], x[1]};
  EXPECT_EQ(stack(rows).to_vector(), x.to_vector());
  static_assert(!std::is_assignable_v<const IndexedTensor&, const Tensor&>);
  static_assert(std::is_nothrow_move_constructible_v<IndexedTensor>);
}

// ---- Gradients ----------------------------------------------------------------------------------

void expect_gradients(const Function& f, const TensorList& inputs) {
  const Function squared = [&](const TensorList& in) {
    TensorList result;
    for (const Tensor& y : f(in)) result.push_back(y * y);
    return result;
  };
  const GradcheckResult first = gradcheck(squared, inputs), second = gradgradcheck(squared, inputs);
  EXPECT_TRUE(first.ok) << first.message;
  EXPECT_TRUE(second.ok) << second.message;
}

TEST(Indexing, ReadingAndWritingAreDifferentiable) {
  const auto leaf = [](const Shape& shape, uint64_t stream) {
    return randn(shape, kF64, RandomStream{5, stream}).set_requires_grad();
  };
  const Tensor x = leaf({2, 3, 4}, 1), y = leaf({3, 2}, 2), z = leaf({2}, 3);
  const auto written =
      [&](const std::function<void(const Tensor& x, const TensorList& in)>& write) {
        expect_gradients(
            [&](const TensorList& in) -> TensorList {
              const Tensor copy = in[0] * in[0];
              write(copy, in);
              return {copy};
            },
            {x, y, z});
      };
  expect_gradients(
      [](const TensorList& in) -> TensorList {
        return {in[0][{1, Slice(0, 2), None, list({1, 1, 3})}]};
      },
      {x});
  written([](const Tensor& x, const TensorList& in) {
    x[{1, Slice(), Slice(None, None, 2)}] = in[1];
    x[{0, 0, 0}] += in[2].sum();
  });
  written([](const Tensor& x, const TensorList& in) {
    x[{0, Slice(), list({3, 1})}] = in[1];
    x[{1, 1, list({0, 2})}] *= in[2];
  });
  written([](const Tensor& x, const TensorList& in) {
    x[{1, Ellipsis, mask({0, 1, 0, 1})}] = in[1];
    x[{0, mask({0, 1, 1})}] = 2;
    x[{0, 0}] = 3;
  });
  EXPECT_THROW((x[0] = 1), AutogradError);  // a leaf
}

TEST(Indexing, BackwardSeesThatASavedTensorWasWritten) {
  const Tensor x = ones({3}).requires_grad_(), y = x * 2, z = (y * y).sum();
  y[0] = 5;
  EXPECT_THROW(z.backward(), AutogradError);
}

struct Twice : nn::Module<Twice> {
  Tensor forward(const Tensor& x) { return x * 2; }
};

TEST(Indexing, ModulesAndTheirHooksSeeATensor) {
  Twice twice;
  int seen = 0;
  twice.register_forward_pre_hook([&](nn::ModuleBase&, nn::TensorRefs inputs) {
    seen += static_cast<int>(inputs.size());
    *inputs[0] = *inputs[0] + 1;
  });
  const Tensor x = counting({2, 2});
  EXPECT_EQ(twice(x[1]).to_vector(), (Values{6, 8}));
  EXPECT_EQ(twice(x[{0, list({1})}]).to_vector(), (Values{4}));
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(x.to_vector(), (Values{0, 1, 2, 3}));
}

}  // namespace
}  // namespace tessera::test_indexing
