// Pipeline schedules: their time and memory, that no run of them gets stuck, and that damaged ones
// are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include <tessera/distributed/pipeline/schedule_picture.h>

#include "message_of.h"
#include "source_dir.h"
#include "thinned.h"

namespace tessera::distributed::test_pipeline_schedule {
namespace {

using Row = std::vector<Action>;
using Random = std::mt19937;

int below(Random& random, size_t end) {
  return static_cast<int>(std::uniform_int_distribution<size_t>(0, end - 1)(random));
}
// Elements that a test asks for; fewer under a sanitizer.
int count_of(int all) { return tests::sanitized() ? all / 20 : all; }

double bubble_of(const PipelineTable& schedule) {
  const Timing computes = simulate(schedule), lowered = simulate(lower(schedule));
  EXPECT_DOUBLE_EQ(computes.seconds, lowered.seconds);  // messages take no time here
  EXPECT_EQ(computes.live_activations, lowered.live_activations);
  return lowered.bubble;
}

TEST(PipelineSchedule, BubblesAreThoseOfTheFormulas) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 17; ++m) {
      const double bubble = (p - 1.0) / (m + p - 1.0);
      EXPECT_NEAR(bubble_of(gpipe(p, m)), bubble, 1e-12) << p << " ranks, " << m;
      EXPECT_NEAR(bubble_of(one_f_one_b(p, m)), bubble, 1e-12) << p << " ranks, " << m;
      // Forwards, gradients of inputs and of weights take equal times.
      const double halves = bubble_of(zero_bubble_h1(p, m));
      if (m >= p) {
        EXPECT_NEAR(halves, (p - 1.0) / (3.0 * m + p - 1.0), 1e-12) << p << " ranks, " << m;
      }
      EXPECT_LE(halves, bubble + 1e-12);
      for (int v = 1; v <= 4; ++v) {
        const double interleaved = bubble_of(interleaved_1f1b(p, v, m));
        if (m % p == 0) {
          EXPECT_NEAR(interleaved, (p - 1.0) / (v * m + p - 1.0), 1e-12)
              << p << " ranks, " << v << " stages each, " << m;
        }
        EXPECT_LT(interleaved, 1);
      }
    }
  }
}

TEST(PipelineSchedule, LiveActivationsAreThoseOfTheSchedule) {
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 13; ++m) {
      const auto live = [](const PipelineTable& schedule, int rank) {
        return simulate(schedule).live_activations[static_cast<size_t>(rank)];
      };
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_EQ(live(gpipe(p, m), rank), m);
        EXPECT_EQ(live(one_f_one_b(p, m), rank), std::min(m, p - rank));
        EXPECT_LE(live(zero_bubble_h1(p, m), rank), std::min(m, p));
        const int v = 3, begins = 2 * (p - 1 - rank) + (v - 1) * p;
        if (m % p == 0) {
          EXPECT_EQ(live(interleaved_1f1b(p, v, m), rank), std::min(v * m, begins + 1));
        }
      }
    }
  }
}

TEST(PipelineSchedule, ALoweredRowReadsAsItRuns) {
  const PipelineTable schedule = lower(one_f_one_b(2, 2));
  const auto text = [&](size_t rank) {
    std::string all;
    for (const Action& action : schedule.rows[rank]) all += action.describe() + "\n";
    return all;
  };
  EXPECT_EQ(text(0),
            "gather of stage 0\n"
            "forward of stage 0, micro-batch 0\n"
            "send (output) of stage 0, micro-batch 0\n"
            "receive (gradient) of stage 0, micro-batch 0\n"
            "forward of stage 0, micro-batch 1\n"
            "send (output) of stage 0, micro-batch 1\n"
            "receive (gradient) of stage 0, micro-batch 1\n"
            "backward of stage 0, micro-batch 0\n"
            "backward of stage 0, micro-batch 1\n"
            "release of stage 0\n"
            "reduce of stage 0\n");
  EXPECT_EQ(text(1),
            "gather of stage 1\n"
            "receive (output) of stage 1, micro-batch 0\n"
            "receive (output) of stage 1, micro-batch 1\n"
            "forward of stage 1, micro-batch 0\n"
            "backward of stage 1, micro-batch 0\n"
            "send (gradient) of stage 1, micro-batch 0\n"
            "forward of stage 1, micro-batch 1\n"
            "backward of stage 1, micro-batch 1\n"
            "send (gradient) of stage 1, micro-batch 1\n"
            "release of stage 1\n"
            "reduce of stage 1\n");
}

TEST(PipelineSchedule, MessagesGathersAndReductionsTakeTheirTime) {
  const PipelineTable schedule = lower(one_f_one_b(2, 1));
  const Timing timing = simulate(schedule, [](const Action& action) {
    if (action.act == Act::kSend) return action.backwards ? 20.0 : 10.0;
    if (action.act == Act::kGather) return 5.0;
    return action.act == Act::kReduce ? 7.0 : unit_cost(action);
  });
  const auto text = [&](size_t rank) {
    std::string all;
    for (size_t i = 0; i < schedule.rows[rank].size(); ++i) {
      const Timing::Span& span = timing.spans[rank][i];
      all += std::string(name_of(schedule.rows[rank][i].act)) + " " +
             std::to_string(std::lround(span.start)) + "-" + std::to_string(std::lround(span.end)) +
             "\n";
    }
    return all;
  };
  EXPECT_EQ(text(0),
            "gather 0-5\nforward 5-6\nsend 6-16\nreceive 19-39\nbackward 39-41\nrelease 41-41\n"
            "reduce 41-48\n");
  EXPECT_EQ(text(1),
            "gather 0-5\nreceive 6-16\nforward 16-17\nbackward 17-19\nsend 19-39\n"
            "release 19-19\nreduce 19-26\n");
  EXPECT_DOUBLE_EQ(timing.seconds, 41);
  EXPECT_DOUBLE_EQ(timing.bubble, 1 - 6.0 / 82);
  // Messages of a queue come one after the other.
  const PipelineTable three = lower(gpipe(2, 3));
  const Timing slow = simulate(three, [](const Action& action) {
    return action.act == Act::kSend ? 10 : unit_cost(action);
  });
  const auto third = std::ranges::find(three.rows[0], Action{.act = Act::kSend, .micro = 2});
  EXPECT_DOUBLE_EQ(slow.spans[0][static_cast<size_t>(third - three.rows[0].begin())].start, 21);
}

TEST(PipelineSchedule, NumbersThatCannotBeAreErrors) {
  EXPECT_THROW(gpipe(0, 1), ValueError);
  EXPECT_THROW(one_f_one_b(2, 0), ValueError);
  EXPECT_THROW(interleaved_1f1b(2, 0, 1), ValueError);
  EXPECT_THROW(zero_bubble_h1(1 << 20, 1), ValueError);
  EXPECT_THROW(make_schedule(PipelineSchedule::kGPipe, 2, 2, 1), ValueError);
  EXPECT_THROW(lower(lower(gpipe(2, 2))), ValueError);
  EXPECT_THROW(lower(gpipe(2, 2), {.costs = [](const Action&) { return 0.0; }}), ValueError);
  EXPECT_THROW(simulate({}), ValueError);
}

// The picture of docs/pipeline.md; `tessera plan` writes it, the page has the command.
TEST(PipelineSchedule, ThePagesPictureIsTheOneThatIsDrawn) {
  const std::string drawn = schedule_picture(lower(interleaved_1f1b(4, 2, 8)), "1f1b");
  std::ifstream file(std::string(tests::source_dir()) + "/docs/pipeline-1f1b.svg");
  std::stringstream shown;
  shown << file.rdbuf();
  EXPECT_TRUE(shown.str() == drawn);
  const auto boxes = [&](const std::string& title) {
    size_t count = 0;
    for (size_t at = 0; (at = drawn.find("<title>" + title, at)) != std::string::npos; ++at)
      ++count;
    return count;
  };
  EXPECT_EQ(boxes("forward of stage "), 64u);
  EXPECT_EQ(boxes("backward of stage 7, micro-batch "), 8u);
  EXPECT_EQ(boxes("send"), 0u);
  const std::string halves = schedule_picture(zero_bubble_h1(2, 3), "zero_bubble_h1");
  EXPECT_TRUE(mentions(halves, ">gradient of weights<") && !mentions(halves, ">backward<"));
  EXPECT_THROW(schedule_picture({}, "nothing"), ValueError);
}

// ---- A backend of toys --------------------------------------------------------------------------

// Ranks that take their turns at random, and queues whose messages end with both of their ends
// alone. What is calculated is a number that says where it came from.
class Toy {
 public:
  // `blocking`: a rank waits for each message where it issues it.
  Toy(const PipelineTable& schedule, uint32_t seed, bool blocking)
      : schedule_(schedule), random_(seed), blocking_(blocking), ranks_(schedule.rows.size()) {
    for (auto& numbers : inputs_) numbers.assign(places(), kNothing);
    forward_.assign(places(), kNothing);
    gradient_.assign(places(), kNothing);
  }

  // Whether all ranks came to the ends of their rows and all messages to theirs.
  bool run() {
    std::vector<size_t> order(ranks_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (bool moved = true; moved;) {
      moved = false;
      std::ranges::shuffle(order, random_);
      for (const size_t rank : order) {
        for (int steps = below(random_, 4) + 1; steps > 0 && step(rank); --steps) moved = true;
        for (const size_t way : {0, 1}) moved |= deliver(rank, way);
      }
    }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].next != schedule_.rows[rank].size()) return false;
      for (const auto& queue : ranks_[rank].queues) {
        if (!queue.empty()) return false;
      }
    }
    return true;
  }
  // Whether each stage has calculated with what was its own.
  bool right() const {
    for (int micro = 0; micro < schedule_.micro_batches; ++micro) {
      int64_t number = micro;
      for (int stage = 0; stage < schedule_.stages; ++stage) {
        number = mixed(number, stage);
        if (forward_[place(stage, micro)] != number) return false;
      }
      for (int stage = schedule_.stages - 1; stage >= 0; --stage) {
        number = mixed(number, stage);
        if (gradient_[place(stage, micro)] != number) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kNothing = -1;
  struct Rank {
    size_t next = 0;
    std::deque<size_t> queues[2];
  };

  static int64_t mixed(int64_t number, int stage) { return (number * 31 + stage) % 1000003; }
  size_t places() const {
    return static_cast<size_t>(schedule_.stages) * static_cast<size_t>(schedule_.micro_batches);
  }
  size_t place(int stage, int micro) const {
    return static_cast<size_t>(stage * schedule_.micro_batches + micro);
  }

  bool step(size_t rank) {
    Rank& own = ranks_[rank];
    if (own.next == schedule_.rows[rank].size()) return false;
    const Action& now = schedule_.rows[rank][own.next];
    if (now.is_message()) {
      auto& queue = own.queues[now.backwards ? 1 : 0];
      if (waits(now) && std::ranges::find(queue, own.next) != queue.end()) return false;
      queue.push_back(own.next);
      if (waits(now)) return true;
    } else if (now.computes() && !calculate(now)) {
      return false;
    }
    ++own.next;
    return true;
  }

  bool calculate(const Action& now) {
    if (now.act == Act::kWeightGradient) return gradient_[place(now.stage, now.micro)] != kNothing;
    const bool backwards = now.act != Act::kForward;
    const int last = schedule_.stages - 1;
    const size_t here = place(now.stage, now.micro);
    int64_t input = inputs_[backwards ? 1 : 0][here];
    if (!backwards && now.stage == 0) input = now.micro;
    if (backwards && now.stage == last) input = forward_[here];
    if (input == kNothing && ranks_.size() == 1) {  // its own neighbour
      input = backwards ? gradient_[place(now.stage + 1, now.micro)]
                        : forward_[place(now.stage - 1, now.micro)];
    }
    if (input == kNothing) return false;
    (backwards ? gradient_ : forward_)[here] = mixed(input, now.stage);
    return true;
  }

  // The first output of a stage says what shapes they have.
  bool waits(const Action& now) const {
    return blocking_ || (now.act == Act::kReceive && !now.backwards && now.micro == 0);
  }

  // First in, first out: a receive takes what the head of the other queue sends.
  bool deliver(size_t rank, size_t way) {
    auto& queue = ranks_[rank].queues[way];
    if (queue.empty()) return false;
    const Action& sent = schedule_.rows[rank][queue.front()];
    if (sent.act != Act::kSend) return false;
    const int step = way == 1 ? -1 : 1, ranks = schedule_.ranks();
    const int to = (static_cast<int>(rank) + step + ranks) % ranks;
    auto& others = ranks_[static_cast<size_t>(to)].queues[way];
    if (others.empty()) return false;
    const Action& received = schedule_.rows[static_cast<size_t>(to)][others.front()];
    if (received.act != Act::kReceive) return false;
    inputs_[way][place(received.stage, received.micro)] =
        (way == 1 ? gradient_ : forward_)[place(sent.stage, sent.micro)];
    if (waits(sent)) ++ranks_[rank].next;
    if (waits(received)) ++ranks_[static_cast<size_t>(to)].next;
    queue.pop_front();
    others.pop_front();
    return true;
  }

  const PipelineTable& schedule_;
  Random random_;
  const bool blocking_;
  std::vector<Rank> ranks_;
  std::vector<int64_t> inputs_[2], forward_, gradient_;
};

void expect_runs(const PipelineTable& schedule, uint32_t seed, bool blocking) {
  Toy toy(schedule, seed, blocking);
  ASSERT_TRUE(toy.run()) << "stuck, seed " << seed;
  ASSERT_TRUE(toy.right()) << "mixed up, seed " << seed;
}

// Any order in which each rank does what is ready, with halves of backwards in some stages.
PipelineTable random_computes(Random& random) {
  const int ranks = below(random, 5) + 1, stages = ranks * (below(random, 3) + 1);
  const int micro_batches = below(random, 6) + 1;
  PipelineTable schedule{
      .stages = stages, .micro_batches = micro_batches, .rows = std::vector<Row>(ranks)};
  struct Done {
    int forward = 0, gradient = 0, weight = 0;
    bool halves = false;
  };
  std::vector<Done> done(static_cast<size_t>(stages));
  for (Done& of : done) of.halves = below(random, 2) == 1;
  for (;;) {
    std::vector<Action> ready;
    for (int stage = 0; stage < stages; ++stage) {
      const auto add = [&](Act act, int micro) {
        ready.push_back({.act = act, .stage = static_cast<int16_t>(stage), .micro = micro});
      };
      const auto at = static_cast<size_t>(stage);
      const Done& of = done[at];
      const int inputs = stage == 0 ? micro_batches : done[at - 1].forward;
      const int gradients =
          std::min(of.forward, stage + 1 == stages ? of.forward : done[at + 1].gradient);
      if (of.forward < inputs) add(Act::kForward, of.forward);
      if (of.gradient < gradients) {
        add(of.halves ? Act::kInputGradient : Act::kBackward, of.gradient);
      }
      if (of.halves && of.weight < of.gradient) add(Act::kWeightGradient, of.weight);
    }
    if (ready.empty()) return schedule;
    const Action& next = ready[static_cast<size_t>(below(random, ready.size()))];
    Done& of = done[static_cast<size_t>(next.stage)];
    if (next.act == Act::kForward) ++of.forward;
    if (next.act == Act::kBackward || next.act == Act::kInputGradient) ++of.gradient;
    if (next.act == Act::kBackward || next.act == Act::kWeightGradient) ++of.weight;
    schedule.rows[static_cast<size_t>(schedule.rank_of(next.stage))].push_back(next);
  }
}

// Unequal ones, the same for the same action.
Costs random_costs(uint32_t seed) {
  return [seed](const Action& action) {
    uint64_t bits = seed + static_cast<uint64_t>(action.act) * 7919 +
                    static_cast<uint64_t>(action.stage) * 104729 +
                    static_cast<uint64_t>(action.micro + 1) * 1299709;
    bits = (bits ^ (bits >> 31)) * 0x9e3779b97f4a7c15;
    return 0.01 + static_cast<double>((bits ^ (bits >> 29)) % 1000) / 100.0;
  };
}

// ---- No run gets stuck --------------------------------------------------------------------------

TEST(PipelineSchedule, NoRunGetsStuckWhereSendsEndWithTheirReceives) {
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 9; ++m) {
      std::vector<PipelineTable> all = {gpipe(p, m), one_f_one_b(p, m), zero_bubble_h1(p, m)};
      for (int v = 2; v <= 3; ++v) all.push_back(interleaved_1f1b(p, v, m));
      for (const PipelineTable& computes : all) {
        for (int ahead = 0; ahead <= 3; ++ahead) {
          const PipelineTable schedule = lower(computes, {.ahead = ahead});
          expect_runs(schedule, static_cast<uint32_t>(m), false);
        }
        expect_runs(lower(computes, {.ahead = 0}), static_cast<uint32_t>(m), true);
      }
    }
  }
}

TEST(PipelineSchedule, TenThousandRandomSchedulesRunAtAnyCosts) {
  Random random(11);
  for (uint32_t number = 0; number < static_cast<uint32_t>(count_of(10'000)); ++number) {
    const int ahead = below(random, 4);
    const PipelineTable schedule =
        lower(random_computes(random), {.ahead = ahead, .costs = random_costs(number)});
    expect_runs(schedule, number, false);
    if (ahead == 0) expect_runs(schedule, number, true);
    // The costs that chose the order are not those of the run.
    ASSERT_NO_THROW(simulate(schedule, random_costs(number + 1'000'000))) << number;
    if (testing::Test::HasFatalFailure()) return;
  }
}

// ---- Damage -------------------------------------------------------------------------------------

struct Place {
  size_t rank, index;
};
using Which = std::function<bool(const Action&)>;

std::vector<Place> places(const PipelineTable& schedule, const Which& which) {
  std::vector<Place> found;
  for (size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    for (size_t index = 0; index < schedule.rows[rank].size(); ++index) {
      if (which(schedule.rows[rank][index])) found.push_back({rank, index});
    }
  }
  return found;
}
std::optional<Place> any_place(const PipelineTable& schedule, Random& random, const Which& which) {
  const std::vector<Place> found = places(schedule, which);
  if (found.empty()) return std::nullopt;
  return found[static_cast<size_t>(below(random, found.size()))];
}
// Another action that `which` takes, on the same rank.
std::optional<Place> another(const PipelineTable& schedule, Random& random, Place than,
                             const Which& which) {
  std::vector<Place> found = places(schedule, which);
  std::erase_if(found, [&](Place at) { return at.rank != than.rank || at.index == than.index; });
  if (found.empty()) return std::nullopt;
  return found[static_cast<size_t>(below(random, found.size()))];
}
Action& at(PipelineTable& schedule, Place place) { return schedule.rows[place.rank][place.index]; }

bool alike(const Action& a, const Action& b) {
  return a.act == b.act && a.backwards == b.backwards && a.stage == b.stage;
}
bool is_gradient(const Action& action) {
  return action.act == Act::kBackward || action.act == Act::kInputGradient;
}
bool is_message(const Action& action) { return action.is_message(); }

// Puts an action before the first, or the last, one of its rank that `which` takes.
void move_before(PipelineTable& schedule, Place from, const Which& which, bool last) {
  Row& row = schedule.rows[from.rank];
  const Action moved = row[from.index];
  std::vector<size_t> found;
  for (size_t index = 0; index < row.size(); ++index) {
    if (which(row[index])) found.push_back(index);
  }
  const size_t to = found.empty() ? 0 : last ? found.back() : found.front();
  row.erase(row.begin() + static_cast<std::ptrdiff_t>(from.index));
  row.insert(row.begin() + static_cast<std::ptrdiff_t>(to), moved);
}

// False where this schedule has nothing to damage so.
using Damage = std::function<bool(PipelineTable&, Random&)>;

bool swap_micro_batches(PipelineTable& schedule, Random& random) {
  const auto one = any_place(schedule, random, [](const Action& a) { return a.micro >= 0; });
  const Action first = at(schedule, *one);
  const auto two =
      another(schedule, random, *one, [&](const Action& a) { return alike(a, first); });
  if (!two) return false;
  std::swap(at(schedule, *one).micro, at(schedule, *two).micro);
  return true;
}
bool drop_message(PipelineTable& schedule, Random& random) {
  const auto place = any_place(schedule, random, is_message);
  if (!place) return false;
  const Action dropped = at(schedule, *place);
  const auto erase = [&](Place of) {
    Row& row = schedule.rows[of.rank];
    row.erase(row.begin() + static_cast<std::ptrdiff_t>(of.index));
  };
  erase(*place);
  if (below(random, 2) == 0) return true;  // or both of its ends
  const int step = dropped.backwards == (dropped.act == Act::kSend) ? -1 : 1;
  const std::vector<Place> other = places(schedule, [&](const Action& a) {
    return a.is_message() && a.act != dropped.act && a.backwards == dropped.backwards &&
           a.stage == dropped.stage + step && a.micro == dropped.micro;
  });
  EXPECT_EQ(other.size(), 1u);
  erase(other.front());
  return true;
}
bool double_message(PipelineTable& schedule, Random& random) {
  const auto place = any_place(schedule, random, is_message);
  if (!place) return false;
  Row& row = schedule.rows[place->rank];
  const Action twice = row[place->index];
  const auto to = static_cast<std::ptrdiff_t>(
      place->index + static_cast<size_t>(below(random, row.size() - place->index + 1)));
  row.insert(row.begin() + to, twice);
  return true;
}
bool swap_in_queue(PipelineTable& schedule, Random& random) {
  const auto one = any_place(schedule, random, is_message);
  if (!one) return false;
  const Action first = at(schedule, *one);
  const auto two = another(schedule, random, *one, [&](const Action& a) {
    return a.act == first.act && a.backwards == first.backwards;
  });
  if (!two) return false;
  std::swap(at(schedule, *one), at(schedule, *two));
  return true;
}
bool backward_before_forward(PipelineTable& schedule, Random& random) {
  const Place place = *any_place(schedule, random, is_gradient);
  const Action moved = at(schedule, place);
  move_before(
      schedule, place,
      [&](const Action& a) {
        return a.act == Act::kForward && a.stage == moved.stage && a.micro == moved.micro;
      },
      false);
  return true;
}
bool backwards_out_of_order(PipelineTable& schedule, Random& random) {
  const Place one = *any_place(schedule, random, is_gradient);
  const Action first = at(schedule, one);
  const auto two = another(schedule, random, one, [&](const Action& a) { return alike(a, first); });
  if (!two) return false;
  std::swap(at(schedule, one), at(schedule, *two));
  return true;
}
bool weights_before_input(PipelineTable& schedule, Random& random) {
  const auto place =
      any_place(schedule, random, [](const Action& a) { return a.act == Act::kWeightGradient; });
  if (!place) return false;
  const Action moved = at(schedule, *place);
  move_before(
      schedule, *place,
      [&](const Action& a) {
        return a.act == Act::kInputGradient && a.stage == moved.stage && a.micro == moved.micro;
      },
      false);
  return true;
}
bool reduce_early(PipelineTable& schedule, Random& random) {
  const Place place =
      *any_place(schedule, random, [](const Action& a) { return a.act == Act::kReduce; });
  const int stage = at(schedule, place).stage;
  move_before(
      schedule, place,
      [&](const Action& a) {
        return (a.act == Act::kBackward || a.act == Act::kWeightGradient) && a.stage == stage;
      },
      true);
  return true;
}
bool release_early(PipelineTable& schedule, Random& random) {
  const Place place =
      *any_place(schedule, random, [](const Action& a) { return a.act == Act::kRelease; });
  const int stage = at(schedule, place).stage;
  move_before(
      schedule, place, [&](const Action& a) { return a.computes() && a.stage == stage; }, true);
  return true;
}
bool wrong_stage(PipelineTable& schedule, Random& random) {
  Action& changed = at(schedule, *any_place(schedule, random, [](const Action&) { return true; }));
  const int by = below(random, 5) + 1;
  changed.stage = static_cast<int16_t>(changed.stage + (below(random, 2) == 0 ? by : -by));
  return true;
}

TEST(PipelineSchedule, EveryKindOfDamageIsRefused) {
  const std::vector<std::pair<const char*, Damage>> kinds = {
      {"micro-batches swapped", swap_micro_batches},
      {"a message dropped", drop_message},
      {"a message doubled", double_message},
      {"the order of one queue swapped", swap_in_queue},
      {"a backward before its forward", backward_before_forward},
      {"backwards out of order", backwards_out_of_order},
      {"gradients of weights before those of the input", weights_before_input},
      {"reduced a micro-batch early", reduce_early},
      {"released before the last use", release_early},
      {"a wrong stage", wrong_stage}};
  for (const auto& [name, damage] : kinds) {
    Random random(5);
    for (int done = 0; done < count_of(1000);) {
      const uint32_t seed = random();
      const PipelineTable whole = lower(random_computes(random), {.costs = random_costs(seed)});
      PipelineTable damaged = whole;
      if (!damage(damaged, random)) continue;
      ++done;
      try {
        simulate(damaged);
        FAIL() << name << " was taken, number " << done;
      } catch (const ScheduleError& error) {
        const std::string text = error.what();
        EXPECT_TRUE(mentions(text, "rank " + std::to_string(error.rank) + ": ")) << text;
        EXPECT_TRUE(mentions(text, "of stage " + std::to_string(error.stage))) << text;
        EXPECT_TRUE(error.micro == -1 ||
                    mentions(text, "micro-batch " + std::to_string(error.micro)))
            << text;
      }
    }
  }
}

// What the simulator takes, whatever it is, runs to its end with the right numbers.
TEST(PipelineSchedule, WhatIsTakenAfterDamageRuns) {
  Random random(6);
  int taken = 0;
  for (int number = 0; number < count_of(10'000); ++number) {
    PipelineTable schedule = lower(random_computes(random), {.ahead = below(random, 3)});
    const auto rank = static_cast<size_t>(below(random, schedule.rows.size()));
    Row& row = schedule.rows[rank];
    const auto from = static_cast<size_t>(below(random, row.size()));
    const size_t to = std::min(from + 1 + static_cast<size_t>(below(random, 3)), row.size() - 1);
    if (number % 2 == 0) {
      std::swap(row[from], row[to]);
    } else {
      move_before(
          schedule, {rank, from}, [&](const Action&) { return below(random, 3) == 0; }, false);
    }
    try {
      simulate(schedule);
    } catch (const ScheduleError&) {
      continue;
    }
    ++taken;
    expect_runs(schedule, static_cast<uint32_t>(number), false);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(taken, count_of(10'000) / 20);  // swaps that change nothing are among them
}

TEST(PipelineSchedule, ErrorsSayRankStageAndMicroBatch) {
  PipelineTable schedule = lower(one_f_one_b(3, 4));
  std::erase(schedule.rows[1], Action{.act = Act::kReceive, .stage = 1, .micro = 2});
  EXPECT_EQ(message_of<ScheduleError>([&] { simulate(schedule); }),
            "pipeline schedule: rank 1: forward of stage 1, micro-batch 2: its input has not been "
            "received");
  PipelineTable exchanged = lower(one_f_one_b(2, 1));
  std::swap(exchanged.rows[0], exchanged.rows[1]);
  EXPECT_EQ(message_of<ScheduleError>([&] { simulate(exchanged); }),
            "pipeline schedule: rank 0: gather of stage 1: is of rank 1");
  // One queue in two orders.
  PipelineTable disordered = lower(interleaved_1f1b(2, 2, 2));
  Row& row = disordered.rows[0];
  const Action held{.act = Act::kSend, .stage = 0, .micro = 1};
  std::erase(row, held);
  row.insert(std::ranges::find(row, Action{.act = Act::kSend, .stage = 2, .micro = 0}) + 1, held);
  EXPECT_EQ(
      message_of<ScheduleError>([&] { simulate(disordered); }),
      "pipeline schedule: rank 1: receive (output) of stage 1, micro-batch 1: comes where rank "
      "0 sends that to stage 3 of micro-batch 0");
  PipelineTable marked = lower(gpipe(1, 1));
  marked.rows[0][1].backwards = true;
  EXPECT_TRUE(mentions(message_of<ScheduleError>([&] { simulate(marked); }), "only messages"));
  // Two ranks that both receive before they send.
  PipelineTable circle = lower(interleaved_1f1b(2, 2, 1), {.ahead = 0});
  for (Row& of_rank : circle.rows) {
    std::ranges::stable_partition(of_rank, [](const Action& a) {
      return a.act == Act::kGather || (a.act == Act::kReceive && !a.backwards);
    });
  }
  EXPECT_TRUE(mentions(message_of<ScheduleError>([&] { simulate(circle); }), "waits for ever"));
}

}  // namespace
}  // namespace tessera::distributed::test_pipeline_schedule
