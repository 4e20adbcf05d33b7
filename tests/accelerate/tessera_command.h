// The tessera command as users run it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "finished_process.h"

namespace tessera {

inline const std::string kTesseraCommand = TESSERA_COMMAND;

// Without the user's own settings.
inline FinishedProcess tessera_command(std::vector<std::string> words,
                                       launch::Environment changes = {}) {
  words.insert(words.begin(), kTesseraCommand);
  changes.emplace("XDG_CONFIG_HOME", "/nonexistent");
  return run_process(words, changes);
}

// Answers to questions, by a shell.
inline FinishedProcess tessera_with_input(const std::string& input, const std::string& words) {
  return run_process({"sh", "-c", "printf '" + input + "' | " + kTesseraCommand + " " + words},
                     {{"XDG_CONFIG_HOME", "/nonexistent"}});
}

}  // namespace tessera
