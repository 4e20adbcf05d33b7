// Settings from their sources and from the DeepSpeed configuration that they name.
#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/deepspeed_config.h>

namespace tessera::accelerate {

void add_deepspeed(Settings& settings) {
  const std::string file = settings.deepspeed_config_file;
  if (file.empty()) return;
  auto config = std::make_shared<DeepSpeedConfig>(read_deepspeed_config(file));
  apply_deepspeed(*config, settings);
  apply_stage(settings);
  settings.deepspeed = std::move(config);
}

Settings resolve(const ResolveOptions& options) {
  Settings settings = merge(options);
  add_deepspeed(settings);
  check_consistent(settings, options.code_follows);
  check_available(settings);
  return settings;
}

void check_before_code(Settings settings) {
  apply_stage(settings);
  add_deepspeed(settings);
  check_consistent(settings, true);
}

}  // namespace tessera::accelerate
