// Gathers the whole tensors of a sharded state to rank 0, one after the other.
//
//     const StateDict whole = full_state_dict(model.state_dict());  // on rank 0; others: empty
//
// A DTensor is gathered to rank 0 only, axis by axis: besides what it keeps rank 0 holds at most
// one whole tensor at a time (none if rows or flat shards are gathered), another rank at most what
// it gathers for its own rows or columns of the mesh.
#pragma once

#include <functional>
#include <string>

#include <tessera/core/state/weight_files.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// On rank 0 of the group: every entry whole, on the CPU, tied ones (TiedNames) as one tensor; plain
// CPU tensors share memory. Empty on other ranks. Collective if an entry is a DTensor: all ranks
// pass the same names. On all ranks ConfigError for a DTensor whose mesh is not the ranks of the
// group in their order, UnsupportedError for a Partial, DeviceError for one on the meta device.
StateDict full_state_dict(const StateDict& state, Group& group = world());

// The same without keeping the tensors: `body` runs on rank 0 and reads the whole tensors that it
// needs, in any order; the others serve it until it returns. All ranks throw the error of `body`,
// named `what`. Collective as above; if no entry is a DTensor the ranks only agree on the end.
void with_whole_tensors(const StateDict& state, Group& group, const std::string& what,
                        const std::function<void(const WholeTensor& whole)>& body);

}  // namespace tessera::distributed
