#include <tessera/accelerate/plan/network.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/plain_text.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kNetwork = "network";
constexpr const char* kBandwidth = "bandwidth_bytes_per_second";
constexpr const char* kLatency = "latency_seconds";
constexpr const char* kFlops = "flops_per_second";

double rate_of(const nlohmann::json& value, const std::string& key, const std::string& path,
               bool may_be_zero) {
  const bool fits = value.is_number() && std::isfinite(value.get<double>()) &&
                    (value.get<double>() > 0 || (may_be_zero && value.get<double>() == 0));
  TS_CHECK_AS(ConfigError, fits, kNetwork, path, ": \"", key, "\" has to be a ",
              may_be_zero ? "number that is not negative" : "number above 0", "; got ",
              value.dump());
  return value.get<double>();
}

// `inner`: of an axis, whose link is the network's where it says nothing else.
Link link_of(const nlohmann::json& json, const std::string& path, const std::string& prefix,
             Link link) {
  for (const auto& [key, value] : json.items()) {
    if (key == kBandwidth) {
      link.bandwidth = rate_of(value, prefix + key, path, false);
    } else if (key == kLatency) {
      link.latency = rate_of(value, prefix + key, path, true);
    } else if (!prefix.empty()) {
      TS_THROW(ConfigError, kNetwork, path, ": \"", prefix, key, "\" is unknown; a link has ",
               kBandwidth, " and ", kLatency);
    }
  }
  return link;
}

}  // namespace

Network Network::parse(const std::string& text, const std::string& path) {
  const auto json = parse_bounded_json(text, path);
  TS_CHECK_AS(FormatError, json.is_object(), kNetwork, path, " is no JSON object");
  Network network;
  for (const char* needed : {kBandwidth, kLatency}) {
    TS_CHECK_AS(ConfigError, json.contains(needed), kNetwork, path, " has no \"", needed, "\"");
  }
  network.link = link_of(json, path, "", {});
  for (const auto& [key, value] : json.items()) {
    if (key == kBandwidth || key == kLatency) continue;
    if (key == kFlops) {
      network.flops = rate_of(value, key, path, false);
      continue;
    }
    TS_CHECK_AS(ConfigError, key == "dp_shard" || key == "dp_replicate", kNetwork, path, ": \"",
                key, "\" is unknown; known are ", kBandwidth, ", ", kLatency, ", ", kFlops,
                ", and dp_shard and dp_replicate for links of one axis");
    TS_CHECK_AS(ConfigError, value.is_object(), kNetwork, path, ": \"", key,
                "\" has to be an object with the link's numbers; got ", value.dump());
    network.axes[key] = link_of(value, path, key + ".", network.link);
  }
  return network;
}

Network Network::read(const std::string& path) {
  PlainText<std::ifstream> file(path, std::ios::binary);
  TS_CHECK_AS(IoError, file.is_open(), kNetwork, "cannot read ", path);
  return parse({std::istreambuf_iterator<char>(file), {}}, path);
}

double Network::seconds(const distributed::CommRecord& record, const std::string& axis) const {
  if (record.group_size < 2) return 0;
  const auto own = axes.find(axis);
  const Link& used = own == axes.end() ? link : own->second;
  const auto messages = std::bit_width(static_cast<unsigned>(record.group_size - 1));
  const int rounds = record.operation == distributed::Operation::kAllReduce ? 2 : 1;
  return rounds * static_cast<int>(messages) * used.latency + record.wire_bytes() / used.bandwidth;
}

}  // namespace tessera::accelerate
