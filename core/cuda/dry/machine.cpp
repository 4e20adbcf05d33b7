#include <tessera/core/cuda/dry/machine.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <span>
#include <string_view>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::gpu::dry {
namespace {

constexpr std::string_view kMachine = "machine";
using Json = nlohmann::json;

// The dtypes that products have; of these every file has to state the first three.
constexpr std::array<std::string_view, 6> kGemms = {"bf16", "fp8", "f32", "f16", "tf32", "f64"};
constexpr std::array<std::string_view, 2> kAttentions = {"forward", "backward"};
constexpr std::array<std::string_view, 8> kKeys = {"name",         "bandwidth",     "gemm",
                                                   "attention",    "gelu_epilogue", "launch_gap",
                                                   "memory_bytes", "sources"};

class Reader {
 public:
  Reader(const std::string& path, const Json& json) : path_(path), json_(json) {}

  // `name`: of an object within the file, or empty.
  const Json& object(const std::string& name) const {
    const Json* const field = find(json_, name);
    TS_CHECK_AS(FormatError, field != nullptr && field->is_object(), kMachine, "'", path_,
                "': ", name, " must be an object", said(field));
    return *field;
  }
  double number(const Json& of, const std::string& prefix, std::string_view key) const {
    const Json* const field = find(of, key);
    const bool fits = field != nullptr && field->is_number() && field->get<double>() > 0 &&
                      std::isfinite(field->get<double>());
    TS_CHECK_AS(FormatError, fits, kMachine, "'", path_, "': ", prefix, key,
                " must be a positive number in SI units", said(field));
    return field->get<double>();
  }
  double number(std::string_view key) const { return number(json_, "", key); }
  int64_t whole(std::string_view key) const {
    const double value = number(key);
    TS_CHECK_AS(FormatError, value == std::floor(value) && value < 0x1p53, kMachine, "'", path_,
                "': ", key, " must be a whole number; it is ", value);
    return static_cast<int64_t>(value);
  }
  void refuse_others(const Json& of, const std::string& prefix,
                     std::span<const std::string_view> known) const {
    for (const auto& [key, value] : of.items()) {
      std::string names;
      for (const std::string_view name : known)
        names += (names.empty() ? "" : ", ") + std::string(name);
      TS_CHECK_AS(FormatError, std::ranges::find(known, key) != known.end(), kMachine, "'", path_,
                  "': ", prefix, key, " is unknown; there are ", names);
    }
  }

 private:
  static const Json* find(const Json& of, std::string_view key) {
    const auto place = of.find(key);
    return place == of.end() ? nullptr : &*place;
  }
  static std::string said(const Json* field) {
    return field == nullptr ? "; it is missing" : "; it is " + field->dump();
  }
  const std::string& path_;
  const Json& json_;
};

// What a source may be given for.
bool is_rate(const Json& json, const std::string& key) {
  const size_t dot = key.find('.');
  if (dot == std::string::npos) return json.contains(key) && json.at(key).is_number();
  const auto group = json.find(key.substr(0, dot));
  return group != json.end() && group->is_object() && group->contains(key.substr(dot + 1));
}

}  // namespace

Machine Machine::read(const std::string& path) {
  PlainText<std::ifstream> in(path);
  TS_CHECK_AS(IoError, in, kMachine, "cannot read '", path, "'");
  const Json json = Json::parse(in, nullptr, false, true);
  TS_CHECK_AS(FormatError, json.is_object(), kMachine, "'", path, "' is not a JSON object");
  const Reader reader(path, json);
  reader.refuse_others(json, "", kKeys);

  Machine machine;
  const auto name = json.find("name");
  TS_CHECK_AS(FormatError, name != json.end() && name->is_string(), kMachine, "'", path,
              "': name must be a text");
  machine.name = name->get<std::string>();
  machine.bandwidth = reader.number("bandwidth");
  const Json& gemm = reader.object("gemm");
  reader.refuse_others(gemm, "gemm.", kGemms);
  for (const std::string_view dtype : kGemms) {
    const bool must_be = dtype == "bf16" || dtype == "fp8" || dtype == "f32";
    if (must_be || gemm.contains(dtype)) {
      machine.gemm[std::string(dtype)] = reader.number(gemm, "gemm.", dtype);
    }
  }
  const Json& attention = reader.object("attention");
  reader.refuse_others(attention, "attention.", kAttentions);
  machine.attention_forward = reader.number(attention, "attention.", "forward");
  machine.attention_backward = reader.number(attention, "attention.", "backward");
  machine.gelu_epilogue = reader.number("gelu_epilogue");
  machine.launch_gap = reader.number("launch_gap");
  if (json.contains("memory_bytes")) machine.memory_bytes = reader.whole("memory_bytes");
  if (json.contains("sources")) {
    for (const auto& [key, source] : reader.object("sources").items()) {
      TS_CHECK_AS(FormatError, is_rate(json, key), kMachine, "'", path, "': sources.", key,
                  " is the source of nothing in the file");
      TS_CHECK_AS(FormatError, source.is_string(), kMachine, "'", path, "': sources.", key,
                  " must be a text");
      machine.sources[key] = source.get<std::string>();
    }
  }
  return machine;
}

double Machine::gemm_rate(DType dtype, bool tf32) const {
  std::string key(name_of(dtype));
  if (dtype == kF8E4M3 || dtype == kF8E5M2) key = "fp8";
  if (dtype == kF32 && tf32) key = "tf32";
  if (dtype == kF16 && !gemm.contains(key)) key = "bf16";
  const auto rate = gemm.find(key);
  TS_CHECK_AS(UnsupportedError, rate != gemm.end(), "price", name, " has no rate gemm.", key,
              " for a product of ", name_of(dtype));
  return rate->second;
}

}  // namespace tessera::gpu::dry
