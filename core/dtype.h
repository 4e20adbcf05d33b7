// Element types: names, sizes, categories and the promotion rules of PyTorch.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string_view>

namespace tessera {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // OCP E4M3 (finite, "fn"): no infinities, max 448
  kFloat8E5M2,  // OCP E5M2: infinities, max 57344
  kInt64,
  kInt32,
  kUInt8,
  kBool,
};
inline constexpr int kNumDTypes = 10;

inline constexpr DType kF64 = DType::kFloat64;
inline constexpr DType kF32 = DType::kFloat32;
inline constexpr DType kF16 = DType::kFloat16;
inline constexpr DType kBF16 = DType::kBFloat16;
inline constexpr DType kF8E4M3 = DType::kFloat8E4M3;
inline constexpr DType kF8E5M2 = DType::kFloat8E5M2;
inline constexpr DType kI64 = DType::kInt64;
inline constexpr DType kI32 = DType::kInt32;
inline constexpr DType kU8 = DType::kUInt8;
inline constexpr DType kBool = DType::kBool;

constexpr int64_t size_of(DType dtype) {  // bytes an element
  constexpr int64_t sizes[kNumDTypes] = {8, 4, 2, 2, 1, 1, 8, 4, 1, 1};
  return sizes[static_cast<int>(dtype)];
}
constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat8E5M2; }
constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}
constexpr bool is_low_precision(DType dtype) {  // fewer bits than float32
  return dtype >= DType::kFloat16 && dtype <= DType::kFloat8E5M2;
}
constexpr bool is_integral(DType dtype) {  // bool not counted
  return dtype >= DType::kInt64 && dtype <= DType::kUInt8;
}
// Distance from 1 to the next representable number; 0 for integers and bool.
double epsilon_of(DType dtype);

std::string_view name_of(DType dtype);        // "f32", "bf16", "f8e4m3": as errors print it
std::string_view torch_name_of(DType dtype);  // "float32", "bfloat16", "float8_e4m3fn"
std::optional<DType> parse_dtype(std::string_view name);  // either spelling, also "float", "half"
std::ostream& operator<<(std::ostream& out, DType dtype);

// The dtype to which two tensors promote (torch.promote_types). fp8 promotes only with itself:
// anything else is a DTypeError.
DType promote_types(DType a, DType b);

// A number with PyTorch's weak typing: `tensor + 1` keeps an integer dtype, `tensor + 1.5` does
// not.
class Scalar {
 public:
  enum class Kind : uint8_t { kBool, kInt, kDouble };
  constexpr Scalar(bool value) : kind_(Kind::kBool), int_(value) {}
  constexpr Scalar(int value) : kind_(Kind::kInt), int_(value) {}
  constexpr Scalar(long value) : kind_(Kind::kInt), int_(value) {}
  constexpr Scalar(long long value) : kind_(Kind::kInt), int_(value) {}
  constexpr Scalar(unsigned value) : kind_(Kind::kInt), int_(value) {}
  constexpr Scalar(unsigned long value) : Scalar(static_cast<unsigned long long>(value)) {}
  constexpr Scalar(unsigned long long value)  // ValueError from 2^63 on
      : kind_(Kind::kInt), int_(value >> 63 == 0 ? static_cast<int64_t>(value) : refuse(value)) {}
  constexpr Scalar(float value) : kind_(Kind::kDouble), double_(value) {}
  constexpr Scalar(double value) : kind_(Kind::kDouble), double_(value) {}
  constexpr Scalar(long double value) : Scalar(static_cast<double>(value)) {}

  constexpr Kind kind() const { return kind_; }
  constexpr bool is_floating() const { return kind_ == Kind::kDouble; }
  constexpr double to_double() const {
    return kind_ == Kind::kDouble ? double_ : static_cast<double>(int_);
  }
  constexpr int64_t to_int() const {
    return kind_ == Kind::kDouble ? static_cast<int64_t>(double_) : int_;
  }
  constexpr bool to_bool() const { return kind_ == Kind::kDouble ? double_ != 0 : int_ != 0; }

 private:
  [[noreturn]] static int64_t refuse(unsigned long long value);

  Kind kind_;
  union {
    int64_t int_;
    double double_;
  };
};
std::ostream& operator<<(std::ostream& out, const Scalar& scalar);

// The dtype of `tensor op scalar`: the tensor's unless the scalar's category is higher (then f32
// for a floating scalar, i64 for an integer beside bool).
DType promote_types(DType tensor, const Scalar& scalar);

}  // namespace tessera
