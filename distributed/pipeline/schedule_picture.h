// A pipeline schedule as a picture: a row for each rank, time from left to right.
#pragma once

#include <string>
#include <string_view>

#include <tessera/distributed/pipeline/schedule.h>

namespace tessera::distributed {

// An SVG with a box for each calculation, as long as it takes, with the number and the color of its
// micro-batch. Gray is the bubble, whose share follows `name` (plain letters) in the title. On the
// right of a row are the rank's live activations. Throws what simulate() does.
std::string schedule_picture(const PipelineTable& schedule, std::string_view name,
                             const Costs& costs = unit_cost);

}  // namespace tessera::distributed
