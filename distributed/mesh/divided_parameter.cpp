#include <tessera/distributed/mesh/divided_parameter.h>

#include <unordered_map>
#include <utility>

#include <tessera/core/context.h>

namespace tessera::distributed {
namespace {

struct DividedParameters {
  std::unordered_map<const VersionCounter*, DividedParameter> known;
};

}  // namespace

void note_divided(const Tensor& parameter, std::string name, uint64_t marks) {
  auto& known = Context::current().slot<DividedParameters>().known;
  std::erase_if(known, [](const auto& entry) { return entry.second.parameter.expired(); });
  const auto& version = parameter.impl()->version;
  known[version.get()] = {version, std::move(name), marks};
}

const DividedParameter* divided_parameter(const Tensor& parameter) {
  if (!parameter.defined()) return nullptr;
  const auto& known = Context::current().slot<DividedParameters>().known;
  const auto found = known.find(parameter.impl()->version.get());
  if (found == known.end() || found->second.parameter.expired()) return nullptr;
  return &found->second;
}

}  // namespace tessera::distributed
