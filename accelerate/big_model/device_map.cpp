#include <tessera/accelerate/big_model/device_map.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include <tessera/core/environment.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/state/weight_files.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kMap = "device_map";

using Sizes = std::map<std::string, int64_t>;
using Weight = ModelTree::Weight;

// What is still to be placed: a module, or a weight of a module that was divided.
struct Item {
  std::string name;         // dotted
  const ModelTree* module;  // null for a weight
};
using Items = std::deque<Item>;

// `name` lies in `module`, or is it.
bool lies_in(std::string_view name, std::string_view module) {
  return module.empty() ||
         (name.starts_with(module) && (name.size() == module.size() || name[module.size()] == '.'));
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// In Accelerate's order: parameters before modules. A module that is divided leaves its own buffers
// out, which stay where its call runs.
std::vector<Item> parts_of(const std::string& name, const ModelTree& module, bool with_buffers) {
  std::vector<Item> parts;
  for (const Weight& weight : module.weights) {
    if (!weight.is_buffer) parts.push_back({joined(name, weight.name), nullptr});
  }
  for (const ModelTree& child : module.children) {
    parts.push_back({joined(name, child.name), &child});
  }
  if (with_buffers) {
    for (const Weight& weight : module.weights) {
      if (weight.is_buffer) parts.push_back({joined(name, weight.name), nullptr});
    }
  }
  return parts;
}

// Groups of names of one tensor, the first name first.
std::vector<std::vector<std::string>> tied_groups(const ModelTree& tree) {
  std::map<std::string, std::vector<std::string>> others;
  const auto visit = [&](const auto& self, const std::string& prefix,
                         const ModelTree& module) -> void {
    for (const Weight& weight : module.weights) {
      if (!weight.tied_to.empty() && !weight.is_buffer) {
        others[weight.tied_to].push_back(joined(prefix, weight.name));
      }
    }
    for (const ModelTree& child : module.children) self(self, joined(prefix, child.name), child);
  };
  visit(visit, "", tree);
  std::vector<std::vector<std::string>> groups;
  for (auto& [first, names] : others) {
    names.push_back(first);
    std::ranges::sort(names);  // Accelerate's order
    groups.push_back(std::move(names));
  }
  return groups;
}

// One run of the allocation, which follows Accelerate's step by step, since its maps are the
// specification: a greedy walk with one look at the largest layer that is left.
class Allocation {
 public:
  Allocation(const ModelTree& model, const DeviceMapOptions& options, MaxMemory limits)
      : options_(options),
        limits_(std::move(limits)),
        sizes_(compute_module_sizes(model, options.dtype)),
        tied_(tied_groups(model)) {
    if (limits_.empty() || !limits_.back().place.is_disk()) {
      limits_.emplace_back(WeightPlace::disk(), int64_t{0});
    }
    for (const Item& part : parts_of("", model, true)) items_.push_back(part);
    find_largest();
  }

  DeviceMap run() {
    while (!items_.empty()) {
      const Item item = items_.front();
      items_.pop_front();
      forget_largest(item.name);
      treat(item);
    }
    return std::move(map_);
  }

 private:
  struct Ties {
    int64_t bytes = 0;  // of the module with those that are tied to it
    std::vector<Item> modules = {};
    bool any = false;
  };

  int64_t size(const std::string& name) const {
    const auto found = sizes_.find(name);
    return found == sizes_.end() ? 0 : found->second;
  }
  bool can_split(const Item& item) const {
    return item.module != nullptr && !item.module->children.empty() &&
           std::ranges::find(options_.no_split, item.module->class_name) == options_.no_split.end();
  }
  bool is_main(size_t device) const {  // passes what lies elsewhere through
    const WeightPlace& place = limits_[device].place;
    return !place.is_disk() && (place.device().is_cpu() || device == 0);
  }

  // The largest module that stays together among those that are left.
  void find_largest(bool weights_too = true) {
    largest_ = 0;
    largest_names_.clear();
    std::deque<Item> open(items_.begin(), items_.end());
    while (!open.empty()) {
      const Item item = open.front();
      open.pop_front();
      if (item.module == nullptr && !weights_too) continue;
      if (can_split(item)) {
        const auto& children = item.module->children;
        for (auto child = children.rbegin(); child != children.rend(); ++child) {
          open.push_front({joined(item.name, child->name), &*child});
        }
      } else if (size(item.name) > largest_) {
        largest_ = size(item.name);
        largest_names_ = {item.name};
      } else if (size(item.name) == largest_) {
        largest_names_.push_back(item.name);
      }
    }
  }
  void forget_largest(const std::string& name) {
    std::erase_if(largest_names_, [&](const std::string& one) { return lies_in(one, name); });
    if (largest_names_.empty()) find_largest(false);
  }

  Ties ties_of(const std::string& name, const Items& left) const {
    Ties ties{.bytes = size(name)};
    for (const auto& group : tied_) {
      const auto inside = [&](const std::string& one) { return lies_in(one, name); };
      if (std::ranges::none_of(group, inside) || std::ranges::all_of(group, inside)) continue;
      for (const std::string& other : group) {
        if (inside(other)) continue;
        const auto holder = std::ranges::find_if(left, [&](const Item& item) {
          return item.name != other && lies_in(other, item.name);
        });
        if (holder == left.end()) continue;
        ties.any = true;
        ties.modules.push_back(*holder);
        ties.bytes += size(holder->name) - size(other);
      }
    }
    return ties;
  }

  void put(const std::string& name) {
    const WeightPlace& place = limits_[device_].place;
    const auto known = std::ranges::find(map_, name, [](const auto& entry) { return entry.first; });
    if (known != map_.end()) {
      known->second = place;
    } else {
      map_.emplace_back(name, place);
    }
  }
  void replace(size_t index, const std::vector<Item>& parts) {
    const auto at = items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(index));
    items_.insert(at, parts.begin(), parts.end());
  }

  void treat(const Item& item) {
    const bool on_disk = limits_[device_].place.is_disk();
    const int64_t reserved = is_main(device_) ? largest_ : 0;
    const int64_t room = on_disk ? 0 : limits_[device_].bytes - reserved - used_;
    const Ties ties = ties_of(item.name, items_);
    if (on_disk || ties.bytes <= room) {
      used_ += ties.bytes;
      put(item.name);
      for (const Item& tied : ties.modules) {
        std::erase_if(items_, [&](const Item& left) { return left.name == tied.name; });
        put(tied.name);
      }
      return;
    }
    const int64_t own = size(item.name);
    if (ties.any && own <= room) {  // a smaller part of what is tied to it may fit
      for (const Item& tied : ties.modules) {
        if (!can_split(tied)) continue;
        const auto at = std::ranges::find(items_, tied.name, &Item::name);
        replace(static_cast<size_t>(at - items_.begin()), parts_of(tied.name, *tied.module, false));
        items_.push_front(item);
        find_largest(false);
        return;
      }
    }
    if (own >= room && can_split(item)) {
      const auto parts = parts_of(item.name, *item.module, false);
      items_.insert(items_.begin(), parts.begin(), parts.end());
      find_largest(false);
      return;
    }
    if (used_ == 0 && options_.fallback_allocation && fall_back(item, ties)) return;
    items_.push_front(item);
    ++device_;
    used_ = 0;
  }

  // Puts a module that fits before `item`.
  bool fall_back(const Item& item, const Ties& ties) {
    const int64_t room = limits_[device_].bytes - std::max(largest_, ties.bytes);
    if (room < 0) return false;
    Items open = items_;
    std::string found;
    bool any = false;
    while (!open.empty() && !any) {
      const Item next = open.front();
      open.pop_front();
      if (ties_of(next.name, open).bytes <= room) {
        found = next.name;
        any = true;
      } else if (can_split(next)) {
        const auto parts = parts_of(next.name, *next.module, false);
        open.insert(open.begin(), parts.begin(), parts.end());
      }
    }
    if (!any) return false;
    for (size_t dot = found.find('.'); dot != std::string::npos; dot = found.find('.', dot + 1)) {
      const auto parent = std::ranges::find(items_, found.substr(0, dot), &Item::name);
      if (parent != items_.end()) {
        const Item divided = *parent;
        replace(static_cast<size_t>(parent - items_.begin()),
                parts_of(divided.name, *divided.module, false));
      }
    }
    const auto at = std::ranges::find(items_, found, &Item::name);
    const Item fitting = *at;
    items_.erase(at);
    items_.push_front(item);
    items_.push_front(fitting);
    return true;
  }

  const DeviceMapOptions& options_;
  MaxMemory limits_;  // the disk last
  Sizes sizes_;
  std::vector<std::vector<std::string>> tied_;
  Items items_ = {};
  DeviceMap map_ = {};
  size_t device_ = 0;
  int64_t used_ = 0;  // on that device
  int64_t largest_ = 0;
  std::vector<std::string> largest_names_ = {};
};

// Entries that lie in one module and in one place become that module's entry.
void clean(DeviceMap& map, const std::string& module) {
  std::vector<size_t> inside;
  for (size_t i = 0; i < map.size(); ++i) {
    if (module.empty() || map[i].first.starts_with(module + ".")) inside.push_back(i);
  }
  const bool together = inside.size() > 1 && std::ranges::all_of(inside, [&](size_t i) {
                          return map[i].second == map[inside.front()].second;
                        });
  if (together) {
    map[inside.front()].first = module;
    for (size_t i = inside.size() - 1; i > 0; --i) {
      map.erase(map.begin() + static_cast<std::ptrdiff_t>(inside[i]));
    }
    return;
  }
  std::set<std::string> children;
  for (const auto& [name, place] : map) {
    if (!module.empty() && !name.starts_with(module + ".")) continue;
    if (name.size() <= module.size()) continue;
    const size_t end = name.find('.', module.empty() ? 0 : module.size() + 1);
    if (end != std::string::npos) children.insert(name.substr(0, end));
  }
  for (const std::string& child : children) clean(map, child);
}

int64_t available_host_bytes() {
  int64_t bytes = 0;
  PlainText<std::ifstream> in("/proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("MemAvailable:"))
      bytes = std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
  }
  return bytes;
}

// Accelerate's get_module_leaves: names with a dot in front of no other one.
std::vector<std::string> leaves_of(const Sizes& sizes) {
  std::set<std::string> parents;
  for (const auto& [name, bytes] : sizes) {
    const size_t dot = name.rfind('.');
    if (dot != std::string::npos) parents.insert(name.substr(0, dot));
  }
  std::vector<std::string> leaves;
  for (const auto& [name, bytes] : sizes) {
    if (!name.empty() && !parents.contains(name)) leaves.push_back(name);
  }
  return leaves;
}

void collect_classes(const ModelTree& tree, const std::string& prefix,
                     const std::vector<std::string>& classes, const Sizes& sizes,
                     std::map<std::string, int64_t>& found) {
  if (!prefix.empty() && std::ranges::find(classes, tree.class_name) != classes.end()) {
    const auto size = sizes.find(prefix);
    if (size != sizes.end()) found.try_emplace(tree.class_name, size->second);
  }
  for (const ModelTree& child : tree.children) {
    collect_classes(child, joined(prefix, child.name), classes, sizes, found);
  }
}

}  // namespace

WeightPlace WeightPlace::parse(std::string_view text) {
  if (text == "disk") return disk();
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error == std::errc() && end == text.data() + text.size() && index >= 0) return cuda(index);
  try {
    const Device device = parse_device(text);
    if (!device.is_meta()) return device;
  } catch (const ValueError&) {
  }
  TS_THROW(ConfigError, kMap, "a place is cpu, disk, cuda:N or the number of a GPU; got \"", text,
           "\"");
}

std::string WeightPlace::describe() const {
  return is_disk() ? "disk" : tessera::detail::concatenate(*device_);
}

MemoryLimit::MemoryLimit(WeightPlace at, std::string_view limit)
    : place(at), bytes(parse_byte_size(limit)) {}

MaxMemory parse_max_memory(std::string_view text) {
  MaxMemory limits;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    TS_CHECK_AS(ConfigError, equals != std::string_view::npos, kMap,
                "max_memory is PLACE=BYTES, as in cuda:0=10GB,cpu=30GB; got \"", part, "\"");
    limits.emplace_back(WeightPlace::parse(part.substr(0, equals)), part.substr(equals + 1));
    begin = end + 1;
  }
  return get_max_memory(std::move(limits));
}

MaxMemory get_max_memory() {
  MaxMemory limits;
  for (int i = 0; i < gpu::device_count(); ++i) {
    limits.emplace_back(cuda(i), gpu::free_memory(i));
  }
  limits.emplace_back(kCpu, available_host_bytes());
  return limits;
}

MaxMemory get_max_memory(MaxMemory limits) {
  const auto rank = [](const MemoryLimit& limit) {
    if (limit.place.is_disk()) return std::pair(2, 0);
    const Device& device = limit.place.device();
    return device.is_cuda() ? std::pair(0, device.index) : std::pair(1, 0);
  };
  std::ranges::stable_sort(limits, {}, rank);
  for (size_t i = 0; i < limits.size(); ++i) {
    TS_CHECK_AS(ConfigError, limits[i].bytes >= 0, kMap, "max_memory of ",
                limits[i].place.describe(), " is negative: ", limits[i].bytes);
    TS_CHECK_AS(ConfigError, limits[i].place.is_disk() || !limits[i].place.device().is_meta(), kMap,
                "meta holds no weights; max_memory is of GPUs, cpu and disk");
    TS_CHECK_AS(ConfigError, i == 0 || limits[i].place != limits[i - 1].place, kMap,
                "max_memory has ", limits[i].place.describe(), " twice");
  }
  return limits;
}

std::optional<WeightPlace> place_of(const DeviceMap& map, std::string_view name) {
  const std::pair<std::string, WeightPlace>* nearest = nullptr;
  for (const auto& entry : map) {
    if (lies_in(name, entry.first) &&
        (nearest == nullptr || entry.first.size() >= nearest->first.size())) {
      nearest = &entry;
    }
  }
  if (nearest == nullptr) return {};
  return nearest->second;
}

DeviceMap infer_auto_device_map(const ModelTree& model, const DeviceMapOptions& options) {
  MaxMemory limits =
      options.max_memory.empty() ? get_max_memory() : get_max_memory(options.max_memory);
  DeviceMap map = Allocation(model, options, std::move(limits)).run();
  if (options.clean_result) clean(map, "");
  return map;
}

DeviceMap infer_auto_device_map(nn::ModuleBase& model, const DeviceMapOptions& options) {
  return infer_auto_device_map(ModelTree::of(model), options);
}

MaxMemory get_balanced_memory(const ModelTree& model, const BalancedMemoryOptions& options) {
  const bool chosen = !options.max_memory.empty();
  MaxMemory limits = chosen ? get_max_memory(options.max_memory) : get_max_memory();
  const auto is_gpu = [](const MemoryLimit& limit) {
    return !limit.place.is_disk() && limit.place.device().is_cuda() && limit.bytes > 0;
  };
  const auto gpus = std::ranges::count_if(limits, is_gpu);
  if (gpus == 0) return limits;
  const bool low_zero = options.low_zero && gpus > 1;
  if (gpus == 1 && !chosen) {  // a tenth is left for what the calls need
    MemoryLimit& only = *std::ranges::find_if(limits, is_gpu);
    only.bytes = only.bytes / 10 * 9;
  }
  Sizes sizes = compute_module_sizes(model, options.dtype);
  const int64_t total = sizes[""];
  std::map<std::string, int64_t> whole;  // a module of each class that stays together
  collect_classes(model, "", options.no_split, sizes, whole);
  int64_t block = 0;
  for (const auto& [name, bytes] : whole) block = std::max(block, bytes);
  for (const std::string& weight : leaves_of(sizes)) sizes.erase(weight);
  const std::vector<std::string> layers = leaves_of(sizes);
  int64_t sum = 0;
  for (const std::string& layer : layers) sum += sizes[layer];
  const int64_t mean = sum / std::max<int64_t>(std::ssize(layers), 1);
  // Each device gets somewhat less than its share, as layers are not divided: room for one more.
  const int64_t share = total / (low_zero ? gpus - 1 : gpus) +
                        static_cast<int64_t>(1.25 * static_cast<double>(std::max(block, mean)));
  std::vector<MemoryLimit*> on_gpus;
  for (MemoryLimit& limit : limits) {
    if (is_gpu(limit)) on_gpus.push_back(&limit);
  }
  for (size_t i = 0; i + 1 < on_gpus.size(); ++i) {  // the last one takes what is left
    if (low_zero && on_gpus[i]->place.device().index == 0) continue;
    on_gpus[i]->bytes = std::min(share, on_gpus[i]->bytes);
  }
  if (low_zero) {
    int64_t others = 0;
    for (size_t i = 1; i < on_gpus.size(); ++i) others += on_gpus[i]->bytes;
    on_gpus[0]->bytes = std::min(std::max<int64_t>(0, total - others), on_gpus[0]->bytes);
  }
  return limits;
}

MaxMemory get_balanced_memory(nn::ModuleBase& model, const BalancedMemoryOptions& options) {
  return get_balanced_memory(ModelTree::of(model), options);
}

void check_device_map(nn::ModuleBase& model, const DeviceMap& map) {
  std::set<std::string> known = {""}, seen;
  for (const nn::NamedModule& module : model.named_modules()) known.insert(module.name);
  std::vector<nn::ParameterPlace> places = model.parameter_places();
  for (nn::ParameterPlace& place : model.buffer_places()) places.push_back(place);
  for (const nn::ParameterPlace& place : places) known.insert(place.name);
  for (const auto& [name, place] : map) {
    TS_CHECK_AS(ConfigError, known.contains(name), kMap, "the model has no \"", name,
                "\"; a device map has dotted names of modules");
    TS_CHECK_AS(ConfigError, seen.insert(name).second, kMap, "\"", name, "\" stands twice");
  }
  std::string missing;
  std::map<const TensorImpl*, std::pair<std::string, WeightPlace>> first;
  for (const nn::ParameterPlace& weight : places) {
    if (!weight.tensor->defined()) continue;
    const std::optional<WeightPlace> place = place_of(map, weight.name);
    if (!place) {
      missing += (missing.empty() ? "" : ", ") + weight.name;
      continue;
    }
    const auto [at, is_new] =
        first.try_emplace(weight.tensor->impl(), std::pair(weight.name, *place));
    TS_CHECK_AS(ConfigError, is_new || at->second.second == *place, kMap, "\"", weight.name,
                "\" and \"", at->second.first, "\" are one tensor and cannot lie on ",
                place->describe(), " and ", at->second.second.describe(),
                "; give both modules one place");
  }
  TS_CHECK_AS(ConfigError, missing.empty(), kMap, "no place is given for ", missing,
              "; an entry \"\" is the place of all that has no other one");
}

}  // namespace tessera::accelerate
