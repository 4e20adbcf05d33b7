#include <tessera/distributed/transport/backend.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::distributed {

bool agree(std::span<const CallHeader> headers) {
  return std::ranges::all_of(headers, [&](const CallHeader& header) {
    const CallHeader& first = headers.front();
    return header.operation != Operation::kInvalid && header.operation == first.operation &&
           header.dtype == first.dtype && header.reduce == first.reduce &&
           header.mode == first.mode && header.root == first.root && header.count == first.count &&
           header.sequence == first.sequence && header.onto == first.onto &&
           header.purpose == first.purpose;
  });
}

std::string describe_mismatch(std::span<const CallText> texts) {
  // Ranks that called the same are named together.
  std::string message = "ranks call different things here: ";
  std::vector<bool> told(texts.size());
  for (size_t r = 0; r < texts.size(); ++r) {
    if (told[r]) continue;
    const std::string_view text(texts[r].data());
    if (r > 0) message += "; ";
    std::string ranks;
    for (size_t other = r; other < texts.size(); ++other) {
      if (text != texts[other].data()) continue;
      told[other] = true;
      ranks += (ranks.empty() ? "" : ",") + std::to_string(other);
    }
    message += "rank " + ranks + ": " + std::string(text);
  }
  return message + "; every rank must call the same collectives in the same order";
}

bool agree(const Call& send, const Call& recv) {
  return !send.refused && !recv.refused && send.header.dtype == recv.header.dtype &&
         send.header.count == recv.header.count;
}

std::string describe_mismatch(const Call& send, const Call& recv) {
  for (const Call* call : {&send, &recv}) {
    if (call->refused) return std::string("no message passes here: ") + call->text.data();
  }
  return detail::concatenate("send and recv do not match: ", send.text.data(), " and ",
                             recv.text.data(), "; both must name the same dtype and size");
}

std::string describe_sizes(int sender, int64_t sent, int receiver, int64_t expected, DType dtype) {
  const int64_t element = size_of(dtype);
  return detail::concatenate("sizes differ: rank ", sender, " sends ", dtype, "[", sent / element,
                             "] to rank ", receiver, ", which expects ", dtype, "[",
                             expected / element, "]; both ranks must give tensors of one size");
}

}  // namespace tessera::distributed
