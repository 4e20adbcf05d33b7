// What Python's pickle writes of plain data: None, booleans, numbers, text, lists, tuples, dicts,
// and what torch.save puts among them. A pickle is a program of a stack machine that may call
// anything; this reader runs none of it. It knows the opcodes of protocols 2 to 5 that such data
// needs, and of calls
//
//     collections.OrderedDict, torch.Size, torch._utils._rebuild_tensor_v2, _rebuild_tensor_v3,
//     _rebuild_parameter, _rebuild_parameter_with_state
//
// Everything else that a pickle makes (sets, a Namespace, objects of classes, results of calls) is a
// value of the kind kObject, which has the name of its maker ("os.system") and nothing in it but
// what is set in it by key: it hides nothing that stands beside it. So is a tensor that tessera
// cannot have (int16, quantized, sparse). What is no pickle, or does not fit together, is a
// FormatError, an opcode of protocol 0 an UnsupportedError. Values are given back in one block,
// which owns them: they may be shared and may contain themselves.
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
    kStorage,  // text: the key of its bytes; integer: elements, or bytes where dtype is absent
    kTensor,   // items: its storage, sizes and strides; integer: its offset, in elements
    // text: what it is, for people; items: key, value... that were set in it, as in a dict. Where
    // integer is 1 it is a tensor that cannot be read.
    kObject,
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<PickleValue*> items;
  std::optional<DType> dtype = {};  // of a storage (absent: untyped) or a tensor

  Shape sizes() const;  // of a tensor
  Shape strides() const;
};

struct Pickle {
  std::deque<PickleValue> values;  // what all pointers lead to
  const PickleValue* root = nullptr;
};
// `name`: of the file, for errors. At most 16 MB of structure, which take 100
// times as much memory at worst.
Pickle read_pickle(std::string_view bytes, std::string_view name);
// The same of the first of several pickles, which it takes off `bytes`.
Pickle take_pickle(std::string_view& bytes, std::string_view name);

}  // namespace tessera
