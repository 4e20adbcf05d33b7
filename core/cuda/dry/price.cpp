#include <tessera/core/cuda/dry/price.h>

#include <algorithm>
#include <fstream>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>

namespace tessera::gpu::dry {

Machine Machine::read(const std::string& path) {
  std::ifstream in(path);
  TS_CHECK_AS(IoError, in, "machine", "cannot read '", path, "'");
  const auto json = nlohmann::json::parse(in, nullptr, false, true);
  TS_CHECK_AS(FormatError, json.is_object(), "machine", "'", path, "' is not a JSON object");
  const auto number = [&](const nlohmann::json& of, const std::string& key,
                          const std::string& name) {
    const auto field = of.find(key);
    TS_CHECK_AS(FormatError, field != of.end() && field->is_number() && field->get<double>() > 0,
                "machine", "'", path, "': ", name, " must be a positive number in SI units");
    return field->get<double>();
  };
  const auto object = [&](const char* key) -> const nlohmann::json& {
    const auto field = json.find(key);
    TS_CHECK_AS(FormatError, field != json.end() && field->is_object(), "machine", "'", path,
                "': ", key, " must be an object");
    return *field;
  };
  Machine machine;
  machine.name = json.value("name", path);
  machine.bandwidth = number(json, "bandwidth", "bandwidth");
  const nlohmann::json& gemm = object("gemm");
  for (const auto& [dtype, rate] : gemm.items()) {
    machine.gemm[dtype] = number(gemm, dtype, "gemm." + dtype);
  }
  const nlohmann::json& attention = object("attention");
  machine.attention_forward = number(attention, "forward", "attention.forward");
  machine.attention_backward = number(attention, "backward", "attention.backward");
  machine.launch_gap = number(json, "launch_gap", "launch_gap");
  return machine;
}

Price price(const Launch& launch, const Machine& machine) {
  const double moved =
      launch.traffic.is_known()
          ? static_cast<double>(launch.traffic.reads + launch.traffic.writes) / machine.bandwidth
          : 0;
  Price price{moved, Bound::kMemory};
  switch (launch.kind) {
    case LaunchKind::kKernel:
      if (!launch.traffic.is_known()) price.bound = Bound::kUnknown;
      break;
    case LaunchKind::kProduct: {
      const auto rate = machine.gemm.find(name_of(launch.dtype));
      TS_CHECK_AS(UnsupportedError, rate != machine.gemm.end(), "price", machine.name,
                  " has no rate of products in ", name_of(launch.dtype));
      const double products = launch.flops / rate->second;
      if (products >= moved) price = {products, Bound::kProduct};
      break;
    }
    case LaunchKind::kGraph:
      if (launch.flops > 0) {
        const double unmasked = launch.causal ? launch.flops / 2 : launch.flops;
        price = {
            unmasked / (launch.backward ? machine.attention_backward : machine.attention_forward),
            Bound::kAttention};
      } else {
        price.bound = Bound::kUnknown;
      }
      break;
    case LaunchKind::kCopy:
      price.seconds = 2 * static_cast<double>(launch.bytes) / machine.bandwidth;
      break;
    case LaunchKind::kFill:
      price.seconds = static_cast<double>(launch.bytes) / machine.bandwidth;
      break;
  }
  if (price.seconds < machine.launch_gap && price.bound != Bound::kUnknown)
    price.bound = Bound::kGap;
  price.seconds += machine.launch_gap;
  return price;
}

Bill price(std::span<const Launch> launches, const Machine& machine) {
  Bill bill;
  for (const Launch& launch : launches) {
    const Price one = price(launch, machine);
    bill.seconds += one.seconds;
    bill.by_bound[one.bound] += one.seconds;
    bill.by_name[launch.name] += one.seconds;
    if (one.bound == Bound::kUnknown) ++bill.unpriced[launch.name];
  }
  return bill;
}

}  // namespace tessera::gpu::dry
