#include <tessera/data/token_dataset.h>

#include <algorithm>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>

namespace tessera::data {
namespace {

// Copies ids [start, start + context] apart into inputs and targets.
void copy_window(const TokenArray& tokens, int64_t start, int64_t context, int64_t* inputs,
                 int64_t* targets) {
  tokens.copy(start, context, inputs);
  std::copy(inputs + 1, inputs + context, targets);
  tokens.copy(start + context, 1, targets + context - 1);
}

}  // namespace

RandomWindows::RandomWindows(TokenArray tokens, int64_t context, uint64_t seed, int64_t rows,
                             int64_t steps)
    : tokens_(std::move(tokens)), context_(context), seed_(seed), rows_(rows), steps_(steps) {
  constexpr std::string_view kWhere = "RandomWindows";
  TS_CHECK(context >= 1, kWhere, "the context must be at least 1; got ", context, ".");
  TS_CHECK(context < tokens_.size(), kWhere, "a window takes context + 1 ids; the context is ",
           context, " and there are ", tokens_.size(),
           " ids; give a longer text or a shorter context.");
  TS_CHECK(rows >= 1 && steps >= 0 && steps <= (int64_t{1} << 62) / rows, kWhere,
           "rows must be at least 1, and rows * steps at most 2^62; got ", rows, " and ", steps,
           ".");
}

int64_t RandomWindows::start(int64_t step, int64_t row) const {
  const auto bits = philox4x32(seed_, static_cast<uint64_t>(step), static_cast<uint64_t>(row));
  const uint64_t number = uint64_t{bits[0]} << 32 | bits[1];
  const auto places = static_cast<uint64_t>(tokens_.size() - context_);
  return static_cast<int64_t>(static_cast<unsigned __int128>(number) * places >> 64);
}

TokenExample RandomWindows::get(int64_t index) const {
  detail::check_index(index, size(), "RandomWindows");
  TokenExample example{raw::empty({context_}, kI64), raw::empty({context_}, kI64)};
  copy_window(tokens_, start(index / rows_, index % rows_), context_,
              example.inputs.data_as<int64_t>(), example.targets.data_as<int64_t>());
  return example;
}

TokenExample RandomWindows::batch(int64_t step, int64_t rows, int64_t first_row) const {
  TS_CHECK(step >= 0 && rows >= 1 && first_row >= 0, "RandomWindows",
           "a batch has at least one row of a step from 0 on; got step ", step, ", ", rows,
           " rows from row ", first_row, ".");
  TokenExample out{raw::empty({rows, context_}, kI64), raw::empty({rows, context_}, kI64)};
  for (int64_t row = 0; row < rows; ++row) {
    copy_window(tokens_, start(step, first_row + row), context_,
                out.inputs.data_as<int64_t>() + row * context_,
                out.targets.data_as<int64_t>() + row * context_);
  }
  return out;
}

ConsecutiveWindows::ConsecutiveWindows(TokenArray tokens, int64_t context)
    : tokens_(std::move(tokens)), context_(context) {
  TS_CHECK(context >= 1, "ConsecutiveWindows", "the context must be at least 1; got ", context,
           ".");
}

int64_t ConsecutiveWindows::size() const {
  return num_targets() / context_ + (num_targets() % context_ != 0);
}

TokenExample ConsecutiveWindows::get(int64_t index) const {
  detail::check_index(index, size(), "ConsecutiveWindows");
  TokenExample example{raw::empty({context_}, kI64), raw::empty({context_}, kI64)};
  auto* inputs = example.inputs.data_as<int64_t>();
  auto* targets = example.targets.data_as<int64_t>();
  const int64_t begin = index * context_;
  const int64_t count = std::min(context_, num_targets() - begin);
  tokens_.copy(begin, count, inputs);
  tokens_.copy(begin + 1, count, targets);
  std::fill(inputs + count, inputs + context_, 0);
  std::fill(targets + count, targets + context_, kIgnoreTarget);
  return example;
}

}  // namespace tessera::data
