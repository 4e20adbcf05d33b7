#include <tessera/core/state/pickle_reader.h>

#include <bit>
#include <cstring>
#include <map>
#include <unordered_map>

#include <tessera/core/error.h>

namespace tessera {
namespace {

using Kind = PickleValue::Kind;
constexpr size_t kMostBytes = 16 << 20;

// Classes of storages, and the dtypes of torch by name.
const std::map<std::string_view, DType> kStorages = {
    {"torch.DoubleStorage", kF64},    {"torch.FloatStorage", kF32}, {"torch.HalfStorage", kF16},
    {"torch.BFloat16Storage", kBF16}, {"torch.LongStorage", kI64},  {"torch.IntStorage", kI32},
    {"torch.ByteStorage", kU8},       {"torch.BoolStorage", kBool}};
constexpr std::string_view kUntyped = "torch.storage.UntypedStorage";
constexpr std::string_view kRebuild2 = "torch._utils._rebuild_tensor_v2",
                           kRebuild3 = "torch._utils._rebuild_tensor_v3",
                           kParameter = "torch._utils._rebuild_parameter",
                           kOrderedDict = "collections.OrderedDict", kSize = "torch.Size";

bool is_known(std::string_view name) {
  if (name == kRebuild2 || name == kRebuild3 || name == kParameter || name == kOrderedDict ||
      name == kSize || name == kUntyped || kStorages.contains(name)) {
    return true;
  }
  return name.starts_with("torch.") && parse_dtype(name.substr(6)).has_value() &&
         torch_name_of(*parse_dtype(name.substr(6))) == name.substr(6);
}

class PickleMachine {
 public:
  PickleMachine(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  Pickle run() {
    check(bytes_.size() <= kMostBytes, "has ", bytes_.size(), " bytes of structure, and at most ",
          kMostBytes, " are read");
    while (!step()) {
    }
    check(stack_.size() == 1 && marks_.empty(), "ends with ", stack_.size(), " values");
    check(at_ == bytes_.size(), "goes on behind its end");
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
    check(target.kind == kind, "adds items to what takes none");
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
    const std::string whole = std::string(module) + "." + std::string(name);
    if (!is_known(whole)) refuse("asks for ", whole.substr(0, 200));
    push(Kind::kGlobal).text = whole;
  }
  void push_storage() {
    const PickleValue& id = *pop();
    check(id.kind == Kind::kTuple && id.items.size() == 5 && id.items[0]->kind == Kind::kText &&
              id.items[0]->text == "storage" && id.items[1]->kind == Kind::kGlobal &&
              id.items[2]->kind == Kind::kText && id.items[4]->kind == Kind::kInt &&
              id.items[4]->integer >= 0,
          "has a storage that is none");
    const std::string& type = id.items[1]->text;
    const auto known = kStorages.find(type);
    check(known != kStorages.end() || type == kUntyped, "has a storage of ", type);
    PickleValue& storage = push(Kind::kStorage);
    storage.text = id.items[2]->text;
    storage.integer = id.items[4]->integer;
    if (known != kStorages.end()) storage.dtype = known->second;
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
    for (size_t i = 5; i < items.size(); ++i) {
      const bool is_dtype = is_v3 && i == 6;
      if (is_dtype) continue;
      check(items[i]->kind == Kind::kNone ||
                (items[i]->kind == Kind::kDict && items[i]->items.empty()),
            "makes a tensor with hooks or metadata");
    }
    std::optional<DType> dtype = items[0]->dtype;
    if (is_v3) {
      check(items[6]->kind == Kind::kGlobal && items[6]->text.starts_with("torch."),
            "makes a tensor without a dtype");
      dtype = parse_dtype(std::string_view(items[6]->text).substr(6));
    }
    check(dtype.has_value(), "makes a tensor without a dtype");
    check_numbers(*items[2]);
    check_numbers(*items[3]);
    check(items[2]->items.size() == items[3]->items.size(), "has a tensor with ",
          items[2]->items.size(), " sizes and ", items[3]->items.size(), " strides");
    PickleValue& tensor = push(Kind::kTensor);
    tensor.items = {items[0], items[2], items[3]};
    tensor.dtype = dtype;
    tensor.integer = items[1]->integer;
  }
  void call() {
    const PickleValue& arguments = *pop();
    const PickleValue& function = *pop();
    check(function.kind == Kind::kGlobal && arguments.kind == Kind::kTuple,
          "calls what is no name");
    const auto& items = arguments.items;
    if (function.text == kRebuild2 || function.text == kRebuild3) {
      push_tensor(arguments, function.text == kRebuild3);
    } else if (function.text == kParameter) {  // data, requires_grad, hooks
      check(items.size() == 3 && items[0]->kind == Kind::kTensor, "makes a parameter of no tensor");
      stack_.push_back(items[0]);
    } else if (function.text == kSize) {
      check(items.size() == 1 && items[0]->kind == Kind::kTuple, "makes a size of no tuple");
      stack_.push_back(items[0]);
    } else if (function.text == kOrderedDict) {
      PickleValue& dict = push(Kind::kDict);
      if (items.empty()) return;
      check(items.size() == 1 && items[0]->kind == Kind::kList, "makes a dict of no list");
      for (PickleValue* pair : items[0]->items) {
        check((pair->kind == Kind::kTuple || pair->kind == Kind::kList) && pair->items.size() == 2,
              "makes a dict of no pairs");
        dict.items.insert(dict.items.end(), pair->items.begin(), pair->items.end());
      }
    } else {
      refuse("calls ", function.text);
    }
  }
  // The attributes of a dict (state_dict()'s _metadata) say nothing about its items.
  void build() {
    const PickleValue& state = *pop();
    if (top().kind != Kind::kDict) refuse("sets attributes of what is no dict");
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
    if (count > 8) refuse("has an integer of ", static_cast<int>(count), " bytes");
    const std::string_view bytes = take(count);
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
  return PickleMachine(bytes, name).run();
}

}  // namespace tessera
