#include <tessera/data/tokenizer_json/pretrained_config.h>

#include <filesystem>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {
namespace {

// transformers writes 1e30 for no limit.
constexpr double kNoLimit = 1e15;

Json read_object(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return Json::object();
  Json json = read_bounded_json(path.string());
  TS_CHECK_AS(FormatError, json.is_object(), kPretrained, "'", path.string(),
              "' must be a JSON object; it is not; get the file again.");
  return json;
}

// A token's text, or an object that has it as its content.
void read_token(const Json& json, const char* name, const std::string& place,
                std::optional<std::string>& token) {
  JsonFields fields(json, place);
  const Json* const value = fields.find(name);
  if (value == nullptr) return;
  token = value->is_object() ? fields.object(name).text("content") : fields.text(name);
}

// A text, or a list of {"name", "template"}, of which the one named default counts.
std::optional<std::string> read_chat_template(JsonFields& fields) {
  const Json* const value = fields.find("chat_template");
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) return fields.text("chat_template");
  for (const Json& entry : *value) {
    JsonFields named(entry, fields.place() + ".chat_template");
    if (named.text("name") == "default") return named.text("template");
  }
  return std::nullopt;
}

}  // namespace

PretrainedConfig read_pretrained_config(const std::string& folder) {
  const std::filesystem::path path(folder);
  PretrainedConfig config;
  // The second one counts where both say something.
  for (const char* const file : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const Json json = read_object(path / file);
    const std::string place = "'" + (path / file).string() + "'";
    read_token(json, "bos_token", place, config.bos_token);
    read_token(json, "eos_token", place, config.eos_token);
    read_token(json, "pad_token", place, config.pad_token);
    read_token(json, "unk_token", place, config.unk_token);
    read_token(json, "cls_token", place, config.cls_token);
    read_token(json, "sep_token", place, config.sep_token);
    read_token(json, "mask_token", place, config.mask_token);
    JsonFields fields(json, place);
    if (fields.find("add_bos_token") != nullptr)
      config.add_bos_token = fields.flag("add_bos_token");
    if (fields.find("add_eos_token") != nullptr)
      config.add_eos_token = fields.flag("add_eos_token");
    if (const Json* const length = fields.find("model_max_length")) {
      const bool is_number = length->is_number() && length->get<double>() >= 0;
      if (!is_number) fields.wrong("model_max_length", "a number that is not negative");
      if (length->get<double>() < kNoLimit) config.model_max_length = length->get<int64_t>();
    }
    if (auto chat_template = read_chat_template(fields)) config.chat_template = chat_template;
  }
  const std::filesystem::path jinja = path / "chat_template.jinja";
  if (std::filesystem::exists(jinja)) config.chat_template = read_text(jinja.string());
  return config;
}

}  // namespace tessera::data
