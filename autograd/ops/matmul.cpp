#include <algorithm>
#include <string>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/linear_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/linear_fused.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

void check_one_dtype(const Op& op, const Tensor& a, const Tensor& b) {
  TS_CHECK_DTYPE(a.dtype() == b.dtype(), op, "expects operands of one dtype; got ", a, " and ", b,
                 "; convert one with to(dtype)");
  TS_CHECK_DTYPE(a.dtype() != kBool && !is_fp8(a.dtype()), op, "has no products of ", a.dtype(),
                 "; convert with to(dtype)");
}

double product_flops(const Tensor& a, const Tensor& result) {
  return 2.0 * static_cast<double>(result.numel()) * static_cast<double>(a.size(-1));
}

Tensor swapped(const Tensor& x) { return transpose(x, -2, -1); }
// All leading dimensions in one; their product is spelled out, as a row may have no elements.
Tensor as_rows(const Tensor& x) {
  if (x.dim() == 2) return x;
  return reshape(x, {numel_of(x.shape().slice(0, x.dim() - 1)), x.size(-1)});
}

}  // namespace

// ---- matmul -------------------------------------------------------------------------------------

const Op kMatmul{.name = "matmul",
                 .marks = MarkRule::kSpecial,
                 .autocast = Autocast::kLow,
                 .reads = {inputs(1), inputs(0)}};

namespace {

// a: [..., M, K], b: [..., K, N].
Tensor matmul_of_matrices(const Tensor& a, const Tensor& b) {
  return differentiable(
      kMatmul, {a, b},
      [](Inputs in) {
        check_one_dtype(kMatmul, in[0], in[1]);
        const Tensor result = kernels::matmul(in[0], in[1]);
        count_flops(product_flops(in[0], result));
        return result;
      },
      [](Grads dy, const Saved& s) -> TensorList {
        Tensor grad_a, grad_b;
        const Tensor gradient = dy[0];
        if (s.needs(0)) {
          grad_a = weight_gradients({0}, [gradient, b = s.input(1)]() -> TensorList {
            return {matmul(gradient, swapped(b))};
          })[0];
        }
        if (s.needs(1)) {
          // One long product, not a sum over the batch, where all of it met one matrix.
          const bool one_matrix = s.input_shape(1).size() == 2;
          grad_b = weight_gradients({1}, [gradient, one_matrix, a = s.input(0)]() -> TensorList {
            return {one_matrix ? matmul(swapped(as_rows(a)), as_rows(gradient))
                               : matmul(swapped(a), gradient)};
          })[0];
        }
        return {grad_a, grad_b};
      });
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  check_defined(kMatmul, "a", a);
  check_defined(kMatmul, "b", b);
  TS_CHECK_SHAPE(a.dim() >= 1 && b.dim() >= 1, kMatmul,
                 "expects at least one dimension on both sides; got ", a, " and ", b,
                 "; multiply numbers with mul");
  if (a.dim() == 1 && b.dim() == 1) return dot(a, b);
  const int64_t inner_b = b.dim() == 1 ? b.size(0) : b.size(-2);
  TS_CHECK_SHAPE(a.size(-1) == inner_b, kMatmul, "inner dimensions differ: a is ", a, " and b is ",
                 b, "; a's last (", a.size(-1), ") must equal b's ",
                 b.dim() == 1 ? "only (" : "second-to-last (", inner_b, ")");
  if (a.dim() == 1) return squeeze(matmul_of_matrices(unsqueeze(a, 0), b), -2);
  if (b.dim() == 1) return squeeze(matmul_of_matrices(a, unsqueeze(b, 1)), -1);
  broadcast_shapes(a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2), "matmul");
  return matmul_of_matrices(a, b);
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  TS_CHECK_SHAPE(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0), "bmm",
                 "expects [B, M, K] and [B, K, N]; got ", a, " and ", b,
                 "; matmul broadcasts batches");
  return matmul(a, b);
}

// ---- dot, outer ---------------------------------------------------------------------------------

const Op kDot{.name = "dot",
              .marks = MarkRule::kSpecial,
              .autocast = Autocast::kWidest,
              .reads = {inputs(1), inputs(0)}};

Tensor dot(const Tensor& a, const Tensor& b) {
  check_defined(kDot, "a", a);
  check_defined(kDot, "b", b);
  TS_CHECK_SHAPE(a.dim() == 1 && b.dim() == 1 && a.size(0) == b.size(0), kDot,
                 "expects two vectors of one length; got ", a, " and ", b);
  return differentiable(
      kDot, {a, b},
      [](Inputs in) {
        check_one_dtype(kDot, in[0], in[1]);
        const Tensor product = kernels::matmul(raw::unsqueeze(in[0], 0), raw::unsqueeze(in[1], 1));
        return raw::view(product, {});
      },
      [](Grads dy, const Saved& s) -> TensorList {
        return {s.needs(0) ? mul(dy[0], s.input(1)) : Tensor(),
                s.needs(1) ? mul(dy[0], s.input(0)) : Tensor()};
      });
}

Tensor outer(const Tensor& a, const Tensor& b) {
  TS_CHECK_SHAPE(a.dim() == 1 && b.dim() == 1, "outer", "expects two vectors; got ", a, " and ", b);
  return mul(unsqueeze(a, 1), unsqueeze(b, 0));
}

// ---- linear -------------------------------------------------------------------------------------

const Op kLinear{.name = "linear",
                 .marks = MarkRule::kSpecial,
                 .autocast = Autocast::kLow,
                 .reads = {inputs(1), inputs(0), inputs()},
                 .bias = 2};

namespace {

// dy weight, and what reached x's gradient before: of a GPU's product it is a part.
Tensor linear_input_gradient(const Tensor& dy, const Tensor& rows, const Saved& s) {
  if (!grad_enabled() && dy.device().is_cuda()) {
    if (const Tensor pending = s.take_pending(0); pending.defined()) {
      const Tensor base = as_rows(pending.dim() == 1 ? unsqueeze(pending, 0) : pending);
      const Tensor sum = kernels::matmul_onto(kernels::contiguous(base), rows, s.input(1), {});
      count_flops(product_flops(rows, sum));
      return reshape(sum, s.input_shape(0));
    }
  }
  return matmul(dy, s.input(1));
}

TensorList linear_gradients(const Tensor& dy, const Saved& s) {
  Tensor grad_x, grad_weight, grad_bias;
  const Tensor rows = as_rows(dy.dim() == 1 ? unsqueeze(dy, 0) : dy);
  if (s.needs(0)) grad_x = linear_input_gradient(dy, rows, s);
  if (s.needs(2)) grad_bias = s.column_sums();
  const bool wants_bias = s.needs(2) && !grad_bias.defined();
  if (s.needs(1)) {
    const Tensor x = s.input(0);
    const TensorList late = weight_gradients({1, 2}, [rows, x, wants_bias]() -> TensorList {
      const Tensor x_rows = as_rows(x.dim() == 1 ? unsqueeze(x, 0) : x);
      if (wants_bias && !grad_enabled()) {
        const kernels::LinearGradients gradients = kernels::linear_gradients(rows, x_rows, true);
        count_flops(product_flops(swapped(rows), gradients.weight));
        return {gradients.weight, gradients.bias};
      }
      const Tensor of_weight = matmul(swapped(rows), x_rows);
      return {of_weight, wants_bias ? sum(rows, {0}) : Tensor()};
    });
    grad_weight = late[0];
    if (wants_bias) grad_bias = late[1];
  } else if (wants_bias) {
    grad_bias = sum(rows, {0});
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

void check_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_defined(kLinear, "x", x);
  check_defined(kLinear, "weight", weight);
  TS_CHECK_SHAPE(weight.dim() == 2, kLinear, "expects a weight of [out, in]; got ", weight);
  TS_CHECK_SHAPE(x.dim() >= 1 && x.size(-1) == weight.size(1), kLinear,
                 "inner dimensions differ: x is ", x, " and weight is ", weight, "; x's last (",
                 x.dim() > 0 ? x.size(-1) : 1, ") must equal weight's (", weight.size(1), ")");
  TS_CHECK_SHAPE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), kLinear,
                 "expects a bias of [", weight.size(0), "]; got ", bias);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_linear(x, weight, bias);
  return differentiable(
      kLinear, {x, weight, bias},
      [](Inputs in) {
        check_one_dtype(kLinear, in[0], in[1]);
        if (in[2].defined()) check_one_dtype(kLinear, in[0], in[2]);
        const Tensor result = kernels::linear(in[0], in[1], in[2]);
        count_flops(product_flops(in[0], result));
        return result;
      },
      [](Grads dy, const Saved& s) { return linear_gradients(dy[0], s); });
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual) {
  if (!residual.defined()) return linear(x, weight, bias);
  check_linear(x, weight, bias);
  Shape shape = x.shape();
  shape[x.dim() - 1] = weight.size(0);
  TS_CHECK_SHAPE(residual.shape() == shape, kLinear, "expects a residual of ", shape, "; got ",
                 residual);
  return differentiable(
      kLinear, {x, weight, bias, residual},
      [](Inputs in) {
        check_one_dtype(kLinear, in[0], in[1]);
        check_one_dtype(kLinear, in[0], in[3]);
        if (in[2].defined()) check_one_dtype(kLinear, in[0], in[2]);
        const Tensor rows = as_rows(in[0].dim() == 1 ? unsqueeze(in[0], 0) : in[0]);
        const Tensor base = as_rows(in[3].dim() == 1 ? unsqueeze(in[3], 0) : in[3]);
        const Tensor sum = kernels::matmul_onto(kernels::contiguous(base), rows,
                                                raw::transpose(in[1], 0, 1), in[2]);
        count_flops(product_flops(rows, sum));
        return reshape(sum, in[3].shape());
      },
      [](Grads dy, const Saved& s) {
        TensorList grads = linear_gradients(dy[0], s);
        grads.push_back(s.needs(3) ? dy[0] : Tensor());
        return grads;
      });
}

// ---- addmm --------------------------------------------------------------------------------------

const Op kAddmm{.name = "addmm",
                .marks = MarkRule::kSpecial,
                .autocast = Autocast::kLow,
                .reads = {inputs(), inputs(2), inputs(1)}};

Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  check_defined(kAddmm, "x", x);
  check_defined(kAddmm, "a", a);
  check_defined(kAddmm, "b", b);
  TS_CHECK_SHAPE(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), kAddmm,
                 "expects [M, K] and [K, N]; got ", a, " and ", b);
  TS_CHECK_SHAPE(broadcastable_to(x.shape(), {a.size(0), b.size(1)}), kAddmm, "cannot broadcast ",
                 x, " to [", a.size(0), ", ", b.size(1), "]");
  const double beta_value = beta.to_double(), alpha_value = alpha.to_double();
  return differentiable(
      kAddmm, {x, a, b},
      [=](Inputs in) {
        check_one_dtype(kAddmm, in[1], in[2]);
        check_one_dtype(kAddmm, in[0], in[1]);
        const Tensor result = kernels::addmm(in[0], in[1], in[2], beta_value, alpha_value);
        count_flops(product_flops(in[1], result));
        return result;
      },
      [beta, alpha](Grads dy, const Saved& s) -> TensorList {
        TensorList grads(3);
        const Tensor gradient = dy[0];
        if (s.needs(0)) grads[0] = mul(gradient, beta);
        if (s.needs(1)) {
          grads[1] = weight_gradients({1}, [gradient, alpha, b = s.input(2)]() -> TensorList {
            return {mul(matmul(gradient, swapped(b)), alpha)};
          })[0];
        }
        if (s.needs(2)) {
          grads[2] = weight_gradients({2}, [gradient, alpha, a = s.input(1)]() -> TensorList {
            return {mul(matmul(swapped(a), gradient), alpha)};
          })[0];
        }
        return grads;
      });
}

// ---- einsum: views, one product a pair of operands, sums ----------------------------------------

namespace {

constexpr std::string_view kEinsum = "einsum";

// Labels of a tensor's dimensions: letters, and for the dimensions of an ellipsis the bytes from
// kEllipsis on, the last dimension being kEllipsis.
using Labels = std::string;
constexpr unsigned char kEllipsis = 200;

Labels parse_term(std::string_view term, int dims, std::string_view equation) {
  Labels labels;
  for (size_t i = 0; i < term.size(); ++i) {
    const char letter = term[i];
    if (letter == ' ') continue;
    if (letter == '.') {
      TS_CHECK(term.substr(i, 3) == "..." && term.find('.', i + 3) == std::string_view::npos,
               kEinsum, "expects at most one ellipsis of three dots a term; got '", equation, "'");
      i += 2;
      int letters = 0;
      for (char other : term) letters += other != '.' && other != ' ';
      const int spanned = dims - letters;
      TS_CHECK_SHAPE(spanned >= 0, kEinsum, "term '", term, "' names more dimensions than the ",
                     dims, " of its operand");
      for (int d = spanned - 1; d >= 0; --d) labels.push_back(static_cast<char>(kEllipsis + d));
      continue;
    }
    TS_CHECK((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z'), kEinsum,
             "expects letters as labels; got '", equation, "'");
    labels.push_back(letter);
  }
  return labels;
}

bool contains(const Labels& labels, char label) { return labels.find(label) != Labels::npos; }

struct Term {
  Tensor tensor;
  Labels labels;
};

// Keeps one dimension of each label, the diagonal where it came twice.
Term without_repeats(Term term) {
  for (size_t i = 0; i < term.labels.size(); ++i) {
    const size_t again = term.labels.find(term.labels[i], i + 1);
    if (again == Labels::npos) continue;
    const int64_t size = term.tensor.size(static_cast<int64_t>(i));
    TS_CHECK_SHAPE(size == term.tensor.size(static_cast<int64_t>(again)), kEinsum, "label '",
                   term.labels[i], "' names dimensions of sizes ", size, " and ",
                   term.tensor.size(static_cast<int64_t>(again)));
    // The mask is exact: products with 0 and 1, and one addend other than zero.
    Shape mask_shape = Shape::filled(term.tensor.dim(), 1);
    mask_shape[static_cast<int>(i)] = size;
    mask_shape[static_cast<int>(again)] = size;
    const Tensor mask =
        reshape(eye(size, {}, {.dtype = kBool, .device = term.tensor.device()}), mask_shape);
    term.tensor = sum(where(mask, term.tensor, Scalar(0)), {static_cast<int64_t>(again)}, false,
                      term.tensor.dtype());
    term.labels.erase(again, 1);
    return without_repeats(std::move(term));
  }
  return term;
}

Term sum_over(Term term, const Labels& keep) {
  Shape dims;
  Labels labels;
  for (size_t i = 0; i < term.labels.size(); ++i) {
    if (contains(keep, term.labels[i])) {
      labels.push_back(term.labels[i]);
    } else {
      dims.push_back(static_cast<int64_t>(i));
    }
  }
  if (!dims.empty()) term.tensor = sum(term.tensor, dims, false, term.tensor.dtype());
  term.labels = labels;
  return term;
}

// The tensor with its dimensions in the order of `labels`, sizes 1 where it lacks one.
Tensor aligned(const Term& term, const Labels& labels) {
  Shape order;
  for (char label : labels) {
    const size_t at = term.labels.find(label);
    if (at != Labels::npos) order.push_back(static_cast<int64_t>(at));
  }
  Tensor tensor = permute(term.tensor, order);
  for (size_t i = 0; i < labels.size(); ++i) {
    if (!contains(term.labels, labels[i])) tensor = unsqueeze(tensor, static_cast<int64_t>(i));
  }
  return tensor;
}

// One product: labels in both and kept are the batch, in both and not kept the inner dimension.
Term contract(Term a, Term b, const Labels& keep) {
  Labels batch, inner, rows, columns;
  for (char label : a.labels) {
    if (!contains(b.labels, label)) {
      rows.push_back(label);
    } else if (contains(keep, label)) {
      batch.push_back(label);
    } else {
      inner.push_back(label);
    }
  }
  for (char label : b.labels) {
    if (!contains(a.labels, label)) columns.push_back(label);
  }
  const auto size_of_label = [&](char label) {
    const size_t in_a = a.labels.find(label), in_b = b.labels.find(label);
    const int64_t size_a = in_a == Labels::npos ? 1 : a.tensor.size(static_cast<int64_t>(in_a));
    const int64_t size_b = in_b == Labels::npos ? 1 : b.tensor.size(static_cast<int64_t>(in_b));
    TS_CHECK_SHAPE(
        size_a == size_b || size_a == 1 || size_b == 1, kEinsum, "label '",
        static_cast<unsigned char>(label) >= kEllipsis ? std::string("...") : std::string(1, label),
        "' names dimensions of sizes ", size_a, " and ", size_b);
    return size_a == 1 ? size_b : size_a;
  };
  const auto sizes = [&](const Labels& labels) {
    Shape shape;
    for (char label : labels) shape.push_back(size_of_label(label));
    return shape;
  };
  const auto expanded = [&](const Term& term, const Labels& order) {
    return expand(aligned(term, order), sizes(order));
  };
  const Shape batch_sizes = sizes(batch);
  const int64_t m = numel_of(sizes(rows)), n = numel_of(sizes(columns)), k = numel_of(sizes(inner));
  const auto matrix = [&](const Tensor& x, int64_t first, int64_t second) {
    return reshape(x, {numel_of(batch_sizes), first, second});
  };
  const Tensor product = matmul(matrix(expanded(a, batch + rows + inner), m, k),
                                matrix(expanded(b, batch + inner + columns), k, n));
  const Labels labels = batch + rows + columns;
  return {reshape(product, sizes(labels)), labels};
}

}  // namespace

Tensor einsum(std::string_view equation, const TensorList& operands) {
  const size_t arrow = equation.find("->");
  std::vector<std::string_view> terms;
  std::string_view left = equation.substr(0, arrow);
  while (true) {
    const size_t comma = left.find(',');
    terms.push_back(left.substr(0, comma));
    if (comma == std::string_view::npos) break;
    left.remove_prefix(comma + 1);
  }
  TS_CHECK(!operands.empty() && terms.size() == operands.size(), kEinsum, "'", equation,
           "' describes ", terms.size(), " operands; got ", operands.size());
  std::vector<Term> list;
  Labels all;
  int ellipsis_dims = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    TS_CHECK(operands[i].defined(), kEinsum, "operand ", i, " is undefined; give it a value first");
    const Labels labels = parse_term(terms[i], operands[i].dim(), equation);
    TS_CHECK_SHAPE(static_cast<int>(labels.size()) == operands[i].dim(), kEinsum, "term '",
                   terms[i], "' names ", labels.size(), " dimensions; its operand is ",
                   operands[i]);
    for (char label : labels) {
      ellipsis_dims = std::max(ellipsis_dims, static_cast<unsigned char>(label) - kEllipsis + 1);
    }
    all += labels;
    list.push_back(without_repeats({operands[i], labels}));
  }
  Labels result;
  if (arrow == std::string_view::npos) {
    // Implicit form: the ellipsis, then the labels that came once, sorted.
    for (int d = ellipsis_dims - 1; d >= 0; --d) {
      result.push_back(static_cast<char>(kEllipsis + d));
    }
    Labels once;
    for (char label : all) {
      if (static_cast<unsigned char>(label) < kEllipsis &&
          std::count(all.begin(), all.end(), label) == 1) {
        once.push_back(label);
      }
    }
    std::sort(once.begin(), once.end());
    result += once;
  } else {
    const std::string_view right = equation.substr(arrow + 2);
    int letters = 0;
    for (char letter : right) letters += letter != '.' && letter != ' ';
    result = parse_term(
        right, letters + (right.find('.') == std::string_view::npos ? 0 : ellipsis_dims), equation);
  }
  for (size_t i = 0; i < result.size(); ++i) {
    TS_CHECK(contains(all, result[i]), kEinsum, "the result of '", equation,
             "' has a label that no operand has");
    TS_CHECK(result.find(result[i], i + 1) == Labels::npos, kEinsum, "the result of '", equation,
             "' names a label twice");
  }
  Term total = list[0];
  for (size_t i = 1; i < list.size(); ++i) {
    Labels later = result;
    for (size_t j = i + 1; j < list.size(); ++j) later += list[j].labels;
    total = sum_over(std::move(total), later + list[i].labels);
    const Term next = sum_over(list[i], later + total.labels);  // before `total` is moved from
    total = contract(std::move(total), next, later);
  }
  return aligned(sum_over(std::move(total), result), result);
}

// ---- tensordot ----------------------------------------------------------------------------------

namespace {

constexpr std::string_view kTensordot = "tensordot";

// The dimensions of x that `dims` does not name.
Shape other_dims(const Tensor& x, const Shape& dims) {
  Shape others;
  for (int d = 0; d < x.dim(); ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) others.push_back(d);
  }
  return others;
}

}  // namespace

Tensor tensordot(const Tensor& a, const Tensor& b, const Shape& dims_a, const Shape& dims_b) {
  TS_CHECK_SHAPE(dims_a.size() == dims_b.size(), kTensordot,
                 "both lists must name as many dimensions; got ", dims_a, " and ", dims_b);
  TS_CHECK_DTYPE(a.dtype() == b.dtype(), kTensordot, "expects operands of one dtype; got ", a,
                 " and ", b, "; convert one with to(dtype)");
  Tensor left = a, right = b;
  Shape along_a, along_b;
  int64_t terms = 1;
  for (int i = 0; i < dims_a.size(); ++i) {
    const int da = wrap_dim(dims_a[i], a.dim(), kTensordot);
    const int db = wrap_dim(dims_b[i], b.dim(), kTensordot);
    TS_CHECK_SHAPE(std::find(along_a.begin(), along_a.end(), da) == along_a.end() &&
                       std::find(along_b.begin(), along_b.end(), db) == along_b.end(),
                   kTensordot, "a dimension is named twice; got ", dims_a, " and ", dims_b);
    // One of size 1 is broadcast: the other's elements are added up first. A part of size 1 is not.
    TS_CHECK_SHAPE(a.shape()[da] == b.shape()[db] || (a.impl()->marks | b.impl()->marks) == 0,
                   kTensordot, "dimension ", da, " of ", a, " and dimension ", db, " of ", b,
                   " must have the same size");
    if (a.shape()[da] != 1 && b.shape()[db] == 1) left = sum(left, {da}, true, a.dtype());
    if (b.shape()[db] != 1 && a.shape()[da] == 1) right = sum(right, {db}, true, b.dtype());
    TS_CHECK_SHAPE(left.shape()[da] == right.shape()[db], kTensordot, "dimension ", da, " of ", a,
                   " and dimension ", db, " of ", b, " must have the same size");
    along_a.push_back(da);
    along_b.push_back(db);
    terms *= left.shape()[da];
  }
  Shape order_a = other_dims(a, along_a), order_b = along_b, shape;
  const Shape others_b = other_dims(b, along_b);
  int64_t rows = 1, columns = 1;
  for (int64_t d : order_a) shape.push_back(a.shape()[static_cast<int>(d)]), rows *= shape.back();
  for (int64_t d : others_b) {
    shape.push_back(b.shape()[static_cast<int>(d)]);
    columns *= shape.back();
    order_b.push_back(d);
  }
  for (int64_t d : along_a) order_a.push_back(d);
  return reshape(matmul(reshape(permute(left, order_a), {rows, terms}),
                        reshape(permute(right, order_b), {terms, columns})),
                 shape);
}

Tensor tensordot(const Tensor& a, const Tensor& b, int64_t dims) {
  TS_CHECK_SHAPE(dims >= 0 && dims <= std::min(a.dim(), b.dim()), kTensordot, "cannot sum over ",
                 dims, " dimensions of ", a, " and ", b);
  Shape last, first;
  for (int64_t i = 0; i < dims; ++i) {
    last.push_back(a.dim() - dims + i);
    first.push_back(i);
  }
  return tensordot(a, b, last, first);
}

}  // namespace tessera
