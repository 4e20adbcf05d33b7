#include <tessera/data/tokenizer_json/pretrained_config.h>

#include <algorithm>
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

using Templates = std::vector<std::pair<std::string, std::string>>;

void set_template(Templates& templates, const std::string& name, std::string text) {
  const auto found = std::find_if(templates.begin(), templates.end(),
                                  [&](const auto& known) { return known.first == name; });
  if (found != templates.end()) {
    found->second = std::move(text);
  } else {
    templates.emplace_back(name, std::move(text));
  }
}

// A text, or a list of {"name", "template"}.
void read_chat_templates(JsonFields& fields, Templates& templates) {
  const Json* const value = fields.find("chat_template");
  if (value == nullptr) return;
  if (!value->is_array()) {
    return set_template(templates, "default", fields.text("chat_template"));
  }
  for (const Json& entry : *value) {
    JsonFields named(entry, fields.place() + ".chat_template");
    set_template(templates, named.text("name"), named.text("template"));
  }
}

// Files of templates replace those of tokenizer_config.json, all of them.
void read_template_files(const std::filesystem::path& folder, Templates& templates) {
  Templates of_files;
  const std::filesystem::path single = folder / "chat_template.jinja";
  if (std::filesystem::exists(single)) {
    set_template(of_files, "default", read_text(single.string()));
  }
  const std::filesystem::path more = folder / "additional_chat_templates";
  if (std::filesystem::is_directory(more)) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(more)) {
      if (entry.path().extension() == ".jinja") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const auto& file : files)
      set_template(of_files, file.stem().string(), read_text(file.string()));
  }
  if (!of_files.empty()) templates = std::move(of_files);
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
    read_chat_templates(fields, config.chat_templates);
  }
  read_template_files(path, config.chat_templates);
  return config;
}

const std::string* PretrainedConfig::chat_template(const std::string& name) const {
  const auto found = std::find_if(chat_templates.begin(), chat_templates.end(),
                                  [&](const auto& known) { return known.first == name; });
  return found == chat_templates.end() ? nullptr : &found->second;
}

}  // namespace tessera::data
