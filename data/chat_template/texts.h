// Functions on texts, as Python's methods of str. Included by this folder's .cpp files only.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data::jinja {

// Bytes at which a part begins, from `from` on. Linear, unlike std::string_view's in the worst case.
size_t find_part(std::string_view text, std::string_view part, size_t from = 0);
size_t find_last_part(std::string_view text, std::string_view part);
// At most `most` times, -1: always.
std::string replaced(std::string_view text, std::string_view old, std::string_view with,
                     int64_t most);
// No separator: between white space.
std::vector<std::string_view> split(std::string_view text,
                                    std::optional<std::string_view> separator, int64_t most);
std::vector<std::string_view> split_from_right(std::string_view text,
                                               std::optional<std::string_view> separator,
                                               int64_t most);
// Lines by Python's splitlines(), which knows more ends than \n.
std::vector<std::string_view> python_lines(std::string_view text, bool keep_ends);
// Without the characters of a set at its ends; no set: white space.
std::string_view strip(std::string_view text, std::optional<std::string_view> set, bool left,
                       bool right);
// The first character in upper case, the others in lower case.
std::string capitalized(std::string_view text);
std::string title_of_filter(std::string_view text);  // jinja2's, by spaces and brackets
std::string title_of_method(std::string_view text);  // Python's, by letters

}  // namespace tessera::data::jinja
