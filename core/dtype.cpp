#include <tessera/core/dtype.h>

#include <ostream>

#include <tessera/core/error.h>

namespace tessera {
namespace {

constexpr std::string_view kNames[kNumDTypes] = {"f64",    "f32", "f16", "bf16", "f8e4m3",
                                                 "f8e5m2", "i64", "i32", "u8",   "bool"};
constexpr std::string_view kTorchNames[kNumDTypes] = {
    "float64",     "float32", "float16", "bfloat16", "float8_e4m3fn",
    "float8_e5m2", "int64",   "int32",   "uint8",    "bool"};

}  // namespace

double epsilon_of(DType dtype) {
  constexpr double epsilons[kNumDTypes] = {0x1p-52, 0x1p-23, 0x1p-10, 0x1p-7, 0x1p-3,
                                           0x1p-2,  0,       0,       0,      0};
  return epsilons[static_cast<int>(dtype)];
}

std::string_view name_of(DType dtype) { return kNames[static_cast<int>(dtype)]; }
std::string_view torch_name_of(DType dtype) { return kTorchNames[static_cast<int>(dtype)]; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name == kNames[i] || name == kTorchNames[i]) return static_cast<DType>(i);
  }
  if (name == "float") return kF32;
  if (name == "double") return kF64;
  if (name == "half") return kF16;
  if (name == "long") return kI64;
  if (name == "int") return kI32;
  return std::nullopt;
}

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }

int64_t Scalar::refuse(unsigned long long value) {
  TS_THROW(ValueError, "Scalar", "integers are of 64 bits with a sign; got ", value,
           "; a floating number takes it");
}

std::ostream& operator<<(std::ostream& out, const Scalar& scalar) {
  switch (scalar.kind()) {
    case Scalar::Kind::kBool:
      return out << (scalar.to_bool() ? "true" : "false");
    case Scalar::Kind::kInt:
      return out << scalar.to_int();
    case Scalar::Kind::kDouble:
      return out << scalar.to_double();
  }
  return out;
}

DType promote_types(DType a, DType b) {
  if (a == b) return a;
  TS_CHECK_DTYPE(!is_fp8(a) && !is_fp8(b), "promote_types", "fp8 types do not promote; got ", a,
                 " and ", b, "; convert one with to(dtype)");
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  if (is_floating(a)) {
    // f16 and bf16 hold different numbers: their common type is f32.
    if (is_low_precision(a) && is_low_precision(b)) return kF32;
    return a < b ? a : b;
  }
  // i64 > i32 > u8 > bool in the order of the enum.
  return a < b ? a : b;
}

DType promote_types(DType tensor, const Scalar& scalar) {
  if (scalar.is_floating() && !is_floating(tensor)) return kF32;
  if (scalar.kind() == Scalar::Kind::kInt && tensor == kBool) return kI64;
  return tensor;
}

}  // namespace tessera
