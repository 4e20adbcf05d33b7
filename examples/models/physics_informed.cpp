// A physics-informed network (Raissi et al. 2019): it learns the solution of
//
//     u_t = 0.1 u_xx    on x in [0, 1],    u(x, 0) = sin(pi x),    u(0, t) = u(1, t) = 0
//
// from the equation alone, without one value of the solution inside. Its loss holds the network's
// second derivatives by x; training differentiates through them. Ends with 1 unless the network is
// near exp(-0.1 pi^2 t) sin(pi x), which solves the equation.
#include <cmath>
#include <cstdio>

#include <tessera.h>

using namespace tessera;

struct Solution : nn::Module<Solution> {
  explicit Solution(int64_t width)
      : first(add<nn::Linear>("first", 2, width)),
        second(add<nn::Linear>("second", width, width)),
        last(add<nn::Linear>("last", width, 1)) {}
  // x, t: [N, 1] -> [N, 1]
  Tensor forward(const Tensor& x, const Tensor& t) {
    return last(tanh(second(tanh(first(cat({x, t}, 1))))));
  }
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& last;
};

constexpr double kDiffusion = 0.1;

// u_t - 0.1 u_xx at points of the inside.
Tensor residual(Solution& u, const Tensor& x, const Tensor& t) {
  const auto derivative = [](const Tensor& of, const Tensor& by) {
    return grad(of.sum(), std::array{by}, {}, {.create_graph = true})[0];
  };
  const Tensor value = u(x, t);
  const Tensor u_t = derivative(value, t);
  const Tensor u_xx = derivative(derivative(value, x), x);
  return u_t - kDiffusion * u_xx;
}

int main() {
  manual_seed(1);
  Solution u(24);
  optim::Adam optimizer(u.named_parameters(), {.lr = 5e-3});
  const int steps = 1500;
  optim::CosineSchedule schedule(optimizer, {.total = steps, .min_lr = 1e-5});
  const auto inside = [](int64_t count) { return rand({count, 1}).set_requires_grad(); };
  for (int step = 1; step <= steps; ++step) {
    const Tensor equation = square(residual(u, inside(64), inside(64))).mean();
    const Tensor x = rand({32, 1}), t = rand({32, 1}), zero = zeros({32, 1});
    const Tensor beginning = square(u(x, zero) - sin(x * M_PI)).mean();
    const Tensor edges = square(u(zero, t)).mean() + square(u(zero + 1, t)).mean();
    const Tensor loss = equation + 10 * (beginning + edges);
    loss.backward();
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    if (step % 500 == 0) std::printf("step %4d  loss %.2e\n", step, loss.item());
  }
  const NoGradGuard no_grad;
  const Tensor x = rand({1000, 1}), t = rand({1000, 1});
  const Tensor exact = exp(t * (-kDiffusion * M_PI * M_PI)) * sin(x * M_PI);
  const double error = abs(u(x, t) - exact).max().item();
  std::printf("largest error %.4f\n", error);
  return error < 0.03 ? 0 : 1;
}
