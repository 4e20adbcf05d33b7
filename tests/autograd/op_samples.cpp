#include "autograd/op_samples.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace tessera::tests {

// ---- Attributes -------------------------------------------------------------------------------

std::string quote_special_numbers(std::string_view json) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\' && i + 1 < json.size()) {
      result += c;
      result += json[++i];
      continue;
    }
    bool special = false;
    for (std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (in_string || json.substr(i, word.size()) != word) continue;
      result += '"' + std::string(word) + '"';
      i += word.size() - 1;
      special = true;
      break;
    }
    if (!special) result += c;
  }
  return result;
}

namespace {

AttrValue from_json(const nlohmann::json& json) {
  using Kind = AttrValue::Kind;
  AttrValue value;
  if (json.is_boolean()) {
    value.kind = Kind::kBool;
    value.boolean = json.get<bool>();
  } else if (json.is_number_integer()) {
    value.kind = Kind::kInt;
    value.integer = json.get<int64_t>();
  } else if (json.is_number()) {
    value.kind = Kind::kDouble;
    value.number = json.get<double>();
  } else if (json.is_string()) {
    value.kind = Kind::kString;
    value.text = json.get<std::string>();
  } else if (json.is_array()) {
    value.kind = Kind::kList;
    for (const nlohmann::json& element : json) value.list.push_back(from_json(element));
  } else if (!json.is_null()) {
    TS_THROW(FormatError, "attrs", "a value is a number, boolean, string, list or null; got ",
             json.dump());
  }
  return value;
}

std::optional<double> special_number(std::string_view text) {
  if (text == "inf" || text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-inf" || text == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (text == "nan" || text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  return {};
}

std::string_view kind_name(AttrValue::Kind kind) {
  constexpr std::string_view names[] = {"null",     "a boolean", "an integer",
                                        "a number", "a string",  "a list"};
  return names[static_cast<int>(kind)];
}

// Names of one parameter or keyword: "size|shape", and numpy's spellings.
template <class Visit>
bool any_name(std::string_view key, const Visit& visit) {
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('|', begin), key.size());
    const std::string_view name = key.substr(begin, end - begin);
    if (visit(name) || (name == "dim" && visit("axis")) || (name == "keepdim" && visit("keepdims")))
      return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

Attrs Attrs::parse(std::string_view json) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(quote_special_numbers(json));
  } catch (const nlohmann::json::exception& error) {
    TS_THROW(FormatError, "attrs", "not valid JSON: ", error.what());
  }
  TS_CHECK_AS(FormatError, object.is_object(), "attrs", "expects an object of keywords; got ",
              json);
  Attrs attrs;
  for (const auto& [key, value] : object.items()) attrs.values_[key] = from_json(value);
  return attrs;
}

template <class... Args>
void Attrs::fail(const Args&... args) const {
  TS_THROW(ValueError, op_, args...);
}

const AttrValue* Attrs::find(std::string_view key) {
  const AttrValue* found = nullptr;
  any_name(key, [&](std::string_view name) {
    known_.emplace(name);
    const auto entry = values_.find(name);
    if (entry != values_.end() && entry->second.kind != AttrValue::Kind::kNull)
      found = &entry->second;
    return false;
  });
  return found;
}

bool Attrs::has(std::string_view key) { return find(key) != nullptr; }
bool Attrs::is_list(std::string_view key) {
  const AttrValue* value = find(key);
  return value && value->kind == AttrValue::Kind::kList;
}

bool Attrs::is_text(std::string_view key) {
  const AttrValue* value = find(key);
  return value && value->kind == AttrValue::Kind::kString;
}

bool Attrs::flag(std::string_view key, bool fallback) {
  const AttrValue* value = find(key);
  if (!value) return fallback;
  if (value->kind == AttrValue::Kind::kInt && (value->integer == 0 || value->integer == 1))
    return value->integer == 1;
  if (value->kind != AttrValue::Kind::kBool)
    fail("'", key, "' must be a boolean; got ", kind_name(value->kind));
  return value->boolean;
}

std::optional<int64_t> Attrs::maybe_integer(std::string_view key) {
  const AttrValue* value = find(key);
  if (!value) return {};
  if (value->kind != AttrValue::Kind::kInt)
    fail("'", key, "' must be an integer; got ", kind_name(value->kind));
  return value->integer;
}
int64_t Attrs::integer(std::string_view key, std::optional<int64_t> fallback) {
  const std::optional<int64_t> value = maybe_integer(key);
  if (!value && !fallback) fail("'", key, "' is missing: an integer");
  return value ? *value : *fallback;
}

std::optional<Scalar> Attrs::maybe_scalar(std::string_view key) {
  const AttrValue* value = find(key);
  if (!value) return {};
  switch (value->kind) {
    case AttrValue::Kind::kBool:
      return Scalar(value->boolean);
    case AttrValue::Kind::kInt:
      return Scalar(value->integer);
    case AttrValue::Kind::kDouble:
      return Scalar(value->number);
    default:
      break;
  }
  if (const auto number = special_number(value->text)) return Scalar(*number);
  fail("'", key, "' must be a number; got ", kind_name(value->kind));
}
Scalar Attrs::scalar(std::string_view key) {
  const std::optional<Scalar> value = maybe_scalar(key);
  if (!value) fail("'", key, "' is missing: a number");
  return *value;
}
Scalar Attrs::scalar(std::string_view key, const Scalar& fallback) {
  return maybe_scalar(key).value_or(fallback);
}

std::optional<double> Attrs::maybe_number(std::string_view key) {
  const std::optional<Scalar> value = maybe_scalar(key);
  return value ? std::optional<double>(value->to_double()) : std::nullopt;
}
double Attrs::number(std::string_view key, std::optional<double> fallback) {
  const std::optional<double> value = maybe_number(key);
  if (!value && !fallback) fail("'", key, "' is missing: a number");
  return value ? *value : *fallback;
}

std::string Attrs::text(std::string_view key, std::optional<std::string_view> fallback) {
  const AttrValue* value = find(key);
  if (!value && !fallback) fail("'", key, "' is missing: a string");
  if (!value) return std::string(*fallback);
  if (value->kind != AttrValue::Kind::kString)
    fail("'", key, "' must be a string; got ", kind_name(value->kind));
  return value->text;
}

std::vector<std::optional<int64_t>> Attrs::maybe_integers(std::string_view key) {
  const AttrValue* value = find(key);
  if (!value) fail("'", key, "' is missing: a list of integers");
  if (value->kind == AttrValue::Kind::kInt) return {value->integer};
  if (value->kind != AttrValue::Kind::kList) {
    fail("'", key, "' must be a list of integers; got ", kind_name(value->kind));
  }
  std::vector<std::optional<int64_t>> result;
  for (const AttrValue& element : value->list) {
    if (element.kind == AttrValue::Kind::kInt) {
      result.push_back(element.integer);
    } else if (element.kind == AttrValue::Kind::kNull) {
      result.emplace_back();
    } else {
      fail("'", key, "' must hold integers; got ", kind_name(element.kind));
    }
  }
  if (result.size() > kMaxDims) {
    fail("'", key, "' holds at most ", kMaxDims, " integers; got ", result.size());
  }
  return result;
}
Shape Attrs::integers(std::string_view key) {
  Shape result;
  for (const std::optional<int64_t>& element : maybe_integers(key)) {
    if (!element) fail("'", key, "' must hold integers; got null");
    result.push_back(*element);
  }
  return result;
}
Shape Attrs::integers(std::string_view key, const Shape& fallback) {
  return has(key) ? integers(key) : fallback;
}

std::vector<Shape> Attrs::integer_lists(std::string_view key) {
  const AttrValue* value = find(key);
  if (!value || value->kind != AttrValue::Kind::kList) fail("'", key, "' must be a list of lists");
  std::vector<Shape> result;
  for (const AttrValue& list : value->list) {
    Shape integers;
    if (list.kind != AttrValue::Kind::kList) fail("'", key, "' must be a list of lists");
    for (const AttrValue& element : list.list) {
      if (element.kind != AttrValue::Kind::kInt) fail("'", key, "' must hold integers");
      integers.push_back(element.integer);
    }
    result.push_back(integers);
  }
  return result;
}
std::vector<double> Attrs::numbers(std::string_view key) {
  const AttrValue* value = find(key);
  if (!value) return {};
  std::vector<double> result;
  const auto push = [&](const AttrValue& element) {
    if (element.kind == AttrValue::Kind::kInt) {
      result.push_back(static_cast<double>(element.integer));
    } else if (element.kind == AttrValue::Kind::kDouble) {
      result.push_back(element.number);
    } else {
      fail("'", key, "' must hold numbers; got ", kind_name(element.kind));
    }
  };
  if (value->kind == AttrValue::Kind::kList) {
    for (const AttrValue& element : value->list) push(element);
  } else {
    push(*value);
  }
  return result;
}

std::optional<DType> Attrs::dtype() {
  if (!has("dtype")) return {};
  std::string name = text("dtype");
  if (name.starts_with("torch.")) name = name.substr(6);
  const std::optional<DType> dtype = parse_dtype(name);
  if (!dtype) fail("'dtype' must name a dtype, as \"float32\" or \"bfloat16\"; got '", name, "'");
  return dtype;
}

Device Attrs::device() { return parse_device(text("device", "cpu")); }

void Attrs::only(std::string_view key, bool value) {
  if (flag(key, value) != value)
    fail("'", key, "' is served as ", value ? "true" : "false", " only");
}

void Attrs::replace_dtype(DType dtype) {
  const auto entry = values_.find("dtype");
  if (entry == values_.end() || entry->second.kind != AttrValue::Kind::kString) return;
  const std::optional<DType> given = parse_dtype(entry->second.text);
  if (given && is_floating(*given)) entry->second.text = torch_name_of(dtype);
}

void Attrs::refuse_unread() const {
  // Keywords without influence on values, with which torch's functions are often called.
  const auto is_inert = [](std::string_view key, const AttrValue& value) {
    const bool off = value.kind == AttrValue::Kind::kBool && !value.boolean;
    if (value.kind == AttrValue::Kind::kNull) {
      return key == "out" || key == "size_average" || key == "reduce" || key == "dtype" ||
             key == "generator" || key == "device" || key == "layout" || key == "memory_format" ||
             key == "pin_memory";
    }
    if (key == "inplace") return value.kind == AttrValue::Kind::kBool;
    if (key == "requires_grad" || key == "pin_memory" || key == "antialias") return off;
    if (key == "device") return value.text == "cpu";
    return key == "layout" && value.text.ends_with("strided");
  };
  for (const auto& [key, value] : values_) {
    if (known_.contains(key) || is_inert(key, value)) continue;
    std::string list;
    for (const std::string& name : known_) list += (list.empty() ? "" : ", ") + name;
    fail("unknown keyword '", key, "'; it takes ", list.empty() ? "none" : list);
  }
}

// ---- Inputs -----------------------------------------------------------------------------------

Args::Args(std::string_view op, std::string_view parameters, const TensorList& inputs, Attrs& attrs)
    : op_(op) {
  size_t starred = std::string_view::npos;
  for (size_t begin = 0; begin < parameters.size();) {
    const size_t end = std::min(parameters.find(", ", begin), parameters.size());
    std::string name(parameters.substr(begin, end - begin));
    if (name.ends_with('*')) {
      name.pop_back();
      starred = names_.size();
    }
    names_.push_back(std::move(name));
    begin = end + 2;
  }
  values_.resize(names_.size());
  if (starred != std::string_view::npos) {
    const size_t others = names_.size() - 1, after = others - starred;
    TS_CHECK(inputs.size() >= others, op_, "takes the tensors (", parameters, "); got ",
             inputs.size());
    const auto first = inputs.begin();
    for (size_t i = 0; i < starred; ++i) values_[i] = inputs[i];
    list_.assign(first + static_cast<ptrdiff_t>(starred),
                 inputs.end() - static_cast<ptrdiff_t>(after));
    for (size_t i = 0; i < after; ++i) values_[starred + 1 + i] = inputs[inputs.size() - after + i];
    return;
  }
  size_t given = 0;
  std::vector<bool> is_given;
  for (const std::string& name : names_) {
    is_given.push_back(attrs.has(name));
    given += is_given.back();
  }
  TS_CHECK(inputs.size() <= names_.size(), op_, "takes at most ", names_.size(), " tensors (",
           parameters, "); got ", inputs.size());
  const bool pass_over = inputs.size() + given <= names_.size();
  size_t position = 0;
  for (const Tensor& input : inputs) {
    while (pass_over && is_given[position]) ++position;
    TS_CHECK(!input.defined() || !is_given[position], op_, "'", names_[position],
             "' is given as a tensor and as a keyword");
    values_[position++] = input;
  }
}

const Tensor& Args::at(size_t i) const {
  TS_CHECK(i < values_.size(), op_, "the row reads tensor ", i, " but names ", values_.size());
  return values_[i];
}

const Tensor& Args::operator[](size_t i) const {
  const Tensor& value = at(i);
  TS_CHECK(value.defined(), op_, "expects a tensor for '", names_[i], "', its tensor ", i,
           "; it is absent");
  return value;
}

Input normal(const Shape& shape) { return {.shape = shape}; }
Input uniform(double low, double high, const Shape& shape) {
  return {.shape = shape, .low = low, .high = high};
}
Input positive(const Shape& shape) { return uniform(0.25, 3, shape); }
Input probability(const Shape& shape) { return uniform(0.05, 0.95, shape); }
Input away(const Shape& shape) { return {.shape = shape, .kind = Input::Kind::kAway}; }
Input distinct(const Shape& shape) { return {.shape = shape, .kind = Input::Kind::kDistinct}; }
Input matrices(const Shape& shape, int shift) {
  return {.shape = shape, .kind = Input::Kind::kMatrix, .low = static_cast<double>(shift)};
}
Input integers(int64_t high, const Shape& shape) {
  return {.shape = shape,
          .kind = Input::Kind::kInteger,
          .high = static_cast<double>(high),
          .grad = false};
}
Input starts(const Shape& shape) {
  return {.shape = shape, .kind = Input::Kind::kStarts, .grad = false};
}
Input booleans(const Shape& shape) {
  return {.shape = shape, .kind = Input::Kind::kBool, .grad = false};
}
Input absent() { return {.shape = {}, .kind = Input::Kind::kAbsent, .grad = false}; }
Input constant(Input input) {
  input.grad = false;
  return input;
}

namespace {

// A small generator of its own: the standard distributions differ between libraries.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // SplitMix64
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53;
  }
  double normal() {
    const double u = 1 - uniform(0, 1), v = uniform(0, 1);
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.14159265358979323846 * v);
  }

 private:
  uint64_t state_;
};

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

Tensor make_input(const Input& input, uint64_t seed, DType floating) {
  if (input.kind == Input::Kind::kAbsent) return {};
  Numbers numbers(seed);
  const size_t count = static_cast<size_t>(numel_of(input.shape));
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) {
    switch (input.kind) {
      case Input::Kind::kAway:
        values[i] = numbers.uniform(0.125, 2) * (numbers.next() & 1 ? 1 : -1);
        break;
      case Input::Kind::kDistinct:
        values[i] =
            (static_cast<double>(i) - std::floor(static_cast<double>(count) / 2) + 0.5) / 16;
        break;
      case Input::Kind::kMatrix: {
        const size_t columns = static_cast<size_t>(input.shape.back());
        const size_t rows = static_cast<size_t>(input.shape[input.shape.size() - 2]);
        const size_t row = i / columns % rows, column = i % columns;
        const bool diagonal = column == (row + static_cast<size_t>(input.low)) % columns;
        values[i] = 0.3 * numbers.normal() + (diagonal ? 1.5 + static_cast<double>(row) : 0);
        break;
      }
      case Input::Kind::kInteger:
        values[i] = std::floor(numbers.uniform(0, input.high));
        break;
      case Input::Kind::kStarts: {  // every other token or so begins a document
        const auto t = static_cast<int64_t>(i) % input.shape.back();
        values[i] = t == 0 || (numbers.next() & 1) ? static_cast<double>(t) : values[i - 1];
        break;
      }
      case Input::Kind::kBool:
        values[i] = i == 0 || (numbers.next() & 1);
        break;
      default:
        values[i] =
            input.low == input.high ? numbers.normal() : numbers.uniform(input.low, input.high);
    }
  }
  if (input.kind == Input::Kind::kDistinct) {
    for (size_t i = count; i > 1; --i) std::swap(values[i - 1], values[numbers.next() % i]);
  }
  const DType dtype = input.kind == Input::Kind::kInteger  ? kI64
                      : input.kind == Input::Kind::kStarts ? kI32
                      : input.kind == Input::Kind::kBool   ? kBool
                                                           : floating;
  return tensor(values, input.shape, dtype);
}

}  // namespace

TensorList make_inputs(const OpRow& row, const Sample& sample, DType floating) {
  TensorList inputs;
  uint64_t seed = hash_of(row.name) ^ hash_of(sample.attrs);
  for (const Input& input : sample.inputs) {
    for (int64_t size : input.shape) seed = seed * 31 + static_cast<uint64_t>(size);
  }
  for (const Input& input : sample.inputs) inputs.push_back(make_input(input, ++seed, floating));
  return inputs;
}

// ---- Rows -------------------------------------------------------------------------------------

const std::vector<OpRow>& op_rows() {
  static const std::vector<OpRow> rows = [] {
    std::vector<OpRow> all;
    for (auto* part :
         {&creation_rows, &elementwise_rows, &special_rows, &order_rows, &rearrange_rows,
          &inplace_rows, &reduce_rows, &norm_rows, &loss_rows, &matmul_rows, &shape_rows,
          &index_rows, &convolution_rows, &attention_rows, &linalg_rows, &layer_rows}) {
      for (OpRow& row : part()) all.push_back(std::move(row));
    }
    std::sort(all.begin(), all.end(),
              [](const OpRow& a, const OpRow& b) { return a.name < b.name; });
    return all;
  }();
  return rows;
}

const OpRow* find_op_row(std::string_view name) {
  static const std::map<std::string_view, std::string_view> other_names = {
      {"absolute", "abs"},       {"negative", "neg"},     {"subtract", "sub"},
      {"multiply", "mul"},       {"divide", "div"},       {"true_divide", "div"},
      {"greater", "gt"},         {"greater_equal", "ge"}, {"less", "lt"},
      {"less_equal", "le"},      {"not_equal", "ne"},     {"clip", "clamp"},
      {"concat", "cat"},         {"concatenate", "cat"},  {"swapaxes", "transpose"},
      {"swapdims", "transpose"}, {"ger", "outer"},        {"mm", "matmul"},
      {"mv", "matmul"},          {"ravel", "flatten"},    {"arctan2", "atan2"},
      {"fix", "trunc"},          {"moveaxis", "movedim"}, {"special_erfinv", "erfinv"}};
  // torch.linalg.qr is "linalg.qr", "linalg_qr" and, with that function's arguments, "qr".
  static const std::map<std::string_view, std::string_view> linear_algebra = [] {
    std::map<std::string_view, std::string_view> names = {
        {"inverse", "linalg_inv"},
        {"pinverse", "linalg_pinv"},
        {"triangular_solve", "linalg_solve_triangular"}};
    for (const OpRow& row : op_rows()) {
      if (row.linear_algebra) names.emplace(row.name.substr(sizeof("linalg_") - 1), row.name);
    }
    return names;
  }();
  if (name.starts_with("linalg.")) name.remove_prefix(sizeof("linalg.") - 1);
  const auto factorisation = linear_algebra.find(name);
  if (factorisation != linear_algebra.end()) name = factorisation->second;
  const auto other = other_names.find(name);
  if (other != other_names.end()) name = other->second;
  const std::vector<OpRow>& rows = op_rows();
  const auto found =
      std::lower_bound(rows.begin(), rows.end(), name,
                       [](const OpRow& row, std::string_view wanted) { return row.name < wanted; });
  return found != rows.end() && found->name == name ? &*found : nullptr;
}

Result call_op(const OpRow& row, const TensorList& inputs, Attrs attrs) {
  attrs.set_op(row.name);
  const Args args(row.name, row.parameters, inputs, attrs);
  Result result = row.call(args, attrs);
  attrs.refuse_unread();
  return result;
}

}  // namespace tessera::tests
