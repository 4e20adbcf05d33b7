#include <tessera/core/cuda/dry/price.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <limits>
#include <tuple>

#include <nlohmann/json.hpp>

#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>

namespace tessera::gpu::dry {
namespace {

bool is_attention(LaunchKind kind) {
  return kind == LaunchKind::kAttention || kind == LaunchKind::kAttentionGradient;
}

// "h.11.mlp" is "h.*.mlp".
std::string without_numbers(const std::string& name) {
  std::string result;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string word = name.substr(at, end - at);
    const bool is_number = !word.empty() && std::ranges::all_of(word, [](unsigned char letter) {
      return std::isdigit(letter) != 0;
    });
    result += is_number ? "*" : word;
    if (end < name.size()) result += '.';
    at = end + 1;
  }
  return result;
}

}  // namespace

const char* name_of(Bound bound) {
  switch (bound) {
    case Bound::kMemory:
      return "memory";
    case Bound::kProduct:
      return "product";
    case Bound::kAttention:
      return "attention";
    case Bound::kGap:
      return "gap";
    case Bound::kUnknown:
      return "unknown";
  }
  return "";
}

double counted_flops(const Launch& launch) {
  return is_attention(launch.kind) && launch.causal ? launch.flops / 2 : launch.flops;
}

int64_t moved_bytes(const Launch& launch) {
  return launch.traffic.is_known() ? launch.traffic.reads + launch.traffic.writes : 0;
}

Price price(const Launch& launch, const Machine& machine) {
  Price price{0, static_cast<double>(moved_bytes(launch)) / machine.bandwidth,
              launch.traffic.is_known() ? Bound::kMemory : Bound::kUnknown};
  const auto calculates = [&](double seconds, Bound bound) {
    if (seconds == 0 || seconds < price.floor_seconds) return;
    price.floor_seconds = seconds;
    price.bound = bound;
  };
  const double flops = counted_flops(launch);
  switch (launch.kind) {
    case LaunchKind::kProduct:
    case LaunchKind::kConvolution:
      calculates(flops / machine.gemm_rate(launch.dtype, launch.tf32), Bound::kProduct);
      break;
    case LaunchKind::kAttention:
      calculates(flops / machine.attention_forward, Bound::kAttention);
      break;
    case LaunchKind::kAttentionGradient:
      calculates(flops / machine.attention_backward, Bound::kAttention);
      break;
    case LaunchKind::kKernel:
    case LaunchKind::kGraph:
    case LaunchKind::kCopy:
    case LaunchKind::kFill:
      break;
  }
  price.seconds = price.floor_seconds + launch.gelu_results / machine.gelu_epilogue;
  if (price.seconds < machine.launch_gap && price.bound != Bound::kUnknown) {
    price.bound = Bound::kGap;
  }
  price.seconds += machine.launch_gap;
  return price;
}

Bill price(std::span<const Launch> launches, const Machine& machine) {
  Bill bill;
  std::map<std::tuple<std::string, std::string, std::string>, BillRow> rows;
  std::map<const BillRow*, std::map<Bound, double>> bounds;
  for (const Launch& launch : launches) {
    const Price one = price(launch, machine);
    bill.seconds += one.seconds;
    bill.floor_seconds += one.floor_seconds;
    bill.flops += counted_flops(launch);
    ++bill.launches;
    bill.by_bound[one.bound] += one.seconds;
    bill.by_name[launch.name] += one.seconds;
    if (one.bound == Bound::kUnknown) ++bill.unpriced[launch.name];
    const std::string layer = without_numbers(launch.layer);
    BillRow& row = rows[{layer, launch.op, launch.name}];
    row.name = launch.name;
    row.op = launch.op;
    row.layer = layer;
    ++row.calls;
    row.seconds += one.seconds;
    row.floor_seconds += one.floor_seconds;
    row.bytes += moved_bytes(launch);
    row.flops += counted_flops(launch);
    bounds[&row][one.bound] += one.seconds;
  }
  for (auto& [key, row] : rows) {
    row.bound = std::ranges::max_element(bounds.at(&row), {}, [](const auto& entry) {
                  return entry.second;
                })->first;
    bill.rows.push_back(row);
  }
  std::ranges::stable_sort(bill.rows, std::greater{}, &BillRow::seconds);
  return bill;
}

std::string table(const Bill& bill, bool all) {
  constexpr double kLeastShare = 1e-3;
  const auto share = [&](double seconds) {
    return bill.seconds > 0 ? 100 * seconds / bill.seconds : 0;
  };
  std::string text;
  const auto line = [&](const char* format, auto... values) {
    std::array<char, 512> buffer{};
    std::snprintf(buffer.data(), buffer.size(), format, values...);
    text += buffer.data();
  };
  line("%-36s %-28s %-20s %6s %9s %6s %-9s %6s\n", "layer", "op", "kernel", "calls", "ms", "share",
       "bound by", "/floor");
  double rest = 0;
  int64_t rest_calls = 0;
  for (const BillRow& row : bill.rows) {
    if (!all && row.seconds < kLeastShare * bill.seconds) {
      rest += row.seconds;
      rest_calls += row.calls;
      continue;
    }
    line("%-36s %-28s %-20s %6lld %9.3f %5.1f%% %-9s", row.layer.empty() ? "-" : row.layer.c_str(),
         row.op.empty() ? "-" : row.op.c_str(), row.name.c_str(), static_cast<long long>(row.calls),
         row.seconds * 1e3, share(row.seconds), name_of(row.bound));
    if (row.floor_seconds > 0) {
      line(" %6.2f\n", row.seconds / row.floor_seconds);
    } else {
      line(" %6s\n", "-");
    }
  }
  if (rest_calls > 0) {
    line("%-36s %-28s %-20s %6lld %9.3f %5.1f%%\n", "rows below 0.1%", "", "",
         static_cast<long long>(rest_calls), rest * 1e3, share(rest));
  }
  line("%-36s %-28s %-20s %6lld %9.3f %5.1f%%           %6.2f\n", "all", "", "",
       static_cast<long long>(bill.launches), bill.seconds * 1e3, share(bill.seconds),
       bill.floor_seconds > 0 ? bill.seconds / bill.floor_seconds : 0.0);
  for (const auto& [name, count] : bill.unpriced) {
    line("%lld launches of %s do not say what they move: priced at the gap alone\n",
         static_cast<long long>(count), name.c_str());
  }
  return text;
}

std::string to_json(const Bill& bill, const Machine& machine, const StepFacts& facts) {
  nlohmann::ordered_json json;
  json["machine"] = machine.name;
  json["ms"] = bill.seconds * 1e3;
  json["floor_ms"] = bill.floor_seconds * 1e3;
  json["tokens_per_s"] = bill.seconds > 0 ? static_cast<double>(facts.tokens) / bill.seconds : 0;
  json["flops"] = bill.flops;
  json["peak_bytes"] = facts.peak_bytes;
  json["host_ms"] = facts.host_seconds * 1e3;
  json["unpriced"] = nlohmann::ordered_json(bill.unpriced);
  auto& launches = json["launches"] = nlohmann::ordered_json::array();
  for (const BillRow& row : bill.rows) {
    launches.push_back({{"name", row.name},
                        {"op", row.op},
                        {"layer", row.layer},
                        {"calls", row.calls},
                        {"ms", row.seconds * 1e3},
                        {"bytes", row.bytes},
                        {"flops", row.flops},
                        {"bound", name_of(row.bound)},
                        {"floor_ms", row.floor_seconds * 1e3}});
  }
  return json.dump(1) + "\n";
}

std::string chrome_trace(std::span<const Launch> launches, const Machine& machine) {
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  const auto event = [&](const std::string& name, int row, double begin, double end) {
    events.push_back({{"name", name},
                      {"ph", "X"},
                      {"pid", 0},
                      {"tid", row},
                      {"ts", begin * 1e6},
                      {"dur", (end - begin) * 1e6}});
  };
  const auto title = [&](int row, const char* name) {
    events.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", 0},
                      {"tid", row},
                      {"args", {{"name", name}}}});
  };
  constexpr int kLayers = 0, kOps = 1, kKernels = 2;
  title(kLayers, "layers");
  title(kOps, "ops");
  title(kKernels, "kernels");
  double now = 0, layer_begin = 0, op_begin = 0;
  for (size_t i = 0; i < launches.size(); ++i) {
    const Launch& launch = launches[i];
    const Price one = price(launch, machine);
    event(launch.name, kKernels, now, now + one.seconds);
    events.back()["args"] = {{"op", launch.op},
                             {"layer", launch.layer},
                             {"request", launch.request},
                             {"bound", name_of(one.bound)},
                             {"floor_us", one.floor_seconds * 1e6},
                             {"bytes", moved_bytes(launch)},
                             {"flops", counted_flops(launch)}};
    now += one.seconds;
    const bool last = i + 1 == launches.size();
    const bool layer_ends = last || launches[i + 1].layer != launch.layer;
    if (layer_ends || launches[i + 1].op != launch.op) {
      if (!launch.op.empty()) event(launch.op, kOps, op_begin, now);
      op_begin = now;
    }
    if (layer_ends) {
      if (!launch.layer.empty()) event(launch.layer, kLayers, layer_begin, now);
      layer_begin = now;
    }
  }
  return nlohmann::ordered_json{{"traceEvents", std::move(events)}}.dump() + "\n";
}

}  // namespace tessera::gpu::dry
