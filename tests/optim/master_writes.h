// Ways to write a parameter between steps, and what its f32 master owes to them: that of a narrow
// parameter goes on as an f32 parameter does that is written alike. For test_master_writes and the
// GPU's tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>

#include "optim/optimizer_kinds.h"

namespace tessera::optim {

inline std::vector<double> initial_values() { return {1, -2, 0.5, -1.5, 0.25, -0.75}; }
inline Tensor gradient_of_step(int step) {  // both dtypes have it
  std::vector<double> values;
  for (int i = 0; i < 6; ++i) values.push_back((i % 2 == 0 ? 1 : -1) * (0.25 + 0.125 * step));
  return tensor(values, {2, 3}, kF32);
}

// Writes values that both dtypes have, others each time: what a parameter is written that it holds
// already, rounded, is no write to its master.
struct Write {
  const char* name;
  std::function<void(const Tensor& p, int time)> run;
};
inline const std::vector<Write>& writes() {
  static const std::vector<Write> all = {
      {"fill_", [](const Tensor& p, int time) { p.fill_(2 + time); }},
      {"zero_", [](const Tensor& p, int) { zero_(p); }},
      {"copy_",
       [](const Tensor& p, int time) {
         p.copy_(tensor({2, -2.5, 3, -3.5, 1, 1.5}).view({2, 3}).mul(time + 1).to(p.device()));
       }},
      {"clamp_",
       [](const Tensor& p, int time) { clamp_(p, Scalar(-0.125 * time), Scalar(0.125 * time)); }},
      {"a part of it", [](const Tensor& p, int time) { p.narrow(1, 1, 1).fill_(2 + time); }},
      {"an element",
       [](const Tensor& p, int time) { p.select(0, 1).select(0, 2).fill_(-4 + time); }},
      {"load_state_dict",
       [](const Tensor& p, int time) {
         StateDict own, saved;
         own.set("p", p);
         saved.set("p", raw::full({2, 3}, 3 + time, p.dtype(), p.device()));
         copy_(own.at("p"), saved.at("p"));
       }},
      {"set_data",
       [](const Tensor& p, int time) {
         p.set_data(raw::full({2, 3}, -3 - time, p.dtype(), p.device()));
       }},
      {"raw memory",
       [](const Tensor& p, int time) {
         if (!p.device().is_cpu()) return;
         dispatch_floating(p.dtype(), "test",
                           [&]<class T>() { p.data_as<T>()[4] = store<T>(2.0 + time); });
         p.bump_version();
       }},
      {"nothing, an average stands in for a while",
       [](const Tensor& p, int) {
         EMA average({{"p", p}}, {.decay = 0.5});
         const EMA::Scope scope(average);
       }},
      {"nothing, the version alone", [](const Tensor& p, int) { p.bump_version(); }}};
  return all;
}

template <class T>
void expect_to_follow(const Write& write, const Device& device) {
  for (const DType dtype : {kBF16, kF16}) {
    SCOPED_TRACE(std::string(name_of(dtype)) + " " + write.name);
    const Tensor wide = tensor(initial_values(), {2, 3}, kF32).to(device).set_requires_grad();
    const Tensor narrow = wide.detach().to(dtype).set_requires_grad();
    T of_wide({{"p", wide}}, kOptions<T>.front());
    T of_narrow({{"p", narrow}}, kOptions<T>.front());
    const auto expect_equal = [&] {
      EXPECT_EQ(of_narrow.state_dict().at("state.p.master").to_vector(), wide.to_vector());
      EXPECT_EQ(narrow.to_vector(), wide.detach().to(dtype).to_vector());
    };
    for (int step = 0; step < 5; ++step) {
      if (step == 2 || step == 4) {
        const NoGradGuard no_grad;
        write.run(wide, step / 2);
        write.run(narrow, step / 2);
      }
      if (step == 4) expect_equal();  // a state that is saved before the step knows of the write
      const Tensor gradient = gradient_of_step(step).to(device);
      wide.set_grad(gradient);
      narrow.set_grad(gradient.to(dtype));
      of_wide.step();
      of_narrow.step();
      if (step != 1) expect_equal();  // reads; at 1 nobody has looked before the write
    }
  }
}

}  // namespace tessera::optim
