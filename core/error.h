// Errors that explain themselves: `op: requirement; what was given; remedy`.
//
// Every failure of the library is a tessera::Error or a class derived from it. The library never
// exits or aborts, and destructors never throw. A module adds its dotted name as an exception
// passes through it (add_context).
#pragma once

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include <tessera/core/message.h>

namespace tessera {

class Error : public std::exception {
 public:
  explicit Error(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  // Puts `where: ` before the message, to name modules, files and ranks.
  void add_context(std::string_view where) { message_ = std::string(where) + ": " + message_; }

 private:
  std::string message_;
};

#define TS_ERROR_CLASS(Name)  \
  class Name : public Error { \
   public:                    \
    using Error::Error;       \
  }
TS_ERROR_CLASS(ShapeError);        // shapes, dimensions, strides that do not fit
TS_ERROR_CLASS(DTypeError);        // dtypes that do not fit
TS_ERROR_CLASS(DeviceError);       // tensors on the wrong device, a missing device
TS_ERROR_CLASS(IndexError);        // an index outside its range
TS_ERROR_CLASS(ValueError);        // an argument outside its domain
TS_ERROR_CLASS(AutogradError);     // misuse of autograd: in-place on a saved tensor, freed graph
TS_ERROR_CLASS(UnsupportedError);  // valid request that this build or op does not support
TS_ERROR_CLASS(OutOfMemory);
TS_ERROR_CLASS(CudaError);
TS_ERROR_CLASS(DistributedError);
TS_ERROR_CLASS(ConfigError);
TS_ERROR_CLASS(FormatError);  // a file whose bytes are not what its format says
TS_ERROR_CLASS(IoError);      // the operating system refused: open, read, write, a thread
#undef TS_ERROR_CLASS

namespace detail {

// `where` of a check: a name, or anything with a `.name` (an Op record).
inline std::string_view where_name(std::string_view name) { return name; }
template <class Record>
requires requires(const Record& record) { std::string_view(record.name); }
std::string_view where_name(const Record& record) { return record.name; }

template <class ErrorClass>
[[noreturn, gnu::cold, gnu::noinline]] void fail(std::string_view where,
                                                 std::initializer_list<MessagePart> parts) {
  throw ErrorClass(std::string(where) + ": " + message_of(parts));
}

}  // namespace detail
}  // namespace tessera

// TS_CHECK_AS(ShapeError, a == b, "matmul", "inner dimensions differ: ", a, " and ", b);
#define TS_CHECK_AS(ErrorClass, condition, where, ...) \
  do {                                                 \
    if (!(condition)) [[unlikely]]                     \
      TS_THROW(ErrorClass, where, __VA_ARGS__);        \
  } while (false)

#define TS_CHECK(condition, where, ...) TS_CHECK_AS(ValueError, condition, where, __VA_ARGS__)
#define TS_CHECK_SHAPE(condition, where, ...) TS_CHECK_AS(ShapeError, condition, where, __VA_ARGS__)
#define TS_CHECK_DTYPE(condition, where, ...) TS_CHECK_AS(DTypeError, condition, where, __VA_ARGS__)
#define TS_CHECK_DEVICE(condition, where, ...) \
  TS_CHECK_AS(DeviceError, condition, where, __VA_ARGS__)
#define TS_CHECK_INDEX(condition, where, ...) TS_CHECK_AS(IndexError, condition, where, __VA_ARGS__)
#define TS_THROW(ErrorClass, where, ...)                                               \
  ::tessera::detail::fail<::tessera::ErrorClass>(::tessera::detail::where_name(where), \
                                                 {__VA_ARGS__})
