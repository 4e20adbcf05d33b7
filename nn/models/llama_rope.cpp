#include <tessera/nn/models/llama_rope.h>

#include <algorithm>
#include <cmath>

namespace tessera::nn::models {
namespace {

using Json = nlohmann::json;

// In the order of RotaryScaling.
constexpr std::string_view kScalings[] = {"default", "linear", "dynamic",
                                          "llama3",  "yarn",   "longrope"};
constexpr const char* kTrained = "original_max_position_embeddings";

// One object of config.json: rope_parameters, rope_scaling, or what the first has for a kind of
// layers.
class RopeReader {
 public:
  RopeReader(const ConfigReader& reader, std::string field, Json json)
      : reader_(reader), field_(std::move(field)), json_(std::move(json)) {
    TS_CHECK_AS(FormatError, json_.is_null() || json_.is_object(), reader.path(), "the field '",
                field_, "' must be an object; it is ", json_.dump());
    if (json_.is_null()) json_ = Json::object();
    for (const auto& [key, one] : json_.items()) {
      TS_CHECK_AS(UnsupportedError, !one.is_object(), reader.path(), "the field '", field_,
                  "' has values for '", key, "' alone; all layers turn alike here");
    }
  }
  RopeReader(const ConfigReader& reader, const char* field)
      : RopeReader(reader, field, reader.json().value(field, Json())) {}
  bool empty() const { return json_.empty(); }

  RotaryOptions options(const LlamaConfig& config, double theta) const {
    RotaryOptions options;
    options.theta = number("rope_theta", theta);
    options.context = config.context;
    Json name = json_.value("rope_type", json_.value("type", Json()));
    if (name.is_null()) {
      TS_CHECK_AS(FormatError, !json_.contains("factor"), reader_.path(), "the field '", field_,
                  "' has a factor and does not say of which rope_type");
      return options;
    }
    // The first files of Phi-3 had other names for it, as transformers knows.
    if (config.kind == "phi3" && (name == "su" || name == "yarn")) name = "longrope";
    const auto* known =
        std::ranges::find(kScalings, name.is_string() ? name.get<std::string>() : "");
    TS_CHECK_AS(UnsupportedError, known != std::end(kScalings), reader_.path(), "the rope_type ",
                name.dump(), " of '", field_,
                "' is not one of default, linear, dynamic, llama3, yarn, longrope");
    options.scaling = static_cast<RotaryScaling>(known - kScalings);
    if (options.scaling == RotaryScaling::kNone) return options;
    if (options.scaling == RotaryScaling::kLlama3 || options.scaling == RotaryScaling::kYarn ||
        options.scaling == RotaryScaling::kLongRope) {
      // The others go by the model's context. One beside the object comes first in transformers.
      options.context = reader_.integer(
          kTrained, static_cast<int64_t>(number(kTrained, static_cast<double>(config.context))));
      TS_CHECK_AS(FormatError, options.context > 0, reader_.path(), "the field '", kTrained,
                  "' must be above 0; it is ", options.context);
    }
    const double longer =
        static_cast<double>(config.context) / static_cast<double>(options.context);
    const bool by_contexts = options.scaling == RotaryScaling::kLongRope ||
                             (options.scaling == RotaryScaling::kYarn && json_.contains("factor"));
    options.factor =
        number("factor", by_contexts ? std::optional<double>(longer) : std::optional<double>());
    read_scaling(options);
    return options;
  }

  // Absent and null are the same.
  double number(const char* field, std::optional<double> fallback) const {
    const auto found = json_.find(field);
    if (found == json_.end() || found->is_null()) {
      TS_CHECK_AS(FormatError, fallback.has_value(), reader_.path(), "the field '", field_,
                  "' lacks '", field, "', without which its rope_type means nothing");
      return *fallback;
    }
    TS_CHECK_AS(FormatError, found->is_number(), reader_.path(), "the field '", field,
                "' of the rotary scaling must be a number; it is ", found->dump());
    return found->get<double>();
  }

 private:
  void read_scaling(RotaryOptions& options) const {
    if (options.scaling == RotaryScaling::kLlama3) {
      options.low_freq_factor = number("low_freq_factor", {});
      options.high_freq_factor = number("high_freq_factor", {});
    } else if (options.scaling == RotaryScaling::kYarn) {
      options.beta_fast = or_default(number("beta_fast", 0), 32);
      options.beta_slow = or_default(number("beta_slow", 0), 1);
      const Json truncate = json_.value("truncate", Json(true));
      TS_CHECK_AS(FormatError, truncate.is_boolean(), reader_.path(), "the field 'truncate' of '",
                  field_, "' must be true or false; it is ", truncate.dump());
      options.truncate = truncate.get<bool>();
      const double mscale = number("mscale", 0), of_all = number("mscale_all_dim", 0);
      const auto grown = [&](double by) {
        return options.factor <= 1 ? 1 : 0.1 * by * std::log(options.factor) + 1;
      };
      if (mscale != 0 && of_all != 0) options.attention_factor = grown(mscale) / grown(of_all);
    } else if (options.scaling == RotaryScaling::kLongRope) {
      options.short_factor = numbers("short_factor");
      options.long_factor = numbers("long_factor");
    }
    const auto found = json_.find("attention_factor");
    if (options.scaling != RotaryScaling::kYarn && options.scaling != RotaryScaling::kLongRope) {
      return;
    }
    if (found != json_.end() && !found->is_null()) {
      options.attention_factor = number("attention_factor", {});
    }
  }

  static double or_default(double value, double fallback) { return value != 0 ? value : fallback; }

  std::vector<double> numbers(const char* field) const {
    const Json list = json_.value(field, Json());
    const bool is_list = list.is_array() && std::ranges::all_of(list, [](const Json& each) {
                           return each.is_number();
                         });
    TS_CHECK_AS(FormatError, is_list, reader_.path(), "the field '", field, "' of '", field_,
                "' must be a list of numbers; it is ", list.dump());
    return list.get<std::vector<double>>();
  }

  const ConfigReader& reader_;
  std::string field_;
  Json json_;
};

constexpr const char* kPart = "partial_rotary_factor";

void read_part(const ConfigReader& reader, const RopeReader& rope, LlamaConfig& config) {
  config.rotated = rope.number(kPart, reader.number(kPart, 1));
  TS_CHECK_AS(UnsupportedError, config.kind == "phi3" || config.rotated == 1, reader.path(),
              "the field '", kPart, "' is ", config.rotated,
              "; only a phi3 rotates a part of its "
              "features");
}

// gemma3_text: an object for each kind of layer, or fields of transformers 4.
void read_both(const ConfigReader& reader, LlamaConfig& config) {
  const Json both = reader.json().value("rope_parameters", Json());
  const auto part = [&](const char* kind) {
    return RopeReader(reader, std::string("rope_parameters.") + kind,
                      both.is_object() ? both.value(kind, Json()) : Json());
  };
  if (both.is_object()) {
    for (const auto& [key, value] : both.items()) {
      TS_CHECK_AS(UnsupportedError, key == "full_attention" || key == "sliding_attention",
                  reader.path(),
                  "the field 'rope_parameters' of a gemma3_text has objects "
                  "full_attention and sliding_attention; it has '",
                  key, "'");
    }
  }
  const RopeReader old(reader, "rope_scaling"), now = part("full_attention");
  config.rotary = (old.empty() ? now : old)
                      .options(config, now.number("rope_theta", reader.number("rope_theta", 1e6)));
  config.window_rotary =
      part("sliding_attention").options(config, reader.number("rope_local_base_freq", 1e4));
  read_part(reader, now, config);
}

Json written(const LlamaConfig& config, const RotaryOptions& rotary) {
  Json rope = {{"rope_type", kScalings[static_cast<size_t>(rotary.scaling)]},
               {"rope_theta", rotary.theta}};
  if (config.rotated != 1) rope[kPart] = config.rotated;
  if (rotary.scaling == RotaryScaling::kNone) return rope;
  rope["factor"] = rotary.factor;
  if (rotary.attention_factor) rope["attention_factor"] = *rotary.attention_factor;
  switch (rotary.scaling) {
    case RotaryScaling::kLlama3:
      rope["low_freq_factor"] = rotary.low_freq_factor;
      rope["high_freq_factor"] = rotary.high_freq_factor;
      break;
    case RotaryScaling::kYarn:
      rope["beta_fast"] = rotary.beta_fast;
      rope["beta_slow"] = rotary.beta_slow;
      rope["truncate"] = rotary.truncate;
      break;
    case RotaryScaling::kLongRope:
      rope["short_factor"] = rotary.short_factor;
      rope["long_factor"] = rotary.long_factor;
      break;
    default:
      return rope;
  }
  rope[kTrained] = rotary.context;
  return rope;
}

}  // namespace

void read_rope(const ConfigReader& reader, LlamaConfig& config) {
  if (config.kind == "gemma3_text") return read_both(reader, config);
  const RopeReader now(reader, "rope_parameters"), old(reader, "rope_scaling");
  const double theta = reader.number("rope_theta", 10000);
  const RopeReader& said = now.empty() ? old : now;
  read_part(reader, said, config);
  config.rotary = said.options(config, theta);
  TS_CHECK_AS(FormatError,
              now.empty() || old.empty() || config.rotary == old.options(config, theta),
              reader.path(),
              "rope_parameters and rope_scaling contradict each other; take the one away that the "
              "model was not trained with");
}

Json written_rope(const LlamaConfig& config) {
  const Json rope = written(config, config.rotary);
  const bool plain = config.rotary.scaling == RotaryScaling::kNone;
  if (config.window_rotary) {
    return {
        {"rope_parameters",
         {{"full_attention", rope}, {"sliding_attention", written(config, *config.window_rotary)}}},
        {"rope_theta", config.rotary.theta},
        {"rope_local_base_freq", config.window_rotary->theta},
        {"rope_scaling", plain ? Json() : rope}};
  }
  Json json = {{"rope_parameters", rope}, {"rope_theta", config.rotary.theta}};
  if (config.kind == "phi3") {
    // transformers takes one beside the object before that in it, and its own where there is none.
    json[kTrained] = plain ? config.context : config.rotary.context;
    json[kPart] = config.rotated;
  } else {
    json["rope_scaling"] = plain ? Json() : rope;
  }
  return json;
}

}  // namespace tessera::nn::models
