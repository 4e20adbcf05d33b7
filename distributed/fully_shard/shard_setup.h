// What fully_shard() and zero() do alike: finding the parameters of a unit, and the hooks by which
// it runs. Internal.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/distributed/fully_shard/shard_unit.h>
#include <tessera/distributed/fully_shard/unit_schedule.h>

namespace tessera::distributed {

// The parameters of the unit's modules that no unit has taken yet, with all their places; those
// named in `ignored` are left out, which the unit remembers. Throws as fully_shard() says, named
// `where`.
std::vector<ShardedParam> free_parameters(ShardUnit& unit, const std::vector<std::string>& ignored,
                                          std::string_view where);
// Compares names, shapes, dtypes and what requires grad among the ranks of the mesh, and `options`,
// which says in words what else must be alike (DistributedError), and gives all of them rank 0's
// values where `init_sync` says so.
void synchronise_parameters(const std::vector<ShardedParam>& params, Mesh& mesh, bool init_sync,
                            std::string_view where, const std::string& options = {});
// For such options.
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
// UnsupportedError where parts are to move to the host and a parameter lies there.
void check_offload(const std::vector<ShardedParam>& params, OffloadPolicy policy,
                   std::string_view where);
// The axes of a mesh of one or two.
ShardRanks shard_ranks(Mesh& mesh, std::string_view where);

// By dtype and device, in the order of the first ones.
std::vector<std::vector<ShardedParam>> by_dtype(std::vector<ShardedParam> params);

// A call of a unit's module for as long as it lives. `last`: of the unit's modules.
std::shared_ptr<void> begin_call(const std::shared_ptr<ShardUnit>& unit, bool last);

// The modules' calls gather and release the unit from now on.
void install_unit(const std::shared_ptr<ShardUnit>& unit);
// The schedule of all units under `root`, made where there is none.
std::shared_ptr<UnitSchedule> schedule_under(const std::shared_ptr<ShardUnit>& root);
std::vector<std::shared_ptr<ShardUnit>> units_under(const std::vector<nn::ModuleBase*>& modules);

}  // namespace tessera::distributed
