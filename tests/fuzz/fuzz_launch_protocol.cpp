#include <tessera/accelerate/launch/protocol.h>
#include <tessera/distributed/rendezvous/job.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::launch;

// What can be read is what it writes itself.
template <class Report, class Use>
void round_trip(std::string_view text, Use use) {
  fuzz::feed([&] {
    const Report report = Report::from_text(text);
    use(report);
    const std::string written = report.to_text();
    fuzz::require(Report::from_text(written).to_text() == written,
                  "a report reads as it was written");
  });
}

FUZZ(text) {
  round_trip<AgentFacts>(text, [](const AgentFacts& facts) {
    preflight({facts, facts});
    lay_out({facts});
  });
  round_trip<ExitReport>(text, [](const ExitReport& report) {
    report.status.describe();
    fuzz::require(report.status.shell_code() >= 0 && report.status.shell_code() < 256,
                  "a code of a shell");
  });
  round_trip<distributed::RankFailure>(
      text, [](const distributed::RankFailure& failure) { failure.describe(); });
  fuzz::feed([&] {
    const Layout layout = Layout::from_text(text);
    const int ranks = static_cast<int>(std::min<size_t>(layout.node_of_rank.size(), 64));
    for (int rank = 0; rank < ranks; ++rank) {
      fuzz::require(layout.local_rank(rank) < layout.local_world_size(rank), "a rank of its node");
    }
    fuzz::require(Layout::from_text(layout.text()).text() == layout.text(), "layouts round-trip");
  });
}
