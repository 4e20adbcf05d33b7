// Categories of characters as the tokenizers package has them: its tables are of Unicode 8
// (unicode_categories) and 9 (unicode_normalization_alignments), older than ICU's. What came later
// has no category, and some characters have changed theirs. Included by this folder's .cpp files.
#pragma once

namespace tessera::data {

bool is_package_control(char32_t c);          // Cc, Cf, Co of Unicode 8
bool is_package_punctuation(char32_t c);      // P of Unicode 8
bool is_package_nonspacing_mark(char32_t c);  // Mn of Unicode 8
bool is_package_mark(char32_t c);             // M of Unicode 9
// Whether Unicode 9 has it: later ones have no decomposition and no combining class.
bool is_package_normalized(char32_t c);

}  // namespace tessera::data
