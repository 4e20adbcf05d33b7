// A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017): the critic's loss holds the norm
// of its own gradient, whose gradient is a second derivative.
//
// The data are points around (2, 2), twice as wide as they are high. Ends with 1 unless the made
// points come to lie there, as wide and as high, and the critic's slope between made and true
// points is near 1.
#include <cmath>
#include <cstdio>

#include <tessera.h>

using namespace tessera;

struct Perceptron : nn::Module<Perceptron> {
  Perceptron(int64_t in, int64_t width, int64_t out)
      : first(add<nn::Linear>("first", in, width)),
        second(add<nn::Linear>("second", width, width)),
        last(add<nn::Linear>("last", width, out)) {}
  Tensor forward(const Tensor& x) { return last(silu(second(silu(first(x))))); }
  nn::Linear& first;
  nn::Linear& second;
  nn::Linear& last;
};

constexpr int64_t kBatch = 128, kNoise = 2;

Tensor true_points() { return cat({randn({kBatch, 1}) * 1.0, randn({kBatch, 1}) * 0.5}, 1) + 2; }

// The critic's slope at points between `a` and `b`, one for each row.
Tensor slopes_between(Perceptron& critic, const Tensor& a, const Tensor& b) {
  const Tensor part = rand({a.size(0), 1});
  const Tensor between = (a * part + b * (1 - part)).detach().set_requires_grad();
  const Tensor slope =
      grad(critic(between).sum(), std::array{between}, {}, {.create_graph = true})[0];
  return sqrt(square(slope).sum({1}) + 1e-12);
}

int main() {
  manual_seed(1);
  Perceptron generator(kNoise, 48, 2), critic(2, 48, 1);
  const optim::AdamOptions options{.lr = 1e-3, .betas = {0.5, 0.9}};
  optim::Adam generator_steps(generator.named_parameters(), options);
  optim::Adam critic_steps(critic.named_parameters(), options);
  const auto make = [&] { return generator(randn({kBatch, kNoise})); };
  for (int step = 1; step <= 1500; ++step) {
    for (int i = 0; i < 5; ++i) {
      const Tensor real = true_points();
      Tensor made;
      {
        const NoGradGuard no_grad;  // the generator does not learn from the critic's step
        made = make();
      }
      const Tensor distance = critic(real).mean() - critic(made).mean();
      const Tensor penalty = square(slopes_between(critic, real, made) - 1).mean();
      (10 * penalty - distance).backward();  // through the gradient inside of the penalty
      critic_steps.step(), critic_steps.zero_grad();
    }
    (-critic(make()).mean()).backward();
    generator_steps.step(), generator_steps.zero_grad();
    critic_steps.zero_grad();  // what the generator's step left there
  }
  const double slope = slopes_between(critic, true_points(), make()).mean().item();
  const NoGradGuard no_grad;
  const Tensor made = generator(randn({2000, kNoise}));
  const auto centre = made.mean({0}).to_vector();
  const auto width = sqrt(square(made - made.mean({0})).mean({0})).to_vector();
  std::printf("made points: %.2f +- %.2f, %.2f +- %.2f; the critic's slope %.2f\n", centre[0],
              width[0], centre[1], width[1], slope);
  const auto near = [](double value, double expected) { return std::abs(value - expected) < 0.3; };
  const bool right = near(centre[0], 2) && near(centre[1], 2) && near(width[0], 1) &&
                     near(width[1], 0.5) && near(slope, 1);
  return right ? 0 : 1;
}
