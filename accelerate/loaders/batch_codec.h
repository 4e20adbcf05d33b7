// Serializes batches, to send them to another rank.
//
// It supports tensors (on the CPU), numbers, enums, strings and optional, pair, tuple, array,
// vector and map of these; and structs by what their visit_tensors visits, into a
// default-constructed one. Other values inside a struct are an UnsupportedError that names the
// type.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/visit_tensors.h>

namespace tessera::accelerate {

class ByteWriter {
 public:
  void raw(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void number(const T& value) { raw(&value, sizeof value); }
  void tensor(const Tensor& tensor);  // UnsupportedError unless on the CPU
  void text(const std::string& text);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// FormatError if the bytes end too early.
class ByteReader {
 public:
  explicit ByteReader(std::span<const char> bytes) : bytes_(bytes) {}
  void raw(void* data, size_t size);
  template <class T>
  requires std::is_trivially_copyable_v<T> T number() {
    T value;
    raw(&value, sizeof value);
    return value;
  }
  Tensor tensor();
  std::string text();

 private:
  std::span<const char> bytes_;
};

// Converts a batch of a type that only the loader knows to bytes and back.
struct BatchCodec {
  void (*encode)(void* batch, ByteWriter& out);
  // `samples` fills a field `valid`.
  std::shared_ptr<void> (*decode)(ByteReader& in, int64_t samples);
};

// A type that lists its tensors.
template <class T>
concept VisitableStruct = requires(T& value, nn::AnyVisitor visitor) {
  value.visit_tensors(visitor);
};

namespace detail {

[[noreturn]] void cannot_travel(const std::type_info& type);

// Coder: Encoder or Decoder. Each calls `code` for its parts.
template <class T>
struct Travels {
  static void code(T& value, auto& coder) {
    if constexpr (VisitableStruct<T>) {
      value.visit_tensors(coder);
    } else if constexpr (std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>) {
      coder.number(value);
    } else {
      cannot_travel(typeid(T));
    }
  }
};
template <>
struct Travels<Tensor> {
  static void code(Tensor& value, auto& coder) { coder.tensor(value); }
};
template <>
struct Travels<std::string> {
  static void code(std::string& value, auto& coder) { coder.text(value); }
};
template <class T>
struct Travels<std::optional<T>> {
  static void code(std::optional<T>& value, auto& coder) {
    bool present = value.has_value();
    coder.number(present);
    if (present && !value) value.emplace();
    if (present) coder(*value);
  }
};
template <class A, class B>
struct Travels<std::pair<A, B>> {
  static void code(std::pair<A, B>& value, auto& coder) { coder(value.first), coder(value.second); }
};
template <class... T>
struct Travels<std::tuple<T...>> {
  static void code(std::tuple<T...>& value, auto& coder) {
    std::apply([&](auto&... field) { (coder(field), ...); }, value);
  }
};
template <class T, size_t N>
struct Travels<std::array<T, N>> {
  static void code(std::array<T, N>& value, auto& coder) {
    for (T& element : value) coder(element);
  }
};
template <class T>
struct Travels<std::vector<T>> {
  static void code(std::vector<T>& value, auto& coder) {
    size_t size = value.size();
    coder.number(size);
    value.resize(size);
    for (size_t i = 0; i < size; ++i) {
      if constexpr (std::is_same_v<T, bool>) {
        bool element = value[i];
        coder(element);
        value[i] = element;
      } else {
        coder(value[i]);
      }
    }
  }
};
template <class Key, class T>
struct Travels<std::map<Key, T>> {
  static void code(std::map<Key, T>& value, auto& coder) {
    size_t size = value.size();
    coder.number(size);
    coder.entries(value, size);
  }
};

struct Encoder {
  ByteWriter& out;
  template <class T>
  void operator()(T& value) {
    Travels<T>::code(value, *this);
  }
  template <class T>
  void number(T& value) {
    out.number(value);
  }
  void tensor(Tensor& value) { out.tensor(value); }
  void text(std::string& value) { out.text(value); }
  template <class Key, class T>
  void entries(std::map<Key, T>& map, size_t) {
    for (auto& [key, value] : map) {
      Key copy = key;
      (*this)(copy), (*this)(value);
    }
  }
};

struct Decoder {
  ByteReader& in;
  template <class T>
  void operator()(T& value) {
    Travels<T>::code(value, *this);
  }
  template <class T>
  void number(T& value) {
    value = in.number<T>();
  }
  void tensor(Tensor& value) { value = in.tensor(); }
  void text(std::string& value) { value = in.text(); }
  template <class Key, class T>
  void entries(std::map<Key, T>& map, size_t size) {
    map.clear();
    for (size_t i = 0; i < size; ++i) {
      Key key{};
      (*this)(key), (*this)(map[key]);
    }
  }
};

}  // namespace detail

// Null for a batch that cannot be constructed (it has no default constructor).
template <class Batch>
const BatchCodec* codec_of() {
  if constexpr (std::is_default_constructible_v<Batch>) {
    static constexpr BatchCodec kCodec{
        [](void* batch, ByteWriter& out) {
          detail::Encoder encoder{out};
          encoder(*static_cast<Batch*>(batch));
        },
        [](ByteReader& in, int64_t samples) -> std::shared_ptr<void> {
          auto batch = std::make_shared<Batch>();
          detail::Decoder decoder{in};
          decoder(*batch);
          data::detail::set_valid(*batch, samples);
          return batch;
        }};
    return &kCodec;
  } else {
    return nullptr;
  }
}

}  // namespace tessera::accelerate
