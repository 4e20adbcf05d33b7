#include <tessera/autograd/op.h>

#include <algorithm>

#include <tessera/core/context.h>

namespace tessera {
namespace {

std::vector<const Op*>& registry() {
  static std::vector<const Op*>* ops = new std::vector<const Op*>;  // outlives static records
  return *ops;
}

}  // namespace

namespace detail {
OpRegistration::OpRegistration(const Op* op) { registry().push_back(op); }
OpRegistration::~OpRegistration() {
  std::erase_if(registry(), [this](const Op* op) { return &op->registration == this; });
}
}  // namespace detail

std::vector<const Op*> all_ops() {
  std::vector<const Op*> ops = registry();
  std::sort(ops.begin(), ops.end(), [](const Op* a, const Op* b) { return a->name < b->name; });
  return ops;
}

void count_flops(double operations) {
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  if (counter.enabled) counter.total += operations;
}

}  // namespace tessera
