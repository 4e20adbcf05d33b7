#include <tessera/core/factory/print.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

constexpr int kPrecision = 4;
constexpr int64_t kThreshold = 1000;  // elements above which the middle is left out
constexpr int64_t kEdgeItems = 3;
constexpr int kLineWidth = 80;

std::string format(const char* pattern, int precision, double value) {
  if (std::isnan(value)) return "nan";  // C would print the sign too
  char text[400];                       // 1.8e308 in %f has 309 digits
  plain_snprintf(text, sizeof(text), pattern, precision, value);
  return text;
}

// How all numbers of one tensor are written, and how wide the widest is.
struct Format {
  enum class Style { kInteger, kBool, kWhole, kFixed, kScientific };
  Style style = Style::kInteger;
  size_t width = 1;

  std::string unpadded(double value) const {
    if (style == Style::kScientific) return format("%.*e", kPrecision, value);
    if (style == Style::kFixed) return format("%.*f", kPrecision, value);
    std::string text = format("%.*f", 0, value);
    if (style == Style::kWhole && std::isfinite(value)) text += '.';
    return text;
  }
  std::string padded(std::string text) const {
    return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
  }
};

// Reads an element; floats as double, integers exactly as int64.
class Elements {
 public:
  explicit Elements(const Tensor& x) : x_(x), floating_(is_floating(x.dtype())) {}
  bool floating() const { return floating_; }
  double number(int64_t offset) const {
    double value = 0;
    dispatch_all(x_.dtype(), "repr", [&]<class T>() {
      value = static_cast<double>(load<Compute<T>>(x_.data_as<T>()[offset]));
    });
    return value;
  }
  std::string whole(int64_t offset) const {
    if (x_.dtype() == kBool) return x_.data_as<bool>()[offset] ? "True" : "False";
    int64_t value = 0;
    dispatch_all(x_.dtype(), "repr",
                 [&]<class T>() { value = load<int64_t>(x_.data_as<T>()[offset]); });
    return std::to_string(value);
  }

 private:
  const Tensor& x_;
  bool floating_;
};

bool leaves_out(bool summarize, int64_t size) { return summarize && size > 2 * kEdgeItems; }

// Calls f(offset) for every element that is shown, in order.
template <class F>
void for_each_shown(const Tensor& x, bool summarize, int dim, int64_t offset, F&& f) {
  if (dim == x.dim()) {
    f(offset);
    return;
  }
  const int64_t size = x.shape()[dim];
  for (int64_t i = 0; i < size; ++i) {
    if (leaves_out(summarize, size) && i == kEdgeItems) i = size - kEdgeItems;
    for_each_shown(x, summarize, dim + 1, offset + i * x.strides()[dim], f);
  }
}

Format choose_format(const Tensor& x, const Elements& elements, bool summarize) {
  Format chosen;
  if (!elements.floating()) {
    chosen.style = x.dtype() == kBool ? Format::Style::kBool : Format::Style::kInteger;
    for_each_shown(x, summarize, 0, 0, [&](int64_t offset) {
      chosen.width = std::max(chosen.width, elements.whole(offset).size());
    });
    return chosen;
  }
  // Zeros, infinities and NaN do not decide.
  std::vector<double> values;
  for_each_shown(x, summarize, 0, 0, [&](int64_t offset) {
    const double value = elements.number(offset);
    if (std::isfinite(value) && value != 0) values.push_back(value);
  });
  chosen.style = Format::Style::kWhole;
  if (values.empty()) return chosen;
  double smallest = HUGE_VAL, largest = 0;
  for (double value : values) {
    if (value != std::ceil(value)) chosen.style = Format::Style::kFixed;
    smallest = std::min(smallest, std::abs(value));
    largest = std::max(largest, std::abs(value));
  }
  if (largest / smallest > 1000 || largest > 1e8 || smallest < 1e-4) {
    chosen.style = Format::Style::kScientific;
  }
  for (double value : values) {
    chosen.width = std::max(chosen.width, chosen.unpadded(value).size());
  }
  return chosen;
}

class Writer {
 public:
  Writer(const Tensor& x, bool summarize)
      : x_(x),
        elements_(x),
        summarize_(summarize),
        format_(choose_format(x, elements_, summarize)) {}

  // `indent`: the column at which the text begins.
  std::string text(int dim, int64_t offset, int indent) const {
    if (x_.dim() == 0) return element(offset);
    if (dim == x_.dim() - 1) return row(offset, indent);
    std::string separator = "," + std::string(static_cast<size_t>(x_.dim() - 1 - dim), '\n') +
                            std::string(static_cast<size_t>(indent + 1), ' ');
    const int64_t size = x_.shape()[dim];
    std::string result = "[";
    for (int64_t i = 0; i < size; ++i) {
      if (i > 0) result += separator;
      if (leaves_out(summarize_, size) && i == kEdgeItems) {
        result += "..." + separator;
        i = size - kEdgeItems;
      }
      result += text(dim + 1, offset + i * x_.strides()[dim], indent + 1);
    }
    return result + "]";
  }

 private:
  std::string element(int64_t offset) const {
    return format_.padded(elements_.floating() ? format_.unpadded(elements_.number(offset))
                                               : elements_.whole(offset));
  }

  std::string row(int64_t offset, int indent) const {
    const int dim = x_.dim() - 1;
    const int64_t size = x_.shape()[dim];
    std::vector<std::string> items;
    for (int64_t i = 0; i < size; ++i) {
      if (leaves_out(summarize_, size) && i == kEdgeItems) {
        items.push_back(" ...");
        i = size - kEdgeItems;
      }
      items.push_back(element(offset + i * x_.strides()[dim]));
    }
    const size_t item_width = format_.width + 2;  // with comma and space
    const size_t room = static_cast<size_t>(std::max(kLineWidth - indent, 0));
    const size_t in_line = std::max<size_t>(1, room / item_width);
    std::string result = "[";
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) {
        result += i % in_line == 0 ? ",\n" + std::string(static_cast<size_t>(indent + 1), ' ')
                                   : std::string(", ");
      }
      result += items[i];
    }
    return result + "]";
  }

  const Tensor& x_;
  Elements elements_;
  bool summarize_;
  Format format_;
};

std::string python_tuple(const Shape& shape) {
  std::string text = "(";
  for (int i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

std::string repr(const Tensor& x) {
  if (!x.defined()) return "undefined";
  if (const TensorPlacement* placement = tensor_placement(x)) {
    return "DTensor(local=" + repr(raw::alias(x)) + ", " + placement->describe_whole(x) + ")";
  }
  if (unreadable_storage(x) != nullptr) return "tensor(" + x.describe() + ")";
  constexpr int kIndent = 7;  // of "tensor("
  std::string text = "tensor(";
  std::vector<std::string> suffixes;
  const std::string dtype = "dtype=torch." + std::string(torch_name_of(x.dtype()));
  if (!x.device().is_cpu()) {
    PlainText<std::ostringstream> device;
    device << x.device();
    suffixes.push_back("device='" + device.str() + "'");
  }
  const bool freed = !x.is_meta() && x.numel() > 0 && x.storage()->bytes() == 0;
  if (x.is_meta() || freed) {
    text += "...";
    suffixes.push_back("size=" + python_tuple(x.shape()));
    if (x.dtype() != kF32) suffixes.push_back(dtype);
  } else if (x.numel() == 0) {
    text += "[]";
    if (x.dim() != 1) suffixes.push_back("size=" + python_tuple(x.shape()));
    if (x.dtype() != kF32) suffixes.push_back(dtype);
  } else {
    Tensor elements = x;
    if (!x.device().is_cpu()) {
      elements = raw::empty(x.shape(), x.dtype());
      kernels::copy_into(elements, x);
    }
    text += Writer(elements, x.numel() > kThreshold).text(0, 0, kIndent);
    if (x.dtype() != kF32 && x.dtype() != kI64 && x.dtype() != kBool) suffixes.push_back(dtype);
  }
  const size_t line_break = text.rfind('\n');
  size_t line = line_break == std::string::npos ? text.size() + 2 : text.size() - line_break + 1;
  for (const std::string& suffix : suffixes) {
    if (line + suffix.size() + 2 > kLineWidth) {
      text += ",\n" + std::string(kIndent, ' ') + suffix;
      line = kIndent + suffix.size();
    } else {
      text += ", " + suffix;
      line += suffix.size() + 2;
    }
  }
  return text + ")";
}

std::string Tensor::describe() const {
  if (impl_ == nullptr) return "undefined";
  if (const ElementGuard* guard = element_guard(*this)) return guard->describe(*this);
  PlainText<std::ostringstream> out;
  out << dtype() << shape() << ' ' << device();
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return out << repr(tensor); }

}  // namespace tessera
