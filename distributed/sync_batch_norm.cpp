#include <tessera/distributed/sync_batch_norm.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {
namespace {

constexpr std::string_view kSyncBatchNorm = "sync_batch_norm";

struct GlobalStatistics {
  Tensor mean, variance;  // [C], biased, of the compute dtype
  double count = 0;       // values per channel, over all ranks
};

// Every rank adds up the ranks' statistics in rank order (Chan, Golub, LeVeque 1979), in f64.
GlobalStatistics gather_statistics(const Tensor& x, Group& ranks) {
  const int64_t C = x.size(1);
  const double own_count = static_cast<double>(C == 0 ? 0 : x.numel() / C);
  const DType compute = x.dtype() == kF64 ? kF64 : kF32;
  const Tensor message = raw::zeros({2 * C + 1}, kF64, x.device());
  if (own_count > 0) {
    const kernels::Statistics own = kernels::channel_statistics(x, 0);
    copy_(raw::narrow(message, 0, 0, C), own.mean);
    copy_(raw::narrow(message, 0, C, C), own.variance);
    fill_(raw::narrow(message, 0, 2 * C, 1), own_count);
  }
  const Tensor all = raw::empty({ranks.size() * (2 * C + 1)}, kF64, x.device());
  ranks.all_gather(all, message, {.channel = Channel::kModule, .tag = "batch_norm statistics"})
      .wait();
  const double* values = all.data_as<double>();
  const Tensor mean = raw::zeros({C}, kF64), squares = raw::zeros({C}, kF64);
  double* means = mean.data_as<double>();
  double* sums = squares.data_as<double>();  // of squared differences from the mean
  double count = 0;
  for (int rank = 0; rank < ranks.size(); ++rank, values += 2 * C + 1) {
    const double n = values[2 * C];
    if (n == 0) continue;
    const double total = count + n;
    for (int64_t c = 0; c < C; ++c) {
      const double difference = values[c] - means[c];
      means[c] += difference * n / total;
      sums[c] += values[C + c] * n + difference * difference * count * n / total;
    }
    count = total;
  }
  TS_CHECK_SHAPE(count > 1, kSyncBatchNorm,
                 "training needs more than 1 value per channel on all ranks; ", "they have ", count,
                 " together, this rank ", x);
  for (int64_t c = 0; c < C; ++c) sums[c] /= count;
  return {mean.to(compute), squares.to(compute), count};
}

}  // namespace

Tensor sync_batch_norm(const nn::BatchNormCall& call, Group& ranks) {
  // Local to the function: the table of public ops does not list what needs ranks.
  static const Op op{.name = "sync_batch_norm", .reads = {inputs(0, 1)}, .flops_per_element = 8};
  if (!call.training || ranks.size() == 1) {
    return batch_norm(call.x, call.running_mean, call.running_var, call.weight, call.bias,
                      call.training, call.momentum, call.eps);
  }
  TS_CHECK_DEVICE(call.x.device().is_cpu(), kSyncBatchNorm, "runs on the CPU; got ", call.x);
  const Tensor running_mean = call.running_mean, running_var = call.running_var;
  const double momentum = call.momentum, eps = call.eps;
  const bool has_weight = call.weight.defined(), has_bias = call.bias.defined();
  return differentiable(
      op, {call.x, call.weight, call.bias},
      [&](Inputs in, Extras& extras) {
        const GlobalStatistics s = gather_statistics(in[0], ranks);
        const double count = s.count;
        const bool follows = !is_recomputing();
        if (follows && running_mean.defined()) {
          kernels::update_running(running_mean, s.mean, 1, momentum);
        }
        if (follows && running_var.defined()) {
          kernels::update_running(running_var, s.variance, count / (count - 1), momentum);
        }
        const Tensor rstd = kernels::rstd_of(s.variance, eps);
        extras.save(s.mean);
        extras.save(rstd);
        extras.save(scalar_tensor(count, kF64));
        return kernels::channel_norm_forward(in[0], 0, s.mean, rstd, in[1], in[2]);
      },
      [=, &ranks](Grads dy, const Saved& s) -> TensorList {
        const Tensor x = s.input(0), w = has_weight ? s.input(1) : Tensor();
        const Tensor mean = s.extra(0), rstd = s.extra(1);
        const double total = s.extra(2).item();
        const int64_t C = x.size(1);
        const bool wanted[3] = {true, true, true};
        // As if the statistics were constants, and this rank's sums of dy * xhat and of dy.
        const kernels::RowNormGradients g =
            kernels::channel_norm_backward(dy[0], x, 0, mean, rstd, w, true, wanted);
        const Tensor sums = raw::empty({2 * C}, kF64);
        copy_(raw::narrow(sums, 0, 0, C), g.weight);
        copy_(raw::narrow(sums, 0, C, C), g.bias);
        ranks
            .all_reduce(sums, ReduceOp::kSum,
                        {.channel = Channel::kModule, .tag = "batch_norm gradients"})
            .wait();
        // What flows through mean and variance: input - (x * slope + level).
        const Tensor slope = raw::empty({C}, kF64), level = raw::empty({C}, kF64);
        const auto means = mean.to_vector(), rstds = rstd.to_vector();
        const auto weights = w.defined() ? w.to_vector() : std::vector<double>();
        for (int64_t c = 0; c < C; ++c) {
          const auto i = static_cast<size_t>(c);
          const double scale = (weights.empty() ? 1 : weights[i]) * rstds[i] / total;
          const double along = scale * rstds[i] * sums.data_as<double>()[c];
          slope.data_as<double>()[c] = along;
          level.data_as<double>()[c] = scale * sums.data_as<double>()[C + c] - means[i] * along;
        }
        Shape per_channel = Shape::filled(x.dim(), 1);
        per_channel[1] = C;
        const auto spread = [&](const Tensor& values) {
          return reshape(values.to(mean.dtype()), per_channel);
        };
        const Tensor input = sub(g.input.to(mean.dtype()),
                                 add(mul(x.to(mean.dtype()), spread(slope)), spread(level)));
        return {input.to(x.dtype()), has_weight ? g.weight : Tensor(),
                has_bias ? g.bias : Tensor()};
      });
}

int synchronise_batch_norm(nn::ModuleBase& model, Group& ranks) {
  int count = 0;
  for (const auto& [name, module] : model.named_modules()) {
    auto* layer = dynamic_cast<nn::BatchNormBase*>(module);
    if (layer == nullptr) continue;
    layer->set_function(
        [&ranks](const nn::BatchNormCall& call) { return sync_batch_norm(call, ranks); });
    ++count;
  }
  return count;
}

}  // namespace tessera::distributed
