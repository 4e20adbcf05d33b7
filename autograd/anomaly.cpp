#include <tessera/autograd/anomaly.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera {
namespace {

struct AnomalySlot {
  bool enabled = false;
};
struct CallSiteSlot {
  std::string text;
};

}  // namespace

bool anomaly_enabled() { return Context::current().slot<AnomalySlot>().enabled; }
AnomalyMode::AnomalyMode() : scoped_(Context::current().slot<AnomalySlot>().enabled, true) {}
std::string& call_site() { return Context::current().slot<CallSiteSlot>().text; }

void check_anomaly(const Node& node, const TensorList& gradients) {
  NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Tensor& gradient = gradients[i];
    if (!gradient.defined() || gradient.is_meta() || !is_floating(gradient.dtype())) continue;
    TS_CHECK_AS(AutogradError, !any(isnan(gradient)).item<bool>(), node.name(),
                "backward gave NaN in the gradient of input ", i, " (", gradient,
                "); the forward call was ",
                node.forward_site.empty() ? "made outside anomaly mode" : node.forward_site);
  }
}

}  // namespace tessera
