// The whole tensors of a state that lies in parts, on rank 0, one after the other.
//
//     const StateDict whole = full_state_dict(model.state_dict());  // on rank 0; others: empty
//
// A DTensor is gathered to rank 0 alone, axis by axis: beside what it keeps rank 0 holds at most
// one whole tensor at a time (none where rows or runs are cut), another rank at most what it
// gathers for its own rows or columns of the mesh.
#pragma once

#include <functional>
#include <string>

#include <tessera/core/state/weight_files.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// On rank 0 of the group: every entry whole, on the CPU, tied ones (TiedNames) as one tensor; plain
// tensors that lie there share their elements. On other ranks empty. Collective where an entry is a
// DTensor: all ranks give the same names. ConfigError for a DTensor whose mesh is not the ranks of
// the group in their order, UnsupportedError for a Partial, DeviceError for one without bytes
// (meta); on all ranks.
StateDict full_state_dict(const StateDict& state, Group& group = world());

// The same without keeping: `body` runs on rank 0 and takes the wholes that it wants, in any order;
// the others serve it until it returns. What `body` throws all ranks throw, named `what`.
// Collective as above; where no entry is a DTensor the ranks only agree on the end.
void with_whole_tensors(const StateDict& state, Group& group, const std::string& what,
                        const std::function<void(const WholeTensor& whole)>& body);

}  // namespace tessera::distributed
