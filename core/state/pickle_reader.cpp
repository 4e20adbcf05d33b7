#include <tessera/core/state/pickle_reader.h>

#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include <tessera/core/error.h>

namespace tessera {
namespace {

using Kind = PickleValue::Kind;
constexpr size_t kMostBytes = 16 << 20;

// Classes of storages, and the dtypes of torch by name.
constexpr std::pair<std::string_view, DType> kStorages[] = {
    {"torch.DoubleStorage", kF64},    {"torch.FloatStorage", kF32}, {"torch.HalfStorage", kF16},
    {"torch.BFloat16Storage", kBF16}, {"torch.LongStorage", kI64},  {"torch.IntStorage", kI32},
    {"torch.ByteStorage", kU8},       {"torch.BoolStorage", kBool}};
std::optional<DType> dtype_of_storage(std::string_view name) {
  for (const auto& [storage, dtype] : kStorages) {
    if (storage == name) return dtype;
  }
  return {};
}
constexpr std::string_view kUntyped = "torch.storage.UntypedStorage";
constexpr std::string_view kRebuild2 = "torch._utils._rebuild_tensor_v2",
                           kRebuild3 = "torch._utils._rebuild_tensor_v3",
                           kParameter = "torch._utils._rebuild_parameter",
                           kStateful = "torch._utils._rebuild_parameter_with_state",
                           kTyped = "torch._tensor._rebuild_from_type_v2",
                           kOrderedDict = "collections.OrderedDict",
                           kDefaultDict = "collections.defaultdict", kSize = "torch.Size";
constexpr std::string_view kTagged = "torch.jit._pickle.";  // a list or dict, and its type
constexpr std::string_view kTensorMakers = "torch._utils._rebuild_";  // sparse, quantised...

class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  // The first pickle of the bytes; `end` becomes where it ends.
  Pickle run(size_t& end) {
    while (!step()) {
    }
    check(stack_.size() == 1 && marks_.empty(), "ends with ", stack_.size(), " values");
    end = at_;
    pickle_.root = stack_[0];
    return std::move(pickle_);
  }

 private:
  template <class... Parts>
  void check(bool holds, const Parts&... parts) const {
    TS_CHECK_AS(FormatError, holds, "pickle", "'", name_, "' byte ", at_, ": ", parts...,
                "; the file is damaged or no file of torch.save: get it again");
  }
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    TS_THROW(UnsupportedError, "pickle", "'", name_, "' byte ", at_, ": ", parts...,
             ", and only tensors, dicts, lists, tuples, numbers and texts are read; save the "
             "state_dict() alone");
  }

  // ---- Bytes
  std::string_view take(uint64_t count) {
    check(count <= bytes_.size() - at_, "ends within a value of ", count, " bytes");
    check(count <= kMostBytes && at_ <= kMostBytes - count, "has more than ", kMostBytes,
          " bytes of structure, which are not read");
    const std::string_view part = bytes_.substr(at_, count);
    at_ += count;
    return part;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    check(end != bytes_.npos, "ends within a name");
    const std::string_view part = take(end - at_);
    ++at_;
    return part;
  }

  // ---- Values
  PickleValue& make(Kind kind) {
    pickle_.values.emplace_back().kind = kind;
    return pickle_.values.back();
  }
  PickleValue& push(Kind kind) {
    PickleValue& value = make(kind);
    stack_.push_back(&value);
    return value;
  }
  void push_int(int64_t value) { push(Kind::kInt).integer = value; }
  void push_bool(bool value) { push(Kind::kBool).integer = value; }
  void push_text(std::string_view text) { push(Kind::kText).text = text; }
  void push_object(std::string_view what) { push(Kind::kObject).text = what.substr(0, 200); }
  void push_refused_tensor(std::string_view what) {
    push_object(what);
    top().integer = 1;
  }
  PickleValue* pop() {
    check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes a value that is not there");
    PickleValue* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue& top() {
    check(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes a value that is not there");
    return *stack_.back();
  }
  // Those above the last mark.
  std::vector<PickleValue*> pop_mark() {
    check(!marks_.empty(), "takes a mark that is not there");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickleValue*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t count) {
    std::vector<PickleValue*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(Kind::kTuple).items = std::move(items);
  }
  void extend(Kind kind, const std::vector<PickleValue*>& items) {
    PickleValue& target = top();
    if (target.kind == Kind::kObject && kind == Kind::kList) return;
    check(target.kind == kind || target.kind == Kind::kObject, "adds items to what takes none");
    check(kind != Kind::kDict || items.size() % 2 == 0, "adds a key without a value");
    target.items.insert(target.items.end(), items.begin(), items.end());
  }
  void remember(uint64_t key) { memo_[key] = &top(); }
  void recall(uint64_t key) {
    const auto found = memo_.find(key);
    check(found != memo_.end(), "recalls the value ", key, ", which is not there");
    stack_.push_back(found->second);
  }

  // ---- Names and calls
  void push_global(std::string_view module, std::string_view name) {
    push(Kind::kGlobal).text = std::string(module) + "." + std::string(name);
  }
  // ("storage", class, key, device, elements[, what part of another storage it is]).
  void push_storage() {
    const PickleValue& id = *pop();
    if (id.kind == Kind::kTuple && id.items.size() == 4 && id.items[0]->text == "module") {
      stack_.push_back(id.items[1]);  // a class with its source: torch before 1.6
      return;
    }
    check(id.kind == Kind::kTuple && (id.items.size() == 5 || id.items.size() == 6) &&
              id.items[0]->kind == Kind::kText && id.items[0]->text == "storage" &&
              id.items[1]->kind == Kind::kGlobal && id.items[2]->kind == Kind::kText &&
              id.items[4]->kind == Kind::kInt && id.items[4]->integer >= 0,
          "has a storage that is none");
    const std::string& type = id.items[1]->text;
    const std::optional<DType> known = dtype_of_storage(type);
    check(type.starts_with("torch.") && type.ends_with("Storage"), "has a storage of ", type);
    const bool is_part = id.items.size() == 6 && id.items[5]->kind != Kind::kNone;
    PickleValue& storage = push(Kind::kStorage);
    storage.text = id.items[2]->text;
    storage.integer = id.items[4]->integer;
    if (known) storage.dtype = *known;
    // What tensors of it are called where they cannot be read.
    if (is_part) storage.items = {&make(Kind::kText)}, storage.items[0]->text = "part of a storage";
    if (!known && type != kUntyped) storage.items = {id.items[1]};
  }
  void check_numbers(const PickleValue& list) const {
    check(list.kind == Kind::kTuple && list.items.size() <= static_cast<size_t>(kMaxDims),
          "has a tensor whose sizes are no tuple of at most ", kMaxDims, " numbers");
    for (const PickleValue* item : list.items) {
      check(item->kind == Kind::kInt && item->integer >= 0, "has a size that is no number");
    }
  }
  // v2: storage, offset, sizes, strides, requires_grad, hooks, [metadata]; v3: the dtype before
  // that.
  void push_tensor(const PickleValue& arguments, bool is_v3) {
    const auto& items = arguments.items;
    const size_t least = is_v3 ? 7 : 6;
    check(items.size() == least || items.size() == least + 1, "makes a tensor of ", items.size(),
          " arguments");
    check(
        items[0]->kind == Kind::kStorage && items[1]->kind == Kind::kInt && items[1]->integer >= 0,
        "makes a tensor of no storage");
    std::string_view foreign;  // what tessera does not have about it
    for (size_t i = 5; i < items.size(); ++i) {
      const bool is_dtype = is_v3 && i == 6;
      const bool is_empty = items[i]->kind == Kind::kNone ||
                            (items[i]->kind == Kind::kDict && items[i]->items.empty());
      if (is_dtype || is_empty) continue;
      check(i != 5, "makes a tensor with hooks");
      foreign = "elements that are read as their conjugates or negatives";
    }
    std::optional<DType> dtype = items[0]->dtype;
    if (!items[0]->items.empty()) foreign = items[0]->items[0]->text;
    if (is_v3) {
      check(items[6]->kind == Kind::kGlobal && items[6]->text.starts_with("torch."),
            "makes a tensor without a dtype");
      const std::string_view named = std::string_view(items[6]->text).substr(6);
      dtype = parse_dtype(named);
      if (!dtype || torch_name_of(*dtype) != named) foreign = items[6]->text;
    }
    check(dtype.has_value() || !foreign.empty(), "makes a tensor without a dtype");
    check_numbers(*items[2]);
    check_numbers(*items[3]);
    check(items[2]->items.size() == items[3]->items.size(), "has a tensor with ",
          items[2]->items.size(), " sizes and ", items[3]->items.size(), " strides");
    if (!foreign.empty()) return push_refused_tensor(foreign);
    PickleValue& tensor = push(Kind::kTensor);
    tensor.items = {items[0], items[2], items[3]};
    tensor.dtype = dtype;
    tensor.integer = items[1]->integer;
  }
  // A tensor that a function gives back with attributes or as a class: without them.
  void push_data(PickleValue& data) {
    const bool is_tensor =
        data.kind == Kind::kTensor || (data.kind == Kind::kObject && data.integer == 1);
    check(is_tensor, "makes a parameter of no tensor");
    stack_.push_back(&data);
  }
  void call() {
    const PickleValue& arguments = *pop();
    const PickleValue& function = *pop();
    if (function.kind == Kind::kObject) return push_object(function.text);
    check(function.kind == Kind::kGlobal && arguments.kind == Kind::kTuple,
          "calls what is no name");
    make_by(function.text, arguments);
  }
  void make_by(const std::string& function, const PickleValue& arguments) {
    const auto& items = arguments.items;
    if (function == kRebuild2 || function == kRebuild3) {
      push_tensor(arguments, function == kRebuild3);
    } else if (function == kParameter || function == kStateful) {  // data, requires_grad, hooks
      check(items.size() == (function == kParameter ? 3 : 4), "makes a parameter of ", items.size(),
            " arguments");
      push_data(*items[0]);
    } else if (function == kTyped) {  // function, class, arguments, attributes
      check(items.size() == 4 && items[0]->kind == Kind::kGlobal &&
                items[2]->kind == Kind::kTuple && items[0]->text != kTyped,
            "makes a tensor of no function");
      make_by(items[0]->text, *items[2]);
    } else if (function.starts_with(kTagged) && !items.empty()) {  // libtorch's pickle_save
      stack_.push_back(items[0]);
    } else if (function == kSize) {
      check(items.size() == 1 && items[0]->kind == Kind::kTuple, "makes a size of no tuple");
      stack_.push_back(items[0]);
    } else if (function == kDefaultDict) {
      push(Kind::kDict);
    } else if (function == kOrderedDict) {
      PickleValue& dict = push(Kind::kDict);
      if (items.empty()) return;
      check(items.size() == 1 && items[0]->kind == Kind::kList, "makes a dict of no list");
      for (PickleValue* pair : items[0]->items) {
        check((pair->kind == Kind::kTuple || pair->kind == Kind::kList) && pair->items.size() == 2,
              "makes a dict of no pairs");
        dict.items.insert(dict.items.end(), pair->items.begin(), pair->items.end());
      }
    } else if (function.starts_with(kTensorMakers)) {
      push_refused_tensor(function);
    } else {
      push_object(function);
    }
  }
  // An object of a class that a global names, with what is on the stack for it taken away.
  void push_instance(size_t arguments) {
    for (size_t i = 0; i < arguments; ++i) pop();
    const PickleValue& type = *pop();
    if (type.kind == Kind::kObject) return push_object(type.text);
    check(type.kind == Kind::kGlobal, "makes an object of no class");
    push_object(type.text);
  }
  // The attributes of a dict (state_dict()'s _metadata) say nothing about its items. Those of a
  // module of TorchScript, which libtorch's archives are, are its parameters and modules.
  void build() {
    const PickleValue& state = *pop();
    PickleValue& target = top();
    if (target.kind == Kind::kObject || target.kind == Kind::kTensor) {
      const bool is_script = target.text.starts_with("__torch__.");
      if (is_script && state.kind == Kind::kDict && target.items.empty())
        target.items = state.items;
      return;
    }
    if (target.kind != Kind::kDict) refuse("sets attributes of what is no dict");
    check(state.kind == Kind::kDict, "has attributes that are no dict");
  }

  // One opcode; true at the end.
  bool step() {
    const auto opcode = static_cast<unsigned char>(take(1)[0]);
    switch (opcode) {
      case 0x80:  // PROTO
        check(number<uint8_t>() <= 5, "is of a protocol after 5");
        break;
      case 0x95:
        number<uint64_t>();
        break;  // FRAME
      case '.':
        return true;
      case '(':
        marks_.push_back(stack_.size());
        break;
      case '0':
        pop();
        break;
      case '1':
        pop_mark();
        break;
      case 'N':
        push(Kind::kNone);
        break;
      case 0x88:
        push_bool(true);
        break;
      case 0x89:
        push_bool(false);
        break;
      case 'J':
        push_int(number<int32_t>());
        break;
      case 'K':
        push_int(number<uint8_t>());
        break;
      case 'M':
        push_int(number<uint16_t>());
        break;
      case 0x8a:
        push_long();
        break;
      case 'G':
        push_double();
        break;
      case 'X':
        push_text(take(number<uint32_t>()));
        break;
      case 0x8c:
        push_text(take(number<uint8_t>()));
        break;
      case 0x8d:
        push_text(take(number<uint64_t>()));
        break;
      case 'U':  // texts of Python 2
        push_text(take(number<uint8_t>()));
        break;
      case 'T':
        push_text(take(number<uint32_t>()));
        break;
      case 'C':
        take(number<uint8_t>());
        push_object("bytes");
        break;
      case 'B':
        take(number<uint32_t>());
        push_object("bytes");
        break;
      case 0x8e:
      case 0x96:
        take(number<uint64_t>());
        push_object("bytes");
        break;
      case 0x8b:  // LONG4
        take(number<uint32_t>());
        push_object("a large integer");
        break;
      case '2':  // DUP
        stack_.push_back(&top());
        break;
      case 0x8f:
        push_object("set");
        break;
      case 0x90:  // ADDITEMS
        pop_mark();
        top();
        break;
      case 0x91:
        pop_mark();
        push_object("frozenset");
        break;
      case 0x81:  // NEWOBJ: class, arguments
        push_instance(1);
        break;
      case 0x92:  // NEWOBJ_EX
        push_instance(2);
        break;
      case ')':
        push(Kind::kTuple);
        break;
      case 0x85:
        push_tuple(1);
        break;
      case 0x86:
        push_tuple(2);
        break;
      case 0x87:
        push_tuple(3);
        break;
      case 't':
        push_of(Kind::kTuple);
        break;
      case ']':
        push(Kind::kList);
        break;
      case 'l':
        push_of(Kind::kList);
        break;
      case 'a': {
        PickleValue* item = pop();
        extend(Kind::kList, {item});
        break;
      }
      case 'e': {
        const auto items = pop_mark();
        extend(Kind::kList, items);
        break;
      }
      case '}':
        push(Kind::kDict);
        break;
      case 'd':
        push_of(Kind::kDict);
        check(top().items.size() % 2 == 0, "has a key without a value");
        break;
      case 's': {
        PickleValue* value = pop();
        PickleValue* key = pop();
        extend(Kind::kDict, {key, value});
        break;
      }
      case 'u': {
        const auto items = pop_mark();
        extend(Kind::kDict, items);
        break;
      }
      case 'q':
        remember(number<uint8_t>());
        break;
      case 'r':
        remember(number<uint32_t>());
        break;
      case 0x94:
        remember(memo_.size());
        break;
      case 'h':
        recall(number<uint8_t>());
        break;
      case 'j':
        recall(number<uint32_t>());
        break;
      case 'c': {
        const std::string_view module = line();
        push_global(module, line());
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const PickleValue& name = *pop();
        const PickleValue& module = *pop();
        check(name.kind == Kind::kText && module.kind == Kind::kText, "has a name that is no text");
        push_global(module.text, name.text);
        break;
      }
      case 'Q':
        push_storage();
        break;
      case 'R':
        call();
        break;
      case 'b':
        build();
        break;
      default:
        refuse("uses opcode ", static_cast<int>(opcode), ", which makes other objects");
    }
    return false;
  }
  void push_of(Kind kind) {
    auto items = pop_mark();
    push(kind).items = std::move(items);
  }
  void push_long() {
    const uint8_t count = number<uint8_t>();
    const std::string_view bytes = take(count);
    if (count > 8) return push_object("a large integer");
    uint64_t value = count > 0 && (bytes.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
    push_int(static_cast<int64_t>(value));
  }
  void push_double() {  // big-endian, unlike all else
    uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    push(Kind::kFloat).number = std::bit_cast<double>(bits);
  }

  std::string_view bytes_, name_;
  size_t at_ = 0;
  Pickle pickle_;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

Shape numbers_of(const PickleValue& tuple) {
  std::vector<int64_t> values;
  for (const PickleValue* item : tuple.items) values.push_back(item->integer);
  return Shape(values);
}

}  // namespace

Shape PickleValue::sizes() const { return numbers_of(*items.at(1)); }
Shape PickleValue::strides() const { return numbers_of(*items.at(2)); }

Pickle read_pickle(std::string_view bytes, std::string_view name) {
  Pickle pickle = take_pickle(bytes, name);
  TS_CHECK_AS(
      FormatError, bytes.empty(), "pickle", "'", name,
      "' goes on behind its end; the file is damaged or no file of torch.save: get it again");
  return pickle;
}

Pickle take_pickle(std::string_view& bytes, std::string_view name) {
  size_t end = 0;
  Pickle pickle = PickleMachine(bytes, name).run(end);
  bytes.remove_prefix(end);
  return pickle;
}

}  // namespace tessera
