// Activations as modules, for Sequential. Each is the op of its name.
#pragma once

#include <memory>

#include <tessera/autograd/ops.h>
#include <tessera/nn/describe.h>
#include <tessera/nn/init.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

class ReLU : public Module<ReLU> {
 public:
  Tensor forward(const Tensor& x) { return relu(x); }
  std::unique_ptr<ReLU> remake() const { return std::make_unique<ReLU>(); }
};

class GELU : public Module<GELU> {
 public:
  explicit GELU(Gelu approximate = Gelu::kNone) : approximate(approximate) {}
  Tensor forward(const Tensor& x) { return gelu(x, approximate); }
  std::string extra_repr() const override {
    return approximate == Gelu::kNone ? "approximate='none'" : "approximate='tanh'";
  }
  std::unique_ptr<GELU> remake() const { return std::make_unique<GELU>(approximate); }

  const Gelu approximate;
};

class SiLU : public Module<SiLU> {
 public:
  Tensor forward(const Tensor& x) { return silu(x); }
  std::unique_ptr<SiLU> remake() const { return std::make_unique<SiLU>(); }
};

class Tanh : public Module<Tanh> {
 public:
  Tensor forward(const Tensor& x) { return tanh(x); }
  std::unique_ptr<Tanh> remake() const { return std::make_unique<Tanh>(); }
};

class Sigmoid : public Module<Sigmoid> {
 public:
  Tensor forward(const Tensor& x) { return sigmoid(x); }
  std::unique_ptr<Sigmoid> remake() const { return std::make_unique<Sigmoid>(); }
};

class LeakyReLU : public Module<LeakyReLU> {
 public:
  explicit LeakyReLU(double negative_slope = 0.01) : negative_slope(negative_slope) {}
  Tensor forward(const Tensor& x) { return leaky_relu(x, negative_slope); }
  std::string extra_repr() const override {
    return detail::describe("negative_slope", negative_slope);
  }
  std::unique_ptr<LeakyReLU> remake() const { return std::make_unique<LeakyReLU>(negative_slope); }

  const double negative_slope;
};

class ELU : public Module<ELU> {
 public:
  explicit ELU(double alpha = 1) : alpha(alpha) {}
  Tensor forward(const Tensor& x) { return elu(x, alpha); }
  std::string extra_repr() const override { return detail::describe("alpha", alpha); }
  std::unique_ptr<ELU> remake() const { return std::make_unique<ELU>(alpha); }

  const double alpha;
};

class SELU : public Module<SELU> {
 public:
  Tensor forward(const Tensor& x) { return selu(x); }
  std::unique_ptr<SELU> remake() const { return std::make_unique<SELU>(); }
};

class Mish : public Module<Mish> {
 public:
  Tensor forward(const Tensor& x) { return mish(x); }
  std::unique_ptr<Mish> remake() const { return std::make_unique<Mish>(); }
};

class Hardswish : public Module<Hardswish> {
 public:
  Tensor forward(const Tensor& x) { return hardswish(x); }
  std::unique_ptr<Hardswish> remake() const { return std::make_unique<Hardswish>(); }
};

// He et al. 2015. weight: [num_parameters], one slope for all or one for each channel of [N, C,
// ...], `init` at first. No weight decay should pull on it.
class PReLU : public Module<PReLU> {
 public:
  explicit PReLU(int64_t num_parameters = 1, double init = 0.25)
      : num_parameters(num_parameters),
        init(init),
        weight(parameter("weight", Shape{num_parameters})) {
    if (ParameterDefaultsGuard::current().initialise) reset_parameters();
  }
  Tensor forward(const Tensor& x) { return prelu(x, weight); }
  void reset_parameters() { init::constant(weight, init); }
  std::string extra_repr() const override {
    return detail::describe("num_parameters", num_parameters);
  }
  std::unique_ptr<PReLU> remake() const { return std::make_unique<PReLU>(num_parameters, init); }

  const int64_t num_parameters;
  const double init;
  const Tensor& weight;
};

class Softplus : public Module<Softplus> {
 public:
  explicit Softplus(double beta = 1, double threshold = 20) : beta(beta), threshold(threshold) {}
  Tensor forward(const Tensor& x) { return softplus(x, beta, threshold); }
  std::string extra_repr() const override {
    return detail::describe("beta", beta, "threshold", threshold);
  }
  std::unique_ptr<Softplus> remake() const { return std::make_unique<Softplus>(beta, threshold); }

  const double beta;
  const double threshold;
};

class GLU : public Module<GLU> {
 public:
  explicit GLU(int64_t dim = -1) : dim(dim) {}
  Tensor forward(const Tensor& x) { return glu(x, dim); }
  std::string extra_repr() const override { return detail::describe("dim", dim); }
  std::unique_ptr<GLU> remake() const { return std::make_unique<GLU>(dim); }

  const int64_t dim;
};

class Softmax : public Module<Softmax> {
 public:
  explicit Softmax(int64_t dim) : dim(dim) {}
  Tensor forward(const Tensor& x) { return softmax(x, dim); }
  std::string extra_repr() const override { return detail::describe("dim", dim); }
  std::unique_ptr<Softmax> remake() const { return std::make_unique<Softmax>(dim); }

  const int64_t dim;
};

class LogSoftmax : public Module<LogSoftmax> {
 public:
  explicit LogSoftmax(int64_t dim) : dim(dim) {}
  Tensor forward(const Tensor& x) { return log_softmax(x, dim); }
  std::string extra_repr() const override { return detail::describe("dim", dim); }
  std::unique_ptr<LogSoftmax> remake() const { return std::make_unique<LogSoftmax>(dim); }

  const int64_t dim;
};

class Identity : public Module<Identity> {
 public:
  Tensor forward(const Tensor& x) { return x; }
  std::unique_ptr<Identity> remake() const { return std::make_unique<Identity>(); }
};

// [N, ...] to [N, rest], or any range of dimensions.
class Flatten : public Module<Flatten> {
 public:
  explicit Flatten(int64_t start_dim = 1, int64_t end_dim = -1)
      : start_dim(start_dim), end_dim(end_dim) {}
  Tensor forward(const Tensor& x) { return flatten(x, start_dim, end_dim); }
  std::string extra_repr() const override {
    return detail::describe("start_dim", start_dim, "end_dim", end_dim);
  }
  std::unique_ptr<Flatten> remake() const { return std::make_unique<Flatten>(start_dim, end_dim); }

  const int64_t start_dim;
  const int64_t end_dim;
};

}  // namespace tessera::nn
