// The table of settings.
#include <tessera/accelerate/settings/schema.h>

#include <algorithm>
#include <iterator>

#include <tessera/accelerate/settings/edit_distance.h>
#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {
namespace {

std::vector<Setting> make_table() {
  std::vector<Setting> all;
  const auto add = [&](std::string_view section, std::vector<Setting> rows) {
    for (Setting& row : rows) row.section = section;
    std::move(rows.begin(), rows.end(), std::back_inserter(all));
  };
  add("training", training_settings());
  add("data", data_settings());
  add("project", project_settings());
  add("ddp", ddp_settings());
  add("grad scaler", grad_scaler_settings());
  add("parallelism", parallelism_settings());
  add("sharding", sharding_settings());
  add("fp8", fp8_settings());
  add("launch", launch_settings());
  return all;
}

const std::vector<Setting>& table() {
  static const auto* const kTable = new std::vector<Setting>(make_table());  // also after main
  return *kTable;
}

std::string canonical(std::string_view key) {
  std::string result = lower(key);
  std::replace(result.begin(), result.end(), '-', '_');
  return result;
}

}  // namespace

std::span<const Setting> schema() { return table(); }

const Setting* find_setting(std::string_view key) {
  const std::string wanted = canonical(key);
  for (const Setting& setting : table()) {
    if (setting.key == wanted) return &setting;
    for (const std::string_view alias : setting.aliases) {
      if (alias == wanted) return &setting;
    }
  }
  return nullptr;
}

std::string nearest_key(std::string_view key, std::optional<size_t> most) {
  const std::string wanted = canonical(key);
  std::string best;
  size_t least = most.value_or(wanted.size() / 3 + 1) + 1;
  for (const Setting& setting : table()) {
    const auto look = [&](std::string_view name) {
      const size_t distance = edit_distance(wanted, name);
      if (distance >= least) return;
      least = distance;
      best = name;
    };
    look(setting.key);
    for (const std::string_view alias : setting.aliases) look(alias);
  }
  return best;
}

std::string Setting::environment() const { return "TESSERA_" + upper(key); }

std::string Setting::flag() const {
  std::string flag = "--" + std::string(key);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::vector<std::string> Setting::flags() const {
  std::vector<std::string> all;
  if (!short_flag.empty()) all.emplace_back(short_flag);
  all.push_back(flag());
  for (const std::string_view alias : aliases) {
    std::string name = "--" + std::string(alias);
    std::replace(name.begin(), name.end(), '_', '-');
    all.push_back(name);
  }
  return all;
}

std::string text(const Setting& setting, const Settings& settings) {
  return setting.field.text(setting, settings);
}

bool is_default(const Setting& setting, const Settings& settings) {
  return text(setting, settings) == text(setting, Settings());
}

const Origin& origin(const Setting& setting, const Settings& settings) {
  return setting.field.origin(settings);
}

void assign(const Setting& setting, Settings& settings, std::string_view text,
            const Origin& origin) {
  setting.field.assign(setting, settings, source_of(setting, origin), text, origin);
}

void take_options(Settings& settings, const AcceleratorOptions& options) {
  for (const Setting& setting : table()) {
    if (setting.field.take != nullptr) setting.field.take(setting, settings, options);
  }
}

std::string Origin::describe() const {
  switch (source) {
    case Source::kDefault:
      return "default";
    case Source::kCode:
      return "code";
    case Source::kFile:
      return "file " + name;
    case Source::kAccelerate:
    case Source::kEnvironment:
    case Source::kLaunchFlag:
      break;
  }
  return name;
}

}  // namespace tessera::accelerate
