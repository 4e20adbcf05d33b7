// From a DType known at run time to a C++ type, by a template lambda:
//
//     dispatch_floating(x.dtype(), "softmax", [&]<class T>() { softmax_rows<T>(...); });
//
// The lambda's result is passed on; a dtype outside the set is a DTypeError that names `where` (a
// name or an Op record). Kernels load the storage type, calculate in Compute<T> and store:
//
//     y[i] = store<T>(f(load<Compute<T>>(x[i])));
#pragma once

#include <cstdint>
#include <type_traits>

#include <tessera/core/dtype.h>
#include <tessera/core/error.h>
#include <tessera/core/half.h>
#include <tessera/core/macros.h>

namespace tessera {

namespace detail {

template <class T>
struct TypeTraits;
template <>
struct TypeTraits<double> {
  using Compute = double;
  static constexpr DType dtype = kF64;
};
template <>
struct TypeTraits<float> {
  using Compute = float;
  static constexpr DType dtype = kF32;
};
template <>
struct TypeTraits<f16> {
  using Compute = float;
  static constexpr DType dtype = kF16;
};
template <>
struct TypeTraits<bf16> {
  using Compute = float;
  static constexpr DType dtype = kBF16;
};
template <>
struct TypeTraits<f8e4m3> {
  using Compute = float;
  static constexpr DType dtype = kF8E4M3;
};
template <>
struct TypeTraits<f8e5m2> {
  using Compute = float;
  static constexpr DType dtype = kF8E5M2;
};
template <>
struct TypeTraits<int64_t> {
  using Compute = int64_t;
  static constexpr DType dtype = kI64;
};
template <>
struct TypeTraits<int32_t> {
  using Compute = int64_t;
  static constexpr DType dtype = kI32;
};
template <>
struct TypeTraits<uint8_t> {
  using Compute = int64_t;
  static constexpr DType dtype = kU8;
};
template <>
struct TypeTraits<bool> {
  using Compute = bool;
  static constexpr DType dtype = kBool;
};

}  // namespace detail

// The type that functors calculate in: double for f64, float for all other floating dtypes,
// int64_t for integers, bool for bool.
template <class T>
using Compute = typename detail::TypeTraits<T>::Compute;
template <class T>
inline constexpr DType dtype_of = detail::TypeTraits<T>::dtype;

// f16, bf16 and fp8: stored narrower than they are calculated.
template <class T>
inline constexpr bool is_narrow_float = std::is_same_v<T, bf16> || std::is_same_v<T, f16> ||
                                        std::is_same_v<T, f8e4m3> || std::is_same_v<T, f8e5m2>;

namespace detail {

// Truncates toward zero; numbers outside the range end at its nearest limit and NaN gives 0, so
// that host and device agree where the language leaves the result open.
template <class Int, class Float>
TS_HD Int truncate_to(Float value) {
  constexpr Float kEnd = sizeof(Int) == 8 ? Float(9223372036854775808.0) : Float(2147483648.0);
  constexpr Int kMax = sizeof(Int) == 8 ? Int(INT64_MAX) : Int(INT32_MAX);
  const bool below = value < -kEnd, above = value >= kEnd;
  const Float inside = below || above || value != value ? Float(0) : value;
  const Int truncated = static_cast<Int>(inside);
  return above ? kMax : below ? -kMax - 1 : truncated;
}

}  // namespace detail

// Storage to compute type C; any pair of types. double reaches f16, bf16 and fp8 by way of
// float, as in torch.
template <class C, class T>
TS_HD C load(T value) {
  if constexpr (std::is_same_v<C, T>) {
    return value;
  } else if constexpr (is_narrow_float<T>) {
    return load<C>(to_float(value));
  } else if constexpr (std::is_same_v<C, bool>) {
    return value != T(0);
  } else if constexpr (std::is_integral_v<C> && std::is_floating_point_v<T>) {
    return detail::truncate_to<C>(value);
  } else {
    return static_cast<C>(value);
  }
}

// Compute to storage type T; integers wrap as in torch, floats reach u8 by way of int64.
template <class T, class C>
TS_HD T store(C value) {
  if constexpr (std::is_same_v<C, T>) {
    return value;
  } else if constexpr (is_narrow_float<C>) {
    return store<T>(to_float(value));
  } else if constexpr (is_narrow_float<T>) {
    return from_float<T>(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value != C(0);
  } else if constexpr (std::is_integral_v<T> && std::is_floating_point_v<C>) {
    if constexpr (sizeof(T) == 1) {
      return static_cast<T>(detail::truncate_to<int64_t>(value));
    } else {
      return detail::truncate_to<T>(value);
    }
  } else {
    return static_cast<T>(value);
  }
}

namespace detail {

template <class Where>
[[noreturn]] void fail_dispatch(DType dtype, const Where& where, const char* expected) {
  TS_THROW(DTypeError, where, "expects ", expected, "; got ", dtype, "; convert with to(dtype)");
}

}  // namespace detail

// f64, f32, f16, bf16. fp8 is storage only: it converts, it does not calculate.
template <class Where, class F>
decltype(auto) dispatch_floating(DType dtype, const Where& where, F&& f) {
  switch (dtype) {
    case kF64:
      return f.template operator()<double>();
    case kF32:
      return f.template operator()<float>();
    case kF16:
      return f.template operator()<f16>();
    case kBF16:
      return f.template operator()<bf16>();
    default:
      detail::fail_dispatch(dtype, where, "f64, f32, f16 or bf16");
  }
}

// i64, i32, u8.
template <class Where, class F>
decltype(auto) dispatch_integral(DType dtype, const Where& where, F&& f) {
  switch (dtype) {
    case kI64:
      return f.template operator()<int64_t>();
    case kI32:
      return f.template operator()<int32_t>();
    case kU8:
      return f.template operator()<uint8_t>();
    default:
      detail::fail_dispatch(dtype, where, "i64, i32 or u8");
  }
}

// Floating and integral dtypes; neither bool nor fp8.
template <class Where, class F>
decltype(auto) dispatch_numeric(DType dtype, const Where& where, F&& f) {
  switch (dtype) {
    case kF64:
      return f.template operator()<double>();
    case kF32:
      return f.template operator()<float>();
    case kF16:
      return f.template operator()<f16>();
    case kBF16:
      return f.template operator()<bf16>();
    case kI64:
      return f.template operator()<int64_t>();
    case kI32:
      return f.template operator()<int32_t>();
    case kU8:
      return f.template operator()<uint8_t>();
    default:
      detail::fail_dispatch(dtype, where, "a floating (not fp8) or integer dtype");
  }
}

// Everything but fp8.
template <class Where, class F>
decltype(auto) dispatch_numeric_and_bool(DType dtype, const Where& where, F&& f) {
  switch (dtype) {
    case kBool:
      return f.template operator()<bool>();
    case kF8E4M3:
    case kF8E5M2:
      detail::fail_dispatch(dtype, where, "a dtype other than fp8");
    default:
      return dispatch_numeric(dtype, where, static_cast<F&&>(f));
  }
}

// All ten dtypes: for code that moves or converts elements.
template <class Where, class F>
decltype(auto) dispatch_all(DType dtype, const Where& where, F&& f) {
  switch (dtype) {
    case kF8E4M3:
      return f.template operator()<f8e4m3>();
    case kF8E5M2:
      return f.template operator()<f8e5m2>();
    default:
      return dispatch_numeric_and_bool(dtype, where, static_cast<F&&>(f));
  }
}

// By the bytes of an element, 1, 2, 4 or 8: moving elements needs no more of a dtype.
template <class F>
decltype(auto) dispatch_size(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

}  // namespace tessera
