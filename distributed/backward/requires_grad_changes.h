// The parameters of a model that require grad, as agreed by its ranks. Internal.
//
// [Note: changed flags] Ranks that train different parameters would reduce different gradients.
// Changes since the last agreement are added to the tags of the next regular calls, and tags are
// compared before data moves: ranks with the same changes make the same calls, and otherwise all
// raise, with the name of the parameter in the call of the rank that differs. So a change needs no
// extra call. The end of a backward that reduced is the agreement.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/state/state_dict.h>

namespace tessera::distributed {

class RequiresGradChanges {
 public:
  RequiresGradChanges() = default;
  // Whose flags the ranks have compared.
  explicit RequiresGradChanges(NamedTensors parameters);

  // Reads the flags and returns whether any has changed since the last read. One comparison a
  // parameter.
  bool look();
  // The text for the tags of calls, from the flags of the last read: "" if they are the agreed
  // ones, else "; 'head.weight' is frozen here: set requires_grad alike on all ranks".
  const std::string& text() const { return text_; }
  // All ranks have made the same call with it.
  void agree();

 private:
  NamedTensors parameters_;
  std::vector<bool> agreed_, seen_;
  std::string text_;
};

}  // namespace tessera::distributed
