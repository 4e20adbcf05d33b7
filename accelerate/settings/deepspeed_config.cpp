#include <tessera/accelerate/settings/deepspeed_config.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include <tessera/accelerate/settings/deepspeed_keys.h>
#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::accelerate {
namespace {

// In the order of the file: reports follow it.
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kReader = "DeepSpeed configuration";

std::string number_text_of(double value) {
  PlainText<std::ostringstream> text;
  text.precision(17);
  text << value;
  return text.str();
}

std::string_view kind_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::kBool:
      return "true or false";
    case ValueKind::kWhole:
      return "a whole number";
    case ValueKind::kNumber:
      return "a number";
    case ValueKind::kText:
      return "a text";
    case ValueKind::kSwitch:
    case ValueKind::kSection:
      return "an object";
    case ValueKind::kAny:
      break;
  }
  return "a value";
}

bool is_of(ValueKind kind, const OrderedJson& value) {
  switch (kind) {
    case ValueKind::kBool:
      return value.is_boolean();
    case ValueKind::kWhole:
      return value.is_number() && std::floor(value.get<double>()) == value.get<double>() &&
             std::abs(value.get<double>()) < 1e18;
    case ValueKind::kNumber:
      return value.is_number();
    case ValueKind::kText:
      return value.is_string();
    case ValueKind::kSwitch:
    case ValueKind::kSection:
      return value.is_object();
    case ValueKind::kAny:
      break;
  }
  return true;
}

bool is_auto(const OrderedJson& value) {
  return value.is_string() && value.get_ref<const std::string&>() == "auto";
}

// ---- The reader --------------------------------------------------------------------------------

class DeepSpeedReader {
 public:
  explicit DeepSpeedReader(std::string name) { config_.name = std::move(name); }

  DeepSpeedConfig run(const std::string& text) {
    const OrderedJson file = parse(text);
    find_unknown("", file);
    TS_CHECK_AS(ConfigError, unknown_.empty(), kReader, config_.name,
                " has keys that are unknown: ", unknown_,
                "; docs/deepspeed.md lists all keys; correct or remove them");
    read_object("", file);
    TS_CHECK_AS(UnsupportedError, refused_.empty(), kReader, config_.name,
                " asks for what cannot be served: ", refused_);
    check();
    return std::move(config_);
  }

 private:
  OrderedJson parse(const std::string& text) {
    std::vector<std::set<std::string>> seen;  // keys by depth
    std::vector<std::string> path;
    std::string repeated;
    const auto watch = [&](int depth, OrderedJson::parse_event_t event, OrderedJson& parsed) {
      // Messages show values, and what shows a value calls itself for each level of it.
      TS_CHECK_AS(FormatError, depth <= 16, kReader, config_.name, " has values ", depth,
                  " levels deep; DeepSpeed's are a few");
      const auto level = static_cast<size_t>(depth);
      if (event == OrderedJson::parse_event_t::object_start) {
        seen.resize(level + 1);
        seen.emplace_back();
      } else if (event == OrderedJson::parse_event_t::key) {
        const auto key = parsed.get<std::string>();
        path.resize(level);
        path.back() = key;
        if (level < seen.size() && !seen[level].insert(key).second && repeated.empty()) {
          for (const std::string& step : path) {
            if (!step.empty()) repeated += (repeated.empty() ? "" : ".") + step;
          }
        }
      }
      return true;
    };
    OrderedJson file;
    try {
      file = OrderedJson::parse(text, watch);
    } catch (const nlohmann::json::exception& error) {
      TS_THROW(FormatError, kReader, config_.name, " is no JSON: ", error.what());
    }
    TS_CHECK_AS(FormatError, file.is_object(), kReader, config_.name,
                " has to hold one JSON object");
    TS_CHECK_AS(FormatError, repeated.empty(), kReader, config_.name, " has the key \"", repeated,
                "\" twice");
    // DeepSpeed's first pages say true for stage 1.
    if (const auto zero = file.find("zero_optimization"); zero != file.end() && zero->is_boolean())
      *zero = OrderedJson{{"stage", zero->get<bool>() ? 1 : 0}};
    return file;
  }

  void find_unknown(const std::string& prefix, const OrderedJson& object) {
    for (const auto& [name, value] : object.items()) {
      const std::string path = prefix + name;
      const DeepSpeedKey* key = find_key(path);
      if (key == nullptr) {
        const std::string near = nearest_path(path);
        unknown_ += (unknown_.empty() ? "\"" : ", \"") + path + "\"" +
                    (near.empty() ? "" : " (did you mean \"" + near + "\"?)");
      } else if (key->kind == ValueKind::kSection && value.is_object()) {
        find_unknown(std::string(key->path) + ".", value);
      }
    }
  }

  void line(const std::string& path, const OrderedJson& value, ImportOutcome outcome,
            std::string note) {
    config_.lines.push_back({path, value.dump(), outcome, std::move(note)});
  }
  void refuse(const std::string& path, const OrderedJson& value, std::string_view why) {
    refused_ +=
        (refused_.empty() ? "" : "; ") + path + ": " + value.dump() + " (" + std::string(why) + ")";
    line(path, value, ImportOutcome::kRefused, std::string(why));
  }

  // Firmly, unless it is the default's own text: then there is still a word on it.
  void say(const std::string& path, const OrderedJson& value, std::string_view setting,
           const std::string& text_of_setting) {
    const Setting& row = *find_setting(setting);
    Settings scratch;  // refuses here what cannot be
    assign(row, scratch, text_of_setting, {Source::kFile, config_.name + ", " + path});
    config_.says.push_back({std::string(setting), text_of_setting, path});
    line(path, value, ImportOutcome::kMapped, std::string(setting) + " = " + text(row, scratch));
  }
  void imply(const std::string& path, std::string_view setting,
             const std::string& text_of_setting) {
    config_.implies.push_back({std::string(setting), text_of_setting, path});
  }

  void read_object(const std::string& prefix, const OrderedJson& object) {
    for (const auto& [name, value] : object.items()) {
      const DeepSpeedKey& key = *find_key(prefix + name);
      read_key(std::string(key.path), key, value);
    }
  }

  void read_key(const std::string& path, const DeepSpeedKey& key, const OrderedJson& value) {
    if (is_auto(value) && key.kind != ValueKind::kAny) {
      TS_CHECK_AS(ConfigError, key.automatic, kReader, config_.name, ": ", path,
                  " is \"auto\", which nobody fills in; write ", kind_name(key.kind),
                  ", or leave it out");
      return read_auto(path, key);
    }
    const bool absent = value.is_null() && key.kind != ValueKind::kAny;
    if (absent) return line(path, value, ImportOutcome::kUnset, "as if it were not there");
    TS_CHECK_AS(ConfigError, is_of(key.kind, value), kReader, config_.name, ": ", path,
                " has to be ", kind_name(key.kind), key.automatic ? " or \"auto\"" : "", "; got ",
                value.dump());
    if (key.kind == ValueKind::kSection) {
      read_object(path + ".", value);
      if (path == "optimizer") config_.optimizer = section(path, value);
      if (path == "scheduler") config_.scheduler = section(path, value);
    } else if (key.kind == ValueKind::kSwitch) {
      const auto enabled = value.find("enabled");
      const bool on =
          value.empty() ? false : enabled == value.end() || *enabled != OrderedJson(false);
      on ? refuse(path, value, key.refused)
         : line(path, value, ImportOutcome::kUnset, "not enabled");
    } else if (!key.setting.empty()) {
      say(path, value, key.setting, value_text(key.kind, value));
    } else if (!key.note.empty()) {
      line(path, value, ImportOutcome::kNoCounterpart, std::string(key.note));
    } else if (!key.refused.empty()) {
      is_harmless(key.harmless, value)
          ? line(path, value, ImportOutcome::kUnset, "what is the case anyway")
          : refuse(path, value, key.refused);
    } else {
      read_special(path, value);
    }
  }

  static bool is_harmless(std::string_view list, const OrderedJson& value) {
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find('|', begin), list.size());
      if (OrderedJson::parse(list.substr(begin, end - begin)) == value) return true;
      begin = end + 1;
    }
    return false;
  }

  static std::string value_text(ValueKind kind, const OrderedJson& value) {
    if (kind == ValueKind::kWhole) return std::to_string(static_cast<int64_t>(value.get<double>()));
    if (kind == ValueKind::kNumber) return number_text_of(value.get<double>());
    return value.is_string() ? value.get<std::string>() : value.dump();
  }

  int64_t positive(const std::string& path, const OrderedJson& value) const {
    const double number = value.get<double>();
    TS_CHECK_AS(ConfigError, number >= 1 && number <= 1e9, kReader, config_.name, ": ", path,
                " has to be a whole number from 1 to 1e9; got ", value.dump());
    return static_cast<int64_t>(number);
  }

  void read_auto(const std::string& path, const DeepSpeedKey& key) {
    const OrderedJson value = "auto";
    if (path == "gradient_clipping") {
      imply(path, "gradient_clipping", "1");
      line(path, value, ImportOutcome::kMapped,
           "gradient_clipping as it is set elsewhere, else 1, as Accelerate fills it in");
    } else if (path == "zero_optimization.stage") {
      imply(path, "zero_stage", "2");
      line(path, value, ImportOutcome::kMapped,
           "zero_stage or sharding as they are set elsewhere, else 2, as Accelerate fills it in");
    } else {
      line(path, value, ImportOutcome::kUnset,
           key.note.empty() ? "as it is set elsewhere" : std::string(key.note));
    }
  }

  void read_special(const std::string& path, const OrderedJson& value) {
    if (path == "train_batch_size") {
      config_.train_batch_size = positive(path, value);
      line(path, value, ImportOutcome::kMapped, "what micro-batches, steps and ranks multiply to");
    } else if (path == "train_micro_batch_size_per_gpu") {
      config_.micro_batch_size = positive(path, value);
      line(path, value, ImportOutcome::kMapped, "what the batch_size of a loader has to be");
    } else if (path == "gradient_accumulation_steps") {
      config_.accumulation_steps = positive(path, value);
      say(path, value, "gradient_accumulation_steps", std::to_string(*config_.accumulation_steps));
    } else if (path == "gradient_clipping") {
      say(path, value, "gradient_clipping", number_text_of(value.get<double>()));
    } else if (path == "communication_data_type") {
      read_communication(path, value);
    } else if (path == "zero_optimization.stage") {
      say(path, value, "zero_stage", value_text(ValueKind::kWhole, value));
    } else if (path == "zero_optimization.reduce_bucket_size") {
      // Elements, of gradients that are f32.
      const double mebibytes = static_cast<double>(positive(path, value)) * 4 / 1048576;
      say(path, value, "ddp_bucket_cap_mb", number_text_of(std::clamp(mebibytes, 1e-4, 1e6)));
      config_.lines.back().note += "; of stage 3 the units decide";
    } else if (path == "zero_optimization.mics_shard_size") {
      if (value.get<double>() <= 0) {
        line(path, value, ImportOutcome::kUnset, "what is the case anyway");
      } else {
        say(path, value, "dp_shard_size", value_text(ValueKind::kWhole, value));
      }
    } else if (path.ends_with(".device")) {
      read_offload(path, value);
    } else if (path == "optimizer.type" || path == "scheduler.type") {
      read_type(path, value);
    } else if (path == "optimizer.params") {
      line(path, value, ImportOutcome::kMapped, "accelerator.optimizer_from_config()");
    } else if (path == "scheduler.params") {
      line(path, value, ImportOutcome::kMapped, "accelerator.schedule_from_config()");
    } else {
      read_precision(path, value);
    }
  }

  void read_type(const std::string& path, const OrderedJson& value) {
    const std::string section = path.substr(0, path.find('.'));
    const std::string wanted = lower(value.get<std::string>());
    std::string all, near;
    size_t least = wanted.size() / 3 + 2;
    for (const DeepSpeedType& type : deepspeed_types(section)) {
      if (type.name == wanted) {
        return type.refused.empty()
                   ? line(path, value, ImportOutcome::kMapped,
                          section == "optimizer" ? "accelerator.optimizer_from_config()"
                                                 : "accelerator.schedule_from_config()")
                   : refuse(path, value, type.refused);
      }
      if (!type.refused.empty()) continue;
      all += (all.empty() ? "" : ", ") + std::string(type.name);
      const size_t distance = edit_distance(wanted, type.name);
      if (distance < least) least = distance, near = type.name;
    }
    TS_THROW(ConfigError, kReader, config_.name, ": ", path, " is ", value.dump(),
             ", which is unknown", near.empty() ? "" : "; did you mean \"" + near + "\"?",
             "; there are ", all, ", in any case");
  }

  void read_communication(const std::string& path, const OrderedJson& value) {
    const std::string dtype = lower(value.get<std::string>());
    if (dtype == "fp32" || dtype == "float32") {
      line(path, value, ImportOutcome::kUnset, "what is the case anyway");
    } else if (dtype == "fp16" || dtype == "bf16" || dtype == "bfp16") {
      say(path, value, "ddp_comm_hook", dtype == "fp16" ? "fp16" : "bf16");
    } else {
      TS_THROW(ConfigError, kReader, config_.name, ": ", path,
               " has to be fp32, fp16 or bf16; got ", value.dump());
    }
  }

  // Where parts lie.
  void read_offload(const std::string& path, const OrderedJson& value) {
    const auto device = value.get<std::string>();
    TS_CHECK_AS(ConfigError, device == "none" || device == "cpu" || device == "nvme", kReader,
                config_.name, ": ", path, " has to be none, cpu or nvme; got ", value.dump());
    if (device == "none")
      return line(path, value, ImportOutcome::kUnset, "what is the case anyway");
    if (device == "nvme") {
      return refuse(path, value, "nothing is kept on drives; say cpu, or none");
    }
    const bool optimizer = path.find("offload_optimizer") != std::string::npos;
    say(path, value, optimizer ? "offload_optimizer" : "offload_parameters", "true");
  }

  void read_precision(const std::string& path, const OrderedJson& value) {
    if (path == "fp16.enabled" || path == "bf16.enabled") {
      const bool on = value.get<bool>();
      (path == "fp16.enabled" ? config_.fp16 : config_.bf16) = on;
      if (on) {
        say(path, value, "mixed_precision", path.substr(0, 4));
      } else {
        line(path, value, ImportOutcome::kUnset, "what is the case anyway");
      }
    } else if (path == "fp16.loss_scale") {
      const double scale = value.get<double>();
      TS_CHECK_AS(ConfigError, scale >= 0, kReader, config_.name, ": ", path,
                  " has to be positive, or 0 for one that moves; got ", value.dump());
      if (scale == 0) return line(path, value, ImportOutcome::kUnset, "what is the case anyway");
      constant_scale_ = true;
      say(path, value, "scaler_init_scale", number_text_of(scale));
      config_.says.push_back({"scaler_growth_factor", "1", path});
      config_.says.push_back({"scaler_backoff_factor", "1", path});
      config_.lines.back().note += ", scaler_growth_factor = 1, scaler_backoff_factor = 1";
    } else if (path == "fp16.initial_scale_power") {
      const double power = value.get<double>();
      TS_CHECK_AS(ConfigError, power >= 0 && power <= 99, kReader, config_.name, ": ", path,
                  " is the power of 2 that the scale begins with, from 0 to 99; got ",
                  value.dump());
      initial_scale_ = config_.says.size();
      say(path, value, "scaler_init_scale", number_text_of(std::exp2(power)));
    } else if (path == "fp16.min_loss_scale") {
      // 0 is none here, too: the scale is a power of 2 and never comes there.
      minimum_ = config_.says.size();
      say(path, value, "scaler_min_scale", number_text_of(value.get<double>()));
    } else if (path == "torch_autocast.enabled") {
      config_.torch_autocast = value.get<bool>();
      line(path, value, config_.torch_autocast ? ImportOutcome::kMapped : ImportOutcome::kUnset,
           config_.torch_autocast ? "precision_policy = autocast" : "what is the case anyway");
    } else {
      TS_CHECK_AS(ConfigError, path == "torch_autocast.dtype", kReader, config_.name, ": ", path,
                  " is not understood");
      const std::string dtype = value.get<std::string>();
      const std::string name = dtype.substr(dtype.rfind('.') + 1);  // "torch.bfloat16"
      TS_CHECK_AS(
          ConfigError, name == "bfloat16" || name == "float16" || name == "bf16" || name == "fp16",
          kReader, config_.name, ": ", path, " has to be bfloat16 or float16; got ", value.dump());
      autocast_dtype_ = name == "bfloat16" || name == "bf16" ? "bf16" : "fp16";
      line(path, value, ImportOutcome::kMapped, "mixed_precision = " + autocast_dtype_);
    }
  }

  DeepSpeedSection section(const std::string& path, const OrderedJson& value) const {
    DeepSpeedSection result;
    const auto type = value.find("type");
    TS_CHECK_AS(ConfigError, type != value.end() && type->is_string(), kReader, config_.name, ": ",
                path, " needs a type, as {\"type\": \"",
                path == "optimizer" ? "AdamW" : "WarmupDecayLR", "\"}; got ", value.dump());
    result.type = type->get<std::string>();
    const auto params = value.find("params");
    if (params == value.end() || params->is_null()) return result;
    TS_CHECK_AS(ConfigError, params->is_object(), kReader, config_.name, ": ", path,
                ".params has to be an object; got ", params->dump());
    for (const auto& [name, param] : params->items()) {
      result.params.emplace_back(name, param_value(path + ".params." + name, param));
    }
    return result;
  }

  DeepSpeedValue param_value(const std::string& path, const OrderedJson& value) const {
    if (value.is_null()) return {};
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_number()) return value.get<double>();
    if (value.is_string()) return value.get<std::string>();
    const bool numbers =
        value.is_array() && std::all_of(value.begin(), value.end(),
                                        [](const OrderedJson& item) { return item.is_number(); });
    TS_CHECK_AS(ConfigError, numbers, kReader, config_.name, ": ", path,
                " has to be a number, a truth value, a text or a list of numbers; got ",
                value.dump());
    return value.get<std::vector<double>>();
  }

  // What keys say together.
  void check() {
    TS_CHECK_AS(ConfigError, !(config_.fp16 == true && config_.bf16 == true), kReader, config_.name,
                ": fp16.enabled and bf16.enabled are both true; enable one of them");
    TS_CHECK_AS(ConfigError,
                !config_.torch_autocast || (config_.fp16 != true && config_.bf16 != true), kReader,
                config_.name, ": torch_autocast.enabled keeps parameters in f32, and ",
                config_.fp16 == true ? "fp16" : "bf16",
                ".enabled stores them in 16 bits; enable one of them");
    if (config_.torch_autocast) {
      config_.says.push_back(
          {"mixed_precision", autocast_dtype_.empty() ? "bf16" : autocast_dtype_,
           autocast_dtype_.empty() ? "torch_autocast.enabled" : "torch_autocast.dtype"});
      config_.says.push_back({"precision_policy", "autocast", "torch_autocast.enabled"});
    }
    // A scale that stays neither begins elsewhere nor has a least value.
    if (!constant_scale_) return;
    std::vector<size_t> moot;
    for (const auto& index : {initial_scale_, minimum_}) {
      if (index) moot.push_back(*index);
    }
    std::ranges::sort(moot, std::greater<>());
    for (const size_t index : moot) {
      const std::string place = config_.says[index].place;
      config_.says.erase(config_.says.begin() + static_cast<std::ptrdiff_t>(index));
      const auto at = std::ranges::find(config_.lines, place, &ImportLine::key);
      at->outcome = ImportOutcome::kUnset;
      at->note = "loss_scale stays as it is";
    }
  }

  DeepSpeedConfig config_;
  std::string unknown_, refused_;
  bool constant_scale_ = false;
  std::optional<size_t> initial_scale_, minimum_;  // in says
  std::string autocast_dtype_;
};

}  // namespace

std::vector<std::string> deepspeed_keys() {
  std::vector<std::string> keys;
  for (const DeepSpeedKey& key : deepspeed_key_table()) keys.emplace_back(key.path);
  return keys;
}

DeepSpeedConfig parse_deepspeed_config(const std::string& text, const std::string& name) {
  return DeepSpeedReader(name).run(text);
}

DeepSpeedConfig read_deepspeed_config(const std::string& path_or_object) {
  if (path_or_object == kDeepSpeedWithoutFile) {
    return parse_deepspeed_config(path_or_object, std::string(kDeepSpeedSwitch));
  }
  const size_t begin = path_or_object.find_first_not_of(" \t\r\n");
  if (begin != std::string::npos && path_or_object[begin] == '{') {
    return parse_deepspeed_config(path_or_object, "deepspeed_config");
  }
  PlainText<std::ifstream> file(path_or_object);
  TS_CHECK_AS(IoError, file.is_open(), kReader, "cannot read ", path_or_object, ": ",
              std::strerror(errno));
  PlainText<std::ostringstream> text;
  text << file.rdbuf();
  TS_CHECK_AS(IoError, !file.bad(), kReader, "cannot read ", path_or_object,
              ": it is no file of text");
  return parse_deepspeed_config(text.str(), path_or_object);
}

// ---- With the other sources --------------------------------------------------------------------

void apply_deepspeed(const DeepSpeedConfig& config, Settings& settings) {
  const auto put = [&](const DeepSpeedConfig::Said& said, bool firm) {
    const Setting& setting = *find_setting(said.setting);
    const Origin& before = origin(setting, settings);
    const Origin now = config.name == kDeepSpeedSwitch
                           ? Origin{Source::kAccelerate, config.name}
                           : Origin{Source::kFile, config.name + ", " + said.place};
    if (before.source == Source::kDefault) return assign(setting, settings, said.text, now);
    if (!firm) return;
    Settings scratch;
    assign(setting, scratch, said.text, now);
    const std::string theirs = text(setting, settings), ours = text(setting, scratch);
    TS_CHECK_AS(ConfigError, theirs == ours, kReader, config.name, ": ", said.place, " makes ",
                said.setting, " ", ours.empty() ? "nothing" : ours, ", and ", before.describe(),
                " makes it ", theirs.empty() ? "nothing" : theirs, "; leave one of them out",
                find_key(said.place) != nullptr && find_key(said.place)->automatic
                    ? ", or write \"auto\" in the file"
                    : "");
  };
  for (const DeepSpeedConfig::Said& said : config.says) put(said, true);
  const bool sharding_said = settings.sharding.origin.source != Source::kDefault;
  for (const DeepSpeedConfig::Said& said : config.implies) {
    if (said.setting == "zero_stage" && sharding_said) continue;
    put(said, false);
  }
  const Precision precision = settings.mixed_precision.value;
  const bool excluded = (precision == Precision::kBF16 && config.bf16 == false) ||
                        (precision == Precision::kFP16 && config.fp16 == false);
  TS_CHECK_AS(ConfigError, !excluded, kReader, config.name, ": ",
              precision == Precision::kBF16 ? "bf16" : "fp16", ".enabled is false, and ",
              settings.mixed_precision.origin.describe(), " makes mixed_precision ",
              text(*find_setting("mixed_precision"), settings),
              "; leave one of them out, or write \"auto\" in the file");
  // Accelerate leaves fp8 to its own recipes.
  const bool sixteen = precision == Precision::kBF16 || precision == Precision::kFP16;
  if (!sixteen || config.torch_autocast) return;
  put({"precision_policy", "pure", precision == Precision::kBF16 ? "bf16" : "fp16"}, false);
  const bool constant_scale = std::ranges::any_of(
      config.says, [](const auto& said) { return said.setting == "scaler_growth_factor"; });
  if (precision == Precision::kBF16 || constant_scale) return;
  // DeepSpeed's own, where the file leaves them out: a GradScaler has others.
  put({"scaler_growth_interval", "1000", "fp16.loss_scale_window"}, false);
  put({"scaler_hysteresis", "2", "fp16.hysteresis"}, false);
  put({"scaler_min_scale", "1", "fp16.min_loss_scale"}, false);
}

Import DeepSpeedConfig::import() const {
  Import result;
  apply_deepspeed(*this, result.settings);
  result.lines = lines;
  return result;
}

// ---- Batches -----------------------------------------------------------------------------------

BatchSizes batch_sizes(const DeepSpeedConfig& config, const Settings& settings, int64_t ranks) {
  const auto& [steps_set, steps_origin] = settings.gradient_accumulation_steps;
  const bool from_elsewhere = !config.accumulation_steps && steps_origin.source != Source::kDefault;
  std::optional<int64_t> steps = config.accumulation_steps;
  if (from_elsewhere) steps = steps_set;
  const std::string steps_name =
      "gradient_accumulation_steps" +
      (from_elsewhere ? " (" + steps_origin.describe() + ")" : std::string());
  BatchSizes sizes;
  sizes.train = config.train_batch_size;
  sizes.micro = config.micro_batch_size;
  const auto divide = [&](int64_t whole, int64_t by, const std::string& arithmetic,
                          std::string_view what) {
    TS_CHECK_AS(ConfigError, whole % by == 0, kReader, config.name, ": ", arithmetic, ", which is ",
                number_text_of(static_cast<double>(whole) / static_cast<double>(by)), "; ", what,
                " has to be a whole number: change train_batch_size, or write \"auto\" for it");
    return whole / by;
  };
  if (sizes.train && sizes.micro && !steps) {
    steps = divide(*sizes.train, *sizes.micro * ranks,
                   tessera::detail::concatenate("train_batch_size ", *sizes.train,
                                                " / (train_micro_batch_size_per_gpu ", *sizes.micro,
                                                " x ", ranks, " ranks)"),
                   "gradient_accumulation_steps");
  }
  sizes.steps = steps.value_or(1);
  if (sizes.train && !sizes.micro) {
    sizes.micro =
        divide(*sizes.train, sizes.steps * ranks,
               tessera::detail::concatenate("train_batch_size ", *sizes.train, " / (", steps_name,
                                            " ", sizes.steps, " x ", ranks, " ranks)"),
               "train_micro_batch_size_per_gpu");
  }
  if (!sizes.micro) return sizes;
  const double about = static_cast<double>(*sizes.micro) * static_cast<double>(sizes.steps) *
                       static_cast<double>(ranks);
  TS_CHECK_AS(ConfigError, about < 1e18, kReader, config.name, ": train_micro_batch_size_per_gpu ",
              *sizes.micro, " x ", steps_name, " ", sizes.steps, " x ", ranks,
              " ranks is more than anybody has; change one of them");
  if (!sizes.train) sizes.train = *sizes.micro * sizes.steps * ranks;
  sizes.arithmetic = tessera::detail::concatenate(
      "train_batch_size ", *sizes.train, " = train_micro_batch_size_per_gpu ", *sizes.micro, " x ",
      steps_name, " ", sizes.steps, " x ", ranks, " ranks");
  const int64_t product = *sizes.micro * sizes.steps * ranks;
  TS_CHECK_AS(ConfigError, product == *sizes.train, kReader, config.name, " says train_batch_size ",
              *sizes.train, ", and train_micro_batch_size_per_gpu ", *sizes.micro, " x ",
              steps_name, " ", sizes.steps, " x ", ranks, " ranks is ", product,
              "; change one of them, or write \"auto\" for it");
  return sizes;
}

}  // namespace tessera::accelerate
