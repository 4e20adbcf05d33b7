// A pipeline schedule as a picture: a row for each rank, time from left to right.
#pragma once

#include <string>
#include <string_view>

#include <tessera/distributed/pipeline/schedule.h>

namespace tessera::distributed {

// SVG. A box for each calculation, as long as it takes, with the number of its micro-batch and its
// colour; what is grey is the bubble, whose share stands in the title behind `name` (plain letters).
// On the right of a row stand the live activations of the rank. Throws what simulate() does.
std::string schedule_picture(const Schedule& schedule, std::string_view name,
                             const Costs& costs = unit_cost);

}  // namespace tessera::distributed
