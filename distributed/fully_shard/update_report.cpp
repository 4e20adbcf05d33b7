#include <tessera/distributed/fully_shard/update_report.h>

#include <algorithm>
#include <sstream>

#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/matrix_exchange.h>

namespace tessera::distributed {

UpdateReport report_update(const optim::Optimizer& optimizer) {
  const auto [named, dtype] = optimizer.whole_parameters();
  TensorList parameters;
  for (const auto& [name, tensor] : named) parameters.push_back(tensor);
  UpdateReport report{.tensors = std::ssize(parameters), .dtype = dtype, .exchanges = {}};
  for (const auto& [holders, members] : by_holders(parameters, "report_update")) {
    TensorList parts;
    for (const size_t i : members) parts.push_back(parameters[i]);
    const auto made = holders->exchange(parts);
    const auto& exchange = dynamic_cast<const MatrixExchange&>(*made);
    UpdateReport::Exchange& one = report.exchanges.emplace_back();
    one.group = exchange.group().name();
    one.tensors = std::ssize(parts);
    one.cut = exchange.cut();
    for (int r = 0; r < exchange.group().size(); ++r) {
      one.owned.push_back(exchange.elements_owned_by(r));
    }
    one.gather = {exchange.rounds(), exchange.gathers() * size_of(dtype)};
    one.scatter = {exchange.rounds(), exchange.scatters() * size_of(dtype)};
  }
  return report;
}

Traffic UpdateReport::traffic() const {
  Traffic sum;
  for (const Exchange& one : exchanges) {
    sum += one.gather;
    sum += one.scatter;
  }
  return sum;
}

std::string UpdateReport::describe() const {
  PlainText<std::ostringstream> out;
  out << "a step needs " << tensors << " tensors whole\n";
  for (const Exchange& one : exchanges) {
    out << "  over " << one.group << ": " << one.tensors << " of " << dtype << ", " << one.cut
        << " of them cut; this rank sends " << one.gather.bytes << " bytes to owners and "
        << one.scatter.bytes << " bytes back, in "
        << one.gather.collectives + one.scatter.collectives
        << " all_to_alls; whole on a rank: " << std::ranges::min(one.owned) << " to "
        << std::ranges::max(one.owned) << " elements\n";
  }
  return out.str();
}

}  // namespace tessera::distributed
