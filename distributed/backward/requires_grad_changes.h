// Which parameters of a model require grad, as its ranks have agreed on it. Internal.
//
// [Note: changed flags] Ranks that train different parameters would reduce different things, or
// what some of them have alone. What has changed since the ranks agreed stands in the tags of the
// calls that come anyway, and tags are compared before data moves: ranks that changed the same call
// the same, and where one did not all raise, with the name of the parameter in what that rank
// called. So a change costs no call. The end of a backward that reduced is the agreement.
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

  // Reads the flags: whether any has changed since it last did. A comparison a parameter.
  bool look();
  // Of the flags as they were read last: "" where they are those that the ranks agreed on, else
  // what the tags of calls say: "; 'head.weight' is frozen here: set requires_grad alike on all
  // ranks".
  const std::string& text() const { return text_; }
  // All ranks have called the same with it.
  void agree();

 private:
  NamedTensors parameters_;
  std::vector<bool> agreed_, seen_;
  std::string text_;
};

}  // namespace tessera::distributed
