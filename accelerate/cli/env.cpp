// tessera env: what a bug report needs.
#include <cstdio>
#include <fstream>
#include <memory>

#include <dlfcn.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/process.h>
#include <tessera/accelerate/launch/protocol.h>
#include <tessera/accelerate/settings/config.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/isa.h>
#include <tessera/core/plain_text.h>
#include <tessera/data/text/sentencepiece.h>

namespace tessera::cli {
namespace {

void line(const std::string& name, const std::string& value) {
  std::printf("%-16s %s\n", (name + ":").c_str(), value.c_str());
}

// The value of the first line of /proc/cpuinfo or /proc/meminfo that begins with `name`.
std::string proc_value(const char* file, const std::string& name) {
  PlainText<std::ifstream> in(file);
  for (std::string text; std::getline(in, text);) {
    if (text.rfind(name, 0) != 0) continue;
    const size_t at = text.find_first_not_of(": \t", name.size());
    return at == std::string::npos ? "" : text.substr(at);
  }
  return "unknown";
}

std::string gib(const std::string& kilobytes) {
  char text[40];
  plain_snprintf(text, sizeof text, "%.1f GiB", std::atof(kilobytes.c_str()) / (1 << 20));
  return text;
}

std::string processor_levels() {
  std::string levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const std::pair<const char*, bool> kLevels[] = {
      {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},
      {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0}};
  for (const auto& [name, there] : kLevels) {
    if (there) levels += (levels.empty() ? "" : " ") + std::string(name);
  }
  const std::string flags = " " + proc_value("/proc/cpuinfo", "flags") + " ";
  for (const char* name : {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}) {
    if (flags.find(" " + std::string(name) + " ") != std::string::npos) {
      levels += " " + std::string(name);
    }
  }
#endif
  return levels;
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

std::string found_or(const char* version, const char* without) {
  return version[0] == '\0' ? without : version;
}

std::string nccl() {
  if (std::string(TESSERA_BUILT_WITH_NCCL).empty()) return "built without";
  void* library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return "built with; libnccl.so.2 is not found here";
  using GetVersion = int (*)(int*);
  const auto get_version = reinterpret_cast<GetVersion>(::dlsym(library, "ncclGetVersion"));
  int version = 0;
  const bool known = get_version != nullptr && get_version(&version) == 0;
  ::dlclose(library);
  if (!known) return "libnccl.so.2, of unknown version";
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// The instruction set of the kernels, which TESSERA_ISA can lower.
std::string kernel_set() {
  switch (const kernels::Isa isa = kernels::cpu_isa()) {
    case kernels::Isa::kGeneric:
      return "plain C++, for any processor";
    case kernels::Isa::kNeon:
      return "aarch64 NEON";
    case kernels::Isa::kV3:
    case kernels::Isa::kV4:
      return std::string("x86-64-") + name_of(isa);
    case kernels::Isa::kBf16:
      return "x86-64-v4 and AVX-512 BF16";
    default:
      return "x86-64-v4 and AMX";
  }
}

// Whether fp8 products are instructions of this device or made of others, and with what.
std::string fp8_products() {
  std::string text = "emulated on the CPU, exactly: bytes widened to bf16, products in " +
                     std::string(std::string(TESSERA_BUILT_WITH_ONEDNN).empty()
                                     ? "Eigen"
                                     : "oneDNN " TESSERA_BUILT_WITH_ONEDNN);
  if (gpu::device_count() == 0) return text;
  return text + "; none on GPUs in this build, where mixed_precision fp8 is refused";
}

int print_environment(const std::string& file, bool all_settings) {
  const distributed::Environment environment = distributed::process_environment();
  line("tessera", launch::tessera_version());
  line("compiler", compiler());
  utsname system{};
  if (::uname(&system) == 0) {
    line("system", std::string(system.sysname) + " " + system.release + " " + system.machine);
    line("host", system.nodename);
  }
  line("processor", proc_value("/proc/cpuinfo", "model name"));
  line("extensions", processor_levels());
  line("kernels", kernel_set());
  const distributed::Cores cores = distributed::available_cores();
  line("cores", std::to_string(cores.allowed) + " of " + std::to_string(cores.node) + " usable");
  line("memory", gib(proc_value("/proc/meminfo", "MemTotal")) + ", " +
                     gib(proc_value("/proc/meminfo", "MemAvailable")) + " available");
  line("oneDNN", found_or(TESSERA_BUILT_WITH_ONEDNN, "built without"));
  const std::string mpirun = launch::find_program("mpirun", environment);
  line("MPI", found_or(TESSERA_BUILT_WITH_MPI, "built without") +
                  (mpirun.empty() ? "; mpirun is not in PATH" : "; " + mpirun));
  line("NCCL", nccl());
  line("SentencePiece", data::has_sentencepiece() ? "found" : "built without");
  line("CUDA", std::string(TESSERA_BUILT_WITH_CUDA).empty()
                   ? "built without"
                   : "built with " TESSERA_BUILT_WITH_CUDA);
  const std::string reason = gpu::unavailable_reason();
  if (!reason.empty()) line("GPU", "none: " + reason);
  for (int index = 0; index < gpu::device_count(); ++index) {
    line("GPU " + std::to_string(index), gpu::describe_device(index));
  }
  line("fp8", fp8_products());
  try {
    const distributed::LaunchInfo info = distributed::detect();
    line("launcher", std::string(distributed::launcher_name(info.launcher)) +
                         (info.under_tessera ? " (tessera launch)" : "") + ", rank " +
                         std::to_string(info.rank) + " of " + std::to_string(info.world_size));
  } catch (const Error& error) {
    line("launcher", error.what());
  }

  accelerate::ResolveOptions sources;
  if (!file.empty()) sources.file = file;
  const std::string used = accelerate::config_file(sources);
  line("settings file", used.empty() ? "none" : used);
  std::printf("\nsettings%s:\n",
              all_settings ? "" : " that were given (--all shows the others too)");
  // What is set is shown also where a training would refuse it.
  accelerate::Settings settings = accelerate::merge(sources);
  std::string refusal;
  try {
    accelerate::add_deepspeed(settings);
    accelerate::check_consistent(settings, true);
    accelerate::check_available(settings);
  } catch (const Error& error) {
    refusal = error.what();
  }
  std::fputs(accelerate::describe(settings, all_settings).c_str(), stdout);
  if (refusal.empty()) return 0;
  std::printf("\na training is refused: %s\n", refusal.c_str());
  return 1;
}

}  // namespace

void add_env(CLI::App& app, int& exit_code) {
  CLI::App* env =
      app.add_subcommand("env", "prints versions, the machine, and settings with their origin");
  const auto file = std::make_shared<std::string>();
  const auto all = std::make_shared<bool>(false), changed = std::make_shared<bool>(false);
  env->add_option("--config,--config-file", *file, "JSON file with settings");
  env->add_flag("--all", *all, "settings that have their default too");
  env->add_flag("--changed", *changed, "only settings that were given (the default)");
  env->callback([file, all, changed, &exit_code] {
    TS_CHECK_AS(UsageError, !*all || !*changed, "tessera env",
                "--all and --changed contradict each other; leave one out");
    exit_code = print_environment(*file, *all);
  });
}

}  // namespace tessera::cli
