#include "compositions/composition.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <functional>
#include <sstream>
#include <utility>

#include <tessera/core/error.h>

namespace tessera::compositions {
namespace {

using accelerate::Sharding;

// splitmix64: the same draws with every standard library.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t end) { return static_cast<int64_t>(next() % static_cast<uint64_t>(end)); }
  bool one_in(int64_t count) { return below(count) == 0; }
  template <class T, size_t kCount>
  T one_of(const T (&values)[kCount]) {
    return values[below(kCount)];
  }

 private:
  uint64_t state_;
};

Setup draw_setup(Draw& draw) {
  Setup setup;
  setup.ranks = draw.one_of<int64_t>({1, 2, 2, 2, 3, 4});
  setup.sharding = draw.one_of(
      {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3, Sharding::kFsdp});
  if (setup.ranks == 4 && setup.sharding == Sharding::kFsdp && draw.one_in(2)) setup.replicas = 2;
  setup.accumulate = draw.one_of<int64_t>({1, 1, 2, 3});
  return setup;
}

constexpr std::array<std::string_view, 4> kNumbers = {"f64", "f32", "bf16", "fp16"};
constexpr std::array<std::string_view, 3> kPolicies = {"autocast", "boundary", "pure"};
constexpr std::array<std::string_view, 3> kWeights = {"equal", "unequal", "some_zero"};
constexpr std::array<std::string_view, 10> kOptimizers = {"sgd",     "momentum", "adamw", "adam",
                                                          "rmsprop", "adagrad",  "lion",  "adamax",
                                                          "nadam",   "adadelta"};
constexpr std::array<std::string_view, 4> kSchedules = {"none", "cosine", "step", "warmup"};
constexpr std::array<std::string_view, 4> kClipKinds = {"norm", "greatest", "some", "value"};
constexpr std::array<std::string_view, 5> kShardings = {"ddp", "zero1", "zero2", "zero3", "fsdp"};

template <class T>
std::string text_of(const T& value, std::span<const std::string_view> words) {
  if constexpr (std::is_enum_v<T>) {
    return std::string(words[static_cast<size_t>(value)]);
  } else {
    std::ostringstream out;
    out << value;
    return out.str();
  }
}
template <class T>
void read(T& value, std::span<const std::string_view> words, const std::string& text) {
  if constexpr (std::is_enum_v<T>) {
    const auto place = std::ranges::find(words, text);
    TS_CHECK_AS(ConfigError, place != words.end(), "composition", "knows no '", text, "'");
    value = static_cast<T>(place - words.begin());
  } else {
    std::istringstream in(text);
    TS_CHECK_AS(ConfigError, static_cast<bool>(in >> value), "composition", "reads no number in '",
                text, "'");
  }
}

// Calls visit(name, member, words) for every choice, the dearest to a reader first.
void visit(auto& one, auto&& visit) {
  visit("resume_at", one.resume_at, {});
  visit("ranks", one.first.ranks, {});
  visit("replicas", one.first.replicas, {});
  visit("sharding", one.first.sharding, kShardings);
  visit("accumulate", one.first.accumulate, {});
  visit("resumed_ranks", one.second.ranks, {});
  visit("resumed_replicas", one.second.replicas, {});
  visit("resumed_sharding", one.second.sharding, kShardings);
  visit("resumed_accumulate", one.second.accumulate, {});
  visit("numbers", one.numbers, kNumbers);
  visit("policy", one.policy, kPolicies);
  visit("overflow_at", one.overflow_at, {});
  visit("weights", one.weights, kWeights);
  visit("weightless", one.weightless, {});
  visit("clip", one.clip, {});
  visit("clip_kind", one.clip_kind, kClipKinds);
  visit("optimizer", one.optimizer, kOptimizers);
  visit("groups", one.groups, {});
  visit("schedule", one.schedule, kSchedules);
  visit("ema", one.ema, {});
  visit("freeze_at", one.freeze_at, {});
  visit("thaw_at", one.thaw_at, {});
  visit("part", one.part, {});
  visit("adapters", one.adapters, {});
  visit("recompute", one.recompute, {});
  visit("hooks", one.hooks, {});
  visit("left_out", one.left_out, {});
  visit("keeps_gradients", one.keeps_gradients, {});
  visit("short_window", one.short_window, {});
  visit("early", one.early, {});
  visit("written_at", one.written_at, {});
  visit("rated_at", one.rated_at, {});
  visit("looked_at", one.looked_at, {});
  visit("two_losses", one.two_losses, {});
  visit("clears_first", one.clears_first, {});
  visit("windows", one.windows, {});
  visit("seed", one.seed, {});
}
using Words = std::span<const std::string_view>;

// What cannot be together is put right; what depends on a choice that is gone goes with it.
Composition settled(Composition one) {
  const Composition none;
  if (one.resume_at < 1 || one.resume_at >= one.windows) {
    one.resume_at = none.resume_at;
    one.second = none.second;
  }
  for (Setup* setup : {&one.first, &one.second}) {
    if (setup->ranks != 4 || setup->sharding != Sharding::kFsdp) setup->replicas = 1;
  }
  if (one.numbers != Numbers::kBF16 && one.numbers != Numbers::kFP16) one.policy = none.policy;
  for (int64_t* window :
       {&one.overflow_at, &one.weightless, &one.freeze_at, &one.thaw_at, &one.left_out,
        &one.short_window, &one.written_at, &one.rated_at, &one.looked_at}) {
    if (*window >= one.windows) *window = -1;
  }
  // Its step is a sign, which the last bits of a sum decide.
  if (one.numbers != Numbers::kF64 && one.optimizer == OptimizerKind::kLion) {
    one.optimizer = none.optimizer;
  }
  if (one.numbers != Numbers::kFP16) one.overflow_at = -1;
  if (one.overflow_at == one.weightless || one.overflow_at == one.left_out) one.overflow_at = -1;
  if (one.freeze_at < 0 || one.thaw_at <= one.freeze_at) one.thaw_at = -1;
  if (one.adapters) one.freeze_at = one.thaw_at = -1;  // the base is frozen as it is
  if (one.freeze_at < 0) one.part = 0;
  if (one.clip == 0) one.clip_kind = none.clip_kind;
  if (one.schedule != ScheduleKind::kNone) one.rated_at = -1;  // which has the rate
  if (one.left_out < 0) one.keeps_gradients = false;
  // What was kept would have to be saved, and an overflow would leave it out.
  if (one.keeps_gradients && (one.resume_at == one.left_out + 1 || one.overflow_at >= 0)) {
    one.keeps_gradients = false;
  }
  // What no step has come to is no state.
  if (one.left_out >= 0 && one.resume_at == one.left_out + 1) one.clears_first = false;
  return one;
}

}  // namespace

Composition draw(uint64_t seed) {
  Draw draw(seed * 0x2545f4914f6cdd1d + 1);
  Composition one;
  one.seed = seed;
  one.windows = 3 + draw.below(4);
  one.first = draw_setup(draw);
  one.second = draw_setup(draw);
  if (draw.one_in(3)) one.resume_at = 1 + draw.below(one.windows - 1);
  one.numbers = draw.one_of({Numbers::kF64, Numbers::kF64, Numbers::kF64, Numbers::kF32,
                             Numbers::kBF16, Numbers::kFP16, Numbers::kFP16});
  one.policy =
      draw.one_of({PrecisionPolicy::kAutocast, PrecisionPolicy::kBoundary, PrecisionPolicy::kPure});
  if (draw.one_in(2)) one.overflow_at = draw.below(one.windows);
  one.weights = draw.one_of({Weights::kEqual, Weights::kUnequal, Weights::kSomeZero});
  if (draw.one_in(6)) one.weightless = draw.below(one.windows);
  if (draw.one_in(2)) one.clip = draw.one_of({0.05, 0.5, 5.0});
  one.optimizer = static_cast<OptimizerKind>(draw.below(kOptimizers.size()));
  one.groups = draw.one_in(3);
  one.schedule = static_cast<ScheduleKind>(draw.below(kSchedules.size()));
  one.ema = draw.one_in(3);
  if (draw.one_in(4)) one.freeze_at = draw.below(one.windows);
  if (draw.one_in(2)) one.thaw_at = draw.below(one.windows);
  one.part = draw.below(16);
  one.adapters = draw.one_in(6);
  one.recompute = draw.one_in(4);
  one.hooks = draw.one_in(5);
  if (draw.one_in(4)) one.left_out = draw.below(one.windows);
  one.keeps_gradients = draw.one_in(2);
  if (draw.one_in(5)) one.short_window = draw.below(one.windows);
  one.clip_kind = draw.one_of(
      {ClipKind::kNorm, ClipKind::kNorm, ClipKind::kGreatest, ClipKind::kSome, ClipKind::kValue});
  one.early = draw.one_in(3);
  if (draw.one_in(5)) one.written_at = draw.below(one.windows);
  if (draw.one_in(5)) one.rated_at = draw.below(one.windows);
  if (draw.one_in(4)) one.looked_at = draw.below(one.windows);
  one.two_losses = draw.one_in(5);
  one.clears_first = draw.one_in(3);
  return settled(one);
}

std::string describe(const Composition& composition) {
  const Composition none;
  std::string text;
  std::vector<std::string> usual;
  visit(none, [&](const char*, const auto& value, Words words) {
    usual.push_back(text_of(value, words));
  });
  size_t i = 0;
  visit(composition, [&](const char* name, const auto& value, Words words) {
    const std::string word = text_of(value, words);
    if (word != usual[i++]) text += (text.empty() ? "" : " ") + std::string(name) + "=" + word;
  });
  return text;
}

Composition parse(std::string_view text) {
  Composition one;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    bool known = false;
    visit(one, [&](const char* name, auto& value, Words names) {
      if (equals == std::string::npos || word.substr(0, equals) != name) return;
      read(value, names, word.substr(equals + 1));
      known = true;
    });
    TS_CHECK_AS(ConfigError, known, "composition", "knows no '", word, "'");
  }
  return settled(one);
}

std::vector<Composition> simpler(const Composition& composition) {
  std::vector<Composition> all;
  const auto offer = [&](Composition one) {
    one = settled(one);
    if (one != composition && std::ranges::find(all, one) == all.end()) all.push_back(one);
  };
  std::vector<std::string> usual;
  Composition plain;
  plain.seed = composition.seed;
  plain.windows = composition.windows;
  visit(plain, [&](const char*, const auto& value, Words words) {
    usual.push_back(text_of(value, words));
  });
  for (size_t i = 0; i < usual.size(); ++i) {
    Composition one = composition;
    size_t at = 0;
    visit(one, [&](const char*, auto& value, Words words) {
      if (at++ == i) read(value, words, usual[i]);
    });
    offer(one);
  }
  for (Setup Composition::*part : {&Composition::first, &Composition::second}) {
    for (const int64_t fewer : {int64_t{2}, int64_t{3}}) {
      Composition one = composition;
      Setup& setup = one.*part;
      if (setup.ranks > fewer) setup.ranks = fewer;
      offer(one);
      one = composition;
      if ((one.*part).accumulate > fewer) (one.*part).accumulate = fewer;
      offer(one);
    }
  }
  if (composition.windows > 1) {
    Composition one = composition;
    --one.windows;
    offer(one);
    // The first window goes: all else comes one earlier.
    one = composition;
    --one.windows;
    for (int64_t* window :
         {&one.resume_at, &one.overflow_at, &one.weightless, &one.freeze_at, &one.thaw_at,
          &one.left_out, &one.short_window, &one.written_at, &one.rated_at, &one.looked_at}) {
      if (*window > 0) --*window;
    }
    offer(one);
  }
  return all;
}

}  // namespace tessera::compositions
