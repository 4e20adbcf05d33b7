// Setup that fully_shard() and zero() share: the parameters of a unit and the hooks that run it.
// Internal.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/fully_shard/shard_unit.h>
#include <tessera/distributed/fully_shard/unit_schedule.h>

namespace tessera::distributed {

// The parameters of the unit's modules that no unit has taken yet, with all their places. The unit
// remembers those named in `ignored`, which are left out. Those that are parts along
// other axes of the mesh have ShardedParam::across. Throws as fully_shard(), named `where`.
std::vector<ShardedParam> free_parameters(ShardUnit& unit, const std::vector<std::string>& ignored,
                                          std::string_view where);
// Where the parameter is a part along other axes of the mesh already: notes how, and where its
// gradient is a summand there, cuts it along these axes, too. UnsupportedError for what cannot be
// cut once more.
void lie_across(ShardedParam& param, Mesh& mesh, std::string_view where);
// Compares names, shapes, dtypes, requires_grad and `options`, a text of other settings, among the
// ranks of the mesh (DistributedError). With `init_sync` all ranks get rank 0's values.
void synchronise_parameters(const std::vector<ShardedParam>& params, Mesh& mesh, bool init_sync,
                            std::string_view where, const std::string& options = {});
// Words for such a text.
inline const char* words_of(GradientAverage average) {
  constexpr const char* kWords[] = {"of ranks", "of the window", "none", "by weight"};
  return kWords[static_cast<size_t>(average)];
}
inline std::string_view words_of(const std::optional<DType>& dtype) {
  return dtype ? name_of(*dtype) : "own";
}
inline const char* words_of(OffloadPolicy policy) {
  constexpr const char* kWords[] = {"none", "optimizer", "parameters"};
  return kWords[static_cast<size_t>(policy)];
}
// UnsupportedError if parts are to move to the host and a parameter is there already.
void check_offload(const std::vector<ShardedParam>& params, OffloadPolicy policy,
                   std::string_view where);
// The axes of a mesh that has one or two.
ShardRanks shard_ranks(Mesh& mesh, std::string_view where);

// Grouped by dtype, device and ranks, in the order of the first members.
std::vector<std::vector<ShardedParam>> by_dtype(std::vector<ShardedParam> params);

// The result represents a call of a unit's module until it is destroyed. `last`: whether the module
// is the unit's last.
std::shared_ptr<void> begin_call(const std::shared_ptr<ShardUnit>& unit, bool last);

// Installs hooks by which the modules' calls gather and release the unit.
void install_unit(const std::shared_ptr<ShardUnit>& unit);
// The schedule of all units under `root`, which is made if there is none.
std::shared_ptr<UnitSchedule> schedule_under(const std::shared_ptr<ShardUnit>& root);
std::vector<std::shared_ptr<ShardUnit>> units_under(const std::vector<nn::ModuleBase*>& modules);

}  // namespace tessera::distributed
