// The table of ops: one row for each public op, shared by test_ops (seven checks a row), the golden
// tests, op_runner and bench_ops. A new op begins with its row here.
//
//     {.name = "cumsum",
//      .parameters = "input",
//      .call = [](const Args& in, Attrs& a) -> Result { return cumsum(in[0], a.integer("dim")); },
//      .samples = {{{normal({3, 5})}, R"({"dim": 1})", 5}},
//      .sums = true},
//
// `parameters` are the tensors of torch's signature in its order, `call` reads everything else by
// torch's keywords. What a call does not read is refused, so that a misspelt keyword is an error.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::tests {

// ---- Attributes -------------------------------------------------------------------------------

struct AttrValue {
  enum class Kind { kNull, kBool, kInt, kDouble, kString, kList };
  Kind kind = Kind::kNull;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<AttrValue> list;
};

// Keyword arguments. A key may name alternatives ("size|shape"); null counts as absent. Readers
// without a default throw ValueError where the keyword is missing; all throw where its type is
// wrong.
class Attrs {
 public:
  Attrs() = default;
  // A JSON object; Python's NaN, Infinity and -Infinity are understood. Throws FormatError.
  static Attrs parse(std::string_view json);
  void set(const std::string& key, AttrValue value) { values_[key] = std::move(value); }

  bool has(std::string_view key);
  bool is_list(std::string_view key);
  bool is_text(std::string_view key);
  bool flag(std::string_view key, bool fallback);
  int64_t integer(std::string_view key, std::optional<int64_t> fallback = {});
  std::optional<int64_t> maybe_integer(std::string_view key);
  double number(std::string_view key, std::optional<double> fallback = {});
  std::optional<double> maybe_number(std::string_view key);
  Scalar scalar(std::string_view key);
  Scalar scalar(std::string_view key, const Scalar& fallback);
  std::optional<Scalar> maybe_scalar(std::string_view key);
  std::string text(std::string_view key, std::optional<std::string_view> fallback = {});
  Shape integers(std::string_view key);  // a list, or one number
  Shape integers(std::string_view key, const Shape& fallback);
  std::vector<std::optional<int64_t>> maybe_integers(std::string_view key);  // a list with nulls
  std::vector<Shape> integer_lists(std::string_view key);                    // a list of lists
  std::vector<double> numbers(std::string_view key);  // a list, or one number
  std::optional<DType> dtype();                       // of "dtype"
  Device device();                                    // of "device"; the CPU where it is absent
  // A keyword of torch that tessera serves with one value only.
  void only(std::string_view key, bool value);

  void replace_dtype(DType dtype);  // a floating "dtype" becomes this one
  void set_op(std::string_view op) { op_ = op; }
  void refuse_unread() const;  // ValueError naming what no reader asked for

 private:
  const AttrValue* find(std::string_view key);
  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const;

  std::string op_;
  std::map<std::string, AttrValue, std::less<>> values_;
  std::set<std::string, std::less<>> known_;
};

// Python writes NaN, Infinity and -Infinity, which are no JSON: they become strings.
std::string quote_special_numbers(std::string_view json);

// ---- Inputs and results -----------------------------------------------------------------------

// Tensors by their position among the row's parameters.
class Args {
 public:
  // Binds inputs (undefined: absent) to parameters "input, indices*, values"; the starred one takes
  // as many as there are. A parameter that `attrs` gives as a number is passed over. ValueError.
  Args(std::string_view op, std::string_view parameters, const TensorList& inputs, Attrs& attrs);

  const Tensor& operator[](size_t i) const;  // ValueError where it is absent
  bool has(size_t i) const { return at(i).defined(); }
  const Tensor& optional(size_t i) const { return at(i); }  // undefined where it is absent
  const TensorList& list() const { return list_; }

 private:
  const Tensor& at(size_t i) const;

  std::string op_;
  std::vector<std::string> names_;
  TensorList values_;
  TensorList list_;
};

// One tensor (y), or several (y0, y1, ...).
struct Result {
  Result(Tensor y) : tensors{std::move(y)} {}
  Result(TensorList list) : tensors(std::move(list)), several(true) {}
  Result(ValuesIndices pair) : tensors{pair.values, pair.indices}, several(true) {}
  TensorList tensors;
  bool several = false;
};

// ---- Samples ----------------------------------------------------------------------------------

struct Input {
  enum class Kind { kFloating, kDistinct, kAway, kMatrix, kInteger, kStarts, kBool, kAbsent };
  Shape shape;
  Kind kind = Kind::kFloating;
  double low = 0, high = 0;  // a normal distribution where both are 0; of a matrix low is its shift
  bool grad = true;
};
Input normal(const Shape& shape);
Input uniform(double low, double high, const Shape& shape);
Input positive(const Shape& shape);     // [0.25, 3]
Input probability(const Shape& shape);  // [0.05, 0.95]
Input away(const Shape& shape);         // magnitudes in [0.125, 2], both signs: no kink at 0
Input distinct(const Shape& shape);     // multiples of 1/16, none twice: no ties
// Small numbers and on the diagonal, moved `shift` columns to the right, 1.5, 2.5, 3.5...: well
// conditioned, singular values and eigenvalues apart; for shift 0 the symmetric part is
// positive-definite.
Input matrices(const Shape& shape, int shift = 0);
Input integers(int64_t high, const Shape& shape);  // i64 in [0, high)
Input starts(const Shape& shape);                  // i32 [B, T]: of documents in a row of T
Input booleans(const Shape& shape);                // the first is true
Input absent();
Input constant(Input input);  // no gradient is asked for

struct Sample {
  std::vector<Input> inputs;
  const char* attrs = "{}";
  int64_t terms = 1;  // longest sum inside, forward or backward
};

enum class Differentiable {
  kYes,
  kOnce,  // backward runs kernels: the second derivative is an error that names the op
  kNo,    // results require no grad
};

struct OpRow {
  std::string_view name;
  std::string_view parameters;
  Result (*call)(const Args& in, Attrs& attrs);
  std::vector<Sample> samples;
  Differentiable differentiable = Differentiable::kYes;
  // Results are sums of products: errors are measured against the sums of absolute values.
  bool sums = false;
  // Draws random numbers: the same seed gives the same ones for every dtype and layout.
  bool random = false;
  // The shape of the result depends on values: the meta device is refused.
  bool value_dependent = false;
  // The result is f32 for 16-bit inputs.
  bool float32_result = false;
  // On a GPU what a bf16 result is made of is rounded to bf16 on the way, whatever the result is.
  bool bf16_inside_on_gpu = false;
  // A loss that keeps the dtype of its input, but is f32 for 16-bit ones under autocast.
  bool float32_under_autocast = false;
  // Takes f32 and f64 on the CPU: 16-bit dtypes are a DTypeError, a GPU is an UnsupportedError.
  bool linear_algebra = false;
  // The first input is a symmetric matrix, of which one triangle is read: differences are taken of
  // its symmetric part.
  bool symmetric = false;
  // Refuses layouts that would need a copy, with a ShapeError.
  bool refuses_layouts = false;
  // Factor k of the error bound k * eps * sqrt(terms) * scale.
  double tolerance = 4;
  // Names of Op records that this row exercises, where they differ from `name`; "" has none.
  std::vector<std::string_view> records = {};
  // A large sample for bench_ops; absent where speed is of no interest.
  std::optional<Sample> perf = {};
};

const std::vector<OpRow>& op_rows();
const OpRow* find_op_row(
    std::string_view name);  // also by torch's other names: "concat", "linalg.qr"

// Binds, calls and refuses attributes that were not read.
Result call_op(const OpRow& row, const TensorList& inputs, Attrs attrs);

// The tensors of a sample: the same for each dtype up to rounding, the same in each run.
TensorList make_inputs(const OpRow& row, const Sample& sample, DType floating);

// Rows by topic, one file each.
std::vector<OpRow> creation_rows();
std::vector<OpRow> elementwise_rows();
std::vector<OpRow> special_rows();
std::vector<OpRow> order_rows();
std::vector<OpRow> rearrange_rows();
std::vector<OpRow> inplace_rows();
std::vector<OpRow> reduce_rows();
std::vector<OpRow> norm_rows();
std::vector<OpRow> loss_rows();
std::vector<OpRow> matmul_rows();
std::vector<OpRow> shape_rows();
std::vector<OpRow> index_rows();
std::vector<OpRow> convolution_rows();
std::vector<OpRow> attention_rows();
std::vector<OpRow> linalg_rows();
std::vector<OpRow> layer_rows();

}  // namespace tessera::tests
