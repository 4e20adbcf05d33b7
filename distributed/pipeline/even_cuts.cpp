#include <algorithm>
#include <optional>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/distributed/pipeline/staged_model_impl.h>

namespace tessera::distributed {

std::vector<double> arithmetic_of(nn::ModuleBase& model) {
  std::vector<double> costs;
  for (const auto& [name, module] : model.named_modules()) {
    double cost = 0;
    if (module->type_name() != "Embedding") {
      for (const auto& [parameter, tensor] : module->parameter_places()) {
        const bool own = parameter.find('.') == std::string::npos;
        if (own && tensor->defined() && whole_shape(*tensor).size() > 1) {
          cost += static_cast<double>(numel_of(whole_shape(*tensor)));
        }
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

std::vector<std::string> even_cuts(nn::ModuleBase& model, std::span<nn::ModuleBase* const> blocks,
                                   int stages) {
  const auto count = static_cast<size_t>(stages);
  TS_CHECK_AS(ConfigError, blocks.size() >= count, kStages,
              "pp_size x pp_stages_per_rank asks for ", stages, " stages, and ", model.type_name(),
              " has ", blocks.size(),
              " blocks to begin them with; take fewer stages, or name modules in pp_cuts");
  const std::vector<double> costs = arithmetic_of(model);
  // Of each block with what follows it up to the next one.
  std::vector<double> segments;
  std::vector<std::string> names;
  double before = 0;
  const std::vector<nn::NamedModule> modules = model.named_modules();
  for (size_t i = 0; i < modules.size(); ++i) {
    if (std::ranges::find(blocks, modules[i].module) != blocks.end()) {
      segments.push_back(std::exchange(before, 0));
      names.push_back(modules[i].name);
    }
    (segments.empty() ? before : segments.back()) += costs[i];
  }
  // best[s][n]: the first n segments in s + 1 stages: the largest stage, then the sum of squares.
  struct Best {
    double largest = 0, squares = 0;
    size_t begin = 0;  // of the last stage
    bool operator<(const Best& other) const {
      return std::pair(largest, squares) < std::pair(other.largest, other.squares);
    }
  };
  const size_t total = segments.size();
  std::vector<std::vector<Best>> best(count, std::vector<Best>(total + 1));
  const auto sum = [&](size_t begin, size_t end) {
    double cost = 0;
    for (size_t i = begin; i < end; ++i) cost += segments[i];
    return cost;
  };
  for (size_t s = 0; s < count; ++s) {
    for (size_t n = s + 1; n <= total; ++n) {
      std::optional<Best> found;
      for (size_t begin = s; begin < n; ++begin) {
        if (s == 0 && begin > 0) break;
        const double own = sum(begin, n);
        const Best rest = s == 0 ? Best{} : best[s - 1][begin];
        const Best one{std::max(rest.largest, own), rest.squares + own * own, begin};
        if (!found || one < *found) found = one;
      }
      best[s][n] = *found;
    }
  }
  std::vector<std::string> cuts;
  size_t end = total;
  for (size_t s = count; s-- > 1;) {
    end = best[s][end].begin;
    cuts.insert(cuts.begin(), names[end]);
  }
  return cuts;
}

}  // namespace tessera::distributed
