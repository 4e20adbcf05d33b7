// Reads Python pickles of plain data (None, booleans, numbers, text, lists, tuples, dicts) and what
// torch.save puts among it. A pickle is a program for a stack machine that may call anything; this
// reader runs none of it. It knows the opcodes of protocols 2 to 5 that such data needs, and these
// calls:
//
//     collections.OrderedDict, torch.Size, torch._utils._rebuild_tensor_v2, _rebuild_tensor_v3,
//     _rebuild_parameter, _rebuild_parameter_with_state
//
// Everything else in a pickle (sets, a Namespace, objects of classes, results of calls) becomes a
// value of the kind kObject, which has the name of its maker ("os.system") and only what is set in
// it by key, so that it does not hide its neighbors. Tensors that tessera lacks (int16, quantized,
// sparse) are kObject, too. Data that is not a valid pickle throws FormatError, an opcode of
// protocol 0 UnsupportedError. One block owns all values, because they may be shared and may
// contain themselves.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/core/shape.h>

namespace tessera {

struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kList,
    kTuple,
    kDict,     // items: key, value, key, value...
    kGlobal,   // text: "module.name"
    kStorage,  // text: key of its bytes; integer: elements, or bytes if dtype is absent
    kTensor,   // items: its storage, sizes and strides; integer: its offset, in elements
    // text: a description; items: the key, value... that were set in it, as in a dict. If integer
    // is 1, it is a tensor that cannot be read.
    kObject,
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<PickleValue*> items;
  std::optional<DType> dtype = {};  // set for tensors and typed storages

  Shape sizes() const;  // tensors only, as strides()
  Shape strides() const;
};

struct Pickle {
  std::deque<PickleValue> values;  // owns what all pointers refer to
  const PickleValue* root = nullptr;
};
// `name` is the file's, for errors. Reads at most 16 MB of structure, which take at most 100 times
// as much memory.
Pickle read_pickle(std::string_view bytes, std::string_view name);
// Reads the first of several pickles and removes it from `bytes`.
Pickle take_pickle(std::string_view& bytes, std::string_view name);

}  // namespace tessera
