#include <tessera/distributed/pipeline/schedule.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

namespace tessera::distributed {
namespace {

constexpr std::string_view kSchedule = "pipeline schedule";

Action action_of(Act act, int stage, int micro) {
  return {.act = act, .stage = static_cast<int16_t>(stage), .micro = micro};
}

// A rank waits for it where it issues it: before, it does not know what to receive.
bool says_shapes(const Action& action) {
  return action.act == Act::kReceive && !action.backwards && action.micro == 0;
}

PipelineTable empty_schedule(int ranks, int stages_per_rank, int micro_batches) {
  constexpr int kMost = std::numeric_limits<int16_t>::max();
  TS_CHECK(ranks >= 1 && stages_per_rank >= 1 && micro_batches >= 1, kSchedule,
           "ranks, stages on a rank and micro-batches are at least 1; got ", ranks, ", ",
           stages_per_rank, " and ", micro_batches);
  TS_CHECK(ranks <= kMost / stages_per_rank, kSchedule, "has at most ", kMost, " stages; got ",
           ranks, " ranks with ", stages_per_rank, " each");
  return {.stages = ranks * stages_per_rank,
          .micro_batches = micro_batches,
          .rows = std::vector<std::vector<Action>>(static_cast<size_t>(ranks))};
}

// ---- Checks -------------------------------------------------------------------------------------

// How many of each a stage has done. Micro-batches come in their order, so that a number says which.
struct StageProgress {
  int forward = 0, gradient = 0, weight = 0;
  std::array<int, 2> sent{}, received{};  // outputs, gradients
  int gathered = 0, released = 0, reduced = 0;
};

class Checker {
 public:
  explicit Checker(const PipelineTable& schedule)
      : schedule_(schedule),
        lowered_(schedule.lowered()),
        sends_(lowered_ && schedule.ranks() > 1),
        last_(schedule.stages - 1),
        stages_(static_cast<size_t>(std::max(schedule.stages, 0))) {}

  void check() {
    TS_CHECK(schedule_.ranks() >= 1 && schedule_.stages >= 1 && schedule_.micro_batches >= 1 &&
                 schedule_.stages % schedule_.ranks() == 0,
             kSchedule, "each rank has equally many stages and there is a micro-batch; got ",
             schedule_.stages, " stages and ", schedule_.micro_batches, " micro-batches on ",
             schedule_.ranks(), " ranks");
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (const Action& action : schedule_.rows[static_cast<size_t>(rank)]) take(rank, action);
    }
    for (int stage = 0; stage < schedule_.stages; ++stage) check_complete(stage);
    if (sends_) check_queues();
  }

 private:
  StageProgress& at(int stage) { return stages_[static_cast<size_t>(stage)]; }

  void take(int rank, const Action& action) {
    const auto need = [&](bool condition, const std::string& problem) {
      if (!condition) throw ScheduleError(rank, action, problem);
    };
    const int stage = action.stage, micro = action.micro;
    need(stage >= 0 && stage <= last_, "there are " + std::to_string(schedule_.stages) + " stages");
    need(schedule_.rank_of(stage) == rank,
         "is of rank " + std::to_string(schedule_.rank_of(stage)));
    const bool of_micro = action.computes() || action.is_message();
    need(of_micro ? micro >= 0 && micro < schedule_.micro_batches : micro == -1,
         of_micro ? "there are " + std::to_string(schedule_.micro_batches) + " micro-batches"
                  : "is of all micro-batches (-1)");
    need(!action.backwards || action.is_message(), "only messages are marked as backwards");
    need(sends_ || !action.is_message(), "stages of one rank send nothing");
    StageProgress& own = at(stage);
    const auto next = [&](int& done) {
      need(micro == done, "comes where micro-batch " + std::to_string(done) + " is next");
      ++done;
    };
    const auto once = [&](int& done) { need(done++ == 0, "is there twice"); };
    if (action.computes() && lowered_) {
      need(own.gathered == 1, "parameters are not gathered yet");
      need(own.released == 0, "parameters are released already");
    }
    const size_t way = action.backwards ? 1 : 0;
    switch (action.act) {
      case Act::kForward:
        need(stage == 0 || arrived(stage, micro, false), "its input has not been received");
        return next(own.forward);
      case Act::kBackward:
      case Act::kInputGradient:
        need(own.forward > micro, "comes before its forward");
        need(stage == last_ || arrived(stage, micro, true), "its gradient has not been received");
        next(own.gradient);
        if (action.act == Act::kBackward) next(own.weight);
        return;
      case Act::kWeightGradient:
        need(own.gradient > micro, "comes before the gradient of its input");
        return next(own.weight);
      case Act::kSend:
        need(stage != (action.backwards ? 0 : last_), "goes to no stage");
        need((action.backwards ? own.gradient : own.forward) > micro, "comes before what it sends");
        return next(own.sent[way]);
      case Act::kReceive:
        need(stage != (action.backwards ? last_ : 0), "comes from no stage");
        need(!action.backwards || own.forward > micro, "comes before what it is the gradient of");
        return next(own.received[way]);
      case Act::kGather:
        return once(own.gathered);
      case Act::kRelease:
        return once(own.released);
      case Act::kReduce:
        need(own.weight == schedule_.micro_batches, "comes before the last backward");
        return once(own.reduced);
    }
    need(false, "is no action");
  }

  // Whether the rank has what a stage takes from its neighbour, by the actions before.
  bool arrived(int stage, int micro, bool backwards) {
    if (sends_) return at(stage).received[backwards ? 1 : 0] > micro;
    if (schedule_.ranks() > 1) return true;  // by another row, at its time
    return backwards ? at(stage + 1).gradient > micro : at(stage - 1).forward > micro;
  }

  void check_complete(int stage) {
    const StageProgress& own = at(stage);
    const auto all = [&](int done, Act act, bool backwards, bool is_there = true) {
      const bool of_micro = act < Act::kGather;
      if (!is_there || done == (of_micro ? schedule_.micro_batches : 1)) return;
      throw ScheduleError(schedule_.rank_of(stage),
                          {.act = act,
                           .backwards = backwards,
                           .stage = static_cast<int16_t>(stage),
                           .micro = of_micro ? done : -1},
                          "is missing");
    };
    const bool sends_outputs = sends_ && stage < last_, sends_gradients = sends_ && stage > 0;
    all(own.forward, Act::kForward, false);
    all(own.gradient, Act::kBackward, false);
    all(own.weight, Act::kWeightGradient, false);
    all(own.sent[0], Act::kSend, false, sends_outputs);
    all(own.sent[1], Act::kSend, true, sends_gradients);
    all(own.received[0], Act::kReceive, false, sends_gradients);
    all(own.received[1], Act::kReceive, true, sends_outputs);
    all(own.gathered, Act::kGather, false, lowered_);
    all(own.released, Act::kRelease, false, lowered_);
    all(own.reduced, Act::kReduce, false, lowered_);
  }

  // The messages from one rank to another of one queue, by the stage that gets them.
  std::vector<Action> messages(int from, int to, bool backwards, bool as_sent) const {
    std::vector<Action> found;
    for (const Action& action : schedule_.rows[static_cast<size_t>(as_sent ? from : to)]) {
      if (action.act != (as_sent ? Act::kSend : Act::kReceive) || action.backwards != backwards) {
        continue;
      }
      const int step = backwards ? -1 : 1;
      const int receiver = action.stage + (as_sent ? step : 0);
      if (schedule_.rank_of(as_sent ? receiver : receiver - step) != (as_sent ? to : from))
        continue;
      found.push_back({.act = Act::kReceive,
                       .backwards = backwards,
                       .stage = static_cast<int16_t>(receiver),
                       .micro = action.micro});
    }
    return found;
  }

  // All are there, once: what can differ is the order in which a pair of ranks has them.
  void check_queues() const {
    for (int from = 0; from < schedule_.ranks(); ++from) {
      for (const bool backwards : {false, true}) {
        const int ranks = schedule_.ranks();
        const int to = (from + (backwards ? ranks - 1 : 1)) % ranks;
        const std::vector<Action> sent = messages(from, to, backwards, true);
        const std::vector<Action> expected = messages(from, to, backwards, false);
        const auto [left, right] = std::ranges::mismatch(sent, expected);
        if (right == expected.end()) continue;
        throw ScheduleError(to, *right,
                            "comes where rank " + std::to_string(from) + " sends that to stage " +
                                std::to_string(left->stage) + " of micro-batch " +
                                std::to_string(left->micro));
      }
    }
  }

  const PipelineTable& schedule_;
  const bool lowered_, sends_;
  const int last_;
  std::vector<StageProgress> stages_;
};

// ---- Simulation ---------------------------------------------------------------------------------

class Simulator {
 public:
  Simulator(const PipelineTable& schedule, const Costs& costs)
      : schedule_(schedule),
        costs_(costs),
        sends_(schedule.lowered() && schedule.ranks() > 1),
        ranks_(schedule.rows.size()),
        gathered_(static_cast<size_t>(schedule.stages)) {
    const auto pairs =
        static_cast<size_t>(schedule.stages) * static_cast<size_t>(schedule.micro_batches);
    for (auto& times : arrivals_) times.resize(pairs);
    for (const auto& row : schedule.rows) timing_.spans.emplace_back(row.size());
  }

  Timing run() {
    for (;;) {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) issue(rank);
      // What can begin first does.
      double first = std::numeric_limits<double>::infinity();
      std::optional<size_t> computing, sending;
      size_t way = 0;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (const auto start = compute_start(rank); start && *start < first) {
          first = *start, computing = rank, sending.reset();
        }
        for (const size_t one : {0, 1}) {
          if (const auto start = message_start(rank, one); start && *start < first) {
            first = *start, sending = rank, way = one, computing.reset();
          }
        }
      }
      if (computing) {
        do_compute(*computing, first);
      } else if (sending) {
        do_message(*sending, way, first);
      } else {
        break;
      }
    }
    check_ended();
    finish();
    return std::move(timing_);
  }

 private:
  struct Issued {
    size_t index;  // in the row
    double at;
  };
  struct Queue {
    std::vector<Issued> issued;
    size_t head = 0;
    double free = 0;
  };
  struct Rank {
    size_t next = 0;  // in the row
    double clock = 0;
    std::array<Queue, 2> queues;  // outputs, gradients
    double shards = 0;            // until when its gathers and reductions take
  };

  const Action& action(size_t rank, size_t index) const { return schedule_.rows[rank][index]; }
  bool at_end(size_t rank) const { return ranks_[rank].next == schedule_.rows[rank].size(); }
  std::optional<double>& arrival(int stage, int micro, bool backwards) {
    return arrivals_[backwards ? 1 : 0]
                    [static_cast<size_t>(stage) * static_cast<size_t>(schedule_.micro_batches) +
                     static_cast<size_t>(micro)];
  }

  // All up to the next calculation.
  void issue(size_t rank) {
    Rank& own = ranks_[rank];
    for (; !at_end(rank) && !action(rank, own.next).computes(); ++own.next) {
      const Action& now = action(rank, own.next);
      if (now.is_message()) {
        std::vector<Issued>& issued = own.queues[now.backwards ? 1 : 0].issued;
        if (issued.empty() || issued.back().index != own.next) {
          issued.push_back({own.next, own.clock});
        }
        if (!says_shapes(now)) continue;
        const std::optional<double>& when = arrival(now.stage, now.micro, false);
        if (!when) return;
        own.clock = std::max(own.clock, *when);
        continue;
      }
      const double start = std::max(own.clock, own.shards);
      const double end = now.act == Act::kRelease ? own.clock : start + costs_(now);
      timing_.spans[rank][own.next] = {now.act == Act::kRelease ? own.clock : start, end};
      if (now.act != Act::kRelease) own.shards = end;
      if (now.act == Act::kGather) gathered_[static_cast<size_t>(now.stage)] = end;
    }
  }

  std::optional<double> compute_start(size_t rank) {
    if (at_end(rank) || !action(rank, ranks_[rank].next).computes()) return std::nullopt;
    const Action& now = action(rank, ranks_[rank].next);
    double start = std::max(ranks_[rank].clock, gathered_[static_cast<size_t>(now.stage)]);
    const bool backwards = now.act != Act::kForward;
    const bool takes =
        now.act != Act::kWeightGradient && now.stage != (backwards ? schedule_.stages - 1 : 0);
    if (takes) {
      const std::optional<double>& when = arrival(now.stage, now.micro, backwards);
      if (!when) return std::nullopt;
      start = std::max(start, *when);
    }
    return start;
  }

  void do_compute(size_t rank, double start) {
    Rank& own = ranks_[rank];
    const Action& now = action(rank, own.next);
    own.clock = start + costs_(now);
    timing_.spans[rank][own.next] = {start, own.clock};
    ++own.next;
    const bool backwards = now.act != Act::kForward;
    const int receiver = now.stage + (backwards ? -1 : 1);
    if (sends_ || now.act == Act::kWeightGradient || receiver < 0 || receiver == schedule_.stages) {
      return;
    }
    arrival(receiver, now.micro, backwards) = own.clock;
  }

  const Issued* head(size_t rank, size_t way) const {
    const Queue& queue = ranks_[rank].queues[way];
    return queue.head == queue.issued.size() ? nullptr : &queue.issued[queue.head];
  }
  size_t receiver_of(const Action& send) const {
    return static_cast<size_t>(schedule_.rank_of(send.stage + (send.backwards ? -1 : 1)));
  }

  // Of a send at the head of a rank's queue whose receive is at the head of the other's.
  std::optional<double> message_start(size_t rank, size_t way) const {
    const Issued* send = head(rank, way);
    if (send == nullptr || action(rank, send->index).act != Act::kSend) return std::nullopt;
    const Action& sent = action(rank, send->index);
    const size_t to = receiver_of(sent);
    const Issued* receive = head(to, way);
    if (receive == nullptr) return std::nullopt;
    const Action& received = action(to, receive->index);
    if (received.act != Act::kReceive || received.micro != sent.micro ||
        received.stage != sent.stage + (sent.backwards ? -1 : 1)) {
      return std::nullopt;
    }
    return std::max(
        {send->at, receive->at, ranks_[rank].queues[way].free, ranks_[to].queues[way].free});
  }

  void do_message(size_t rank, size_t way, double start) {
    const Issued send = *head(rank, way);
    const Action& sent = action(rank, send.index);
    const size_t to = receiver_of(sent);
    const Issued receive = *head(to, way);
    const double end = start + costs_(sent);
    timing_.spans[rank][send.index] = timing_.spans[to][receive.index] = {start, end};
    for (const size_t side : {rank, to}) {
      Queue& queue = ranks_[side].queues[way];
      ++queue.head;
      queue.free = end;
    }
    const Action& received = action(to, receive.index);
    arrival(received.stage, received.micro, received.backwards) = end;
  }

  // Nothing can begin any more: all is done, or ranks wait for each other.
  void check_ended() const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!at_end(rank)) {
        throw ScheduleError(static_cast<int>(rank), action(rank, ranks_[rank].next),
                            "waits for ever: messages or stages wait for each other in a circle");
      }
      for (const size_t way : {0, 1}) {
        if (const Issued* left = head(rank, way)) {
          throw ScheduleError(static_cast<int>(rank), action(rank, left->index),
                              "waits for ever: queues have their messages in different orders");
        }
      }
    }
  }

  void finish() {
    double busy = 0;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      int live = 0, most = 0;
      for (size_t index = 0; index < schedule_.rows[rank].size(); ++index) {
        const Action& now = action(rank, index);
        if (!now.computes()) continue;
        const Timing::Span& span = timing_.spans[rank][index];
        busy += span.end - span.start;
        timing_.seconds = std::max(timing_.seconds, span.end);
        if (now.act == Act::kForward) most = std::max(most, ++live);
        if (now.act == Act::kBackward || now.act == Act::kWeightGradient) --live;
      }
      timing_.live_activations.push_back(most);
    }
    const double all = timing_.seconds * static_cast<double>(ranks_.size());
    timing_.bubble = all > 0 ? 1 - busy / all : 0;
  }

  const PipelineTable& schedule_;
  const Costs& costs_;
  const bool sends_;
  std::vector<Rank> ranks_;
  std::vector<double> gathered_;                                // of each stage, when
  std::array<std::vector<std::optional<double>>, 2> arrivals_;  // of outputs, of gradients
  Timing timing_;
};

// ---- Lowering -----------------------------------------------------------------------------------

// Moves the last action of a row before up to `ahead` calculations, and no message of its queue. A
// gradient has the shape of its output and stays behind that.
void move_ahead(std::vector<Action>& row, int ahead) {
  const Action moved = row.back();
  size_t to = row.size() - 1;
  for (size_t index = to; index > 0 && ahead > 0; --index) {
    const Action& before = row[index - 1];
    if (before.computes()) {
      const bool own = before.stage == moved.stage && before.micro == moved.micro;
      if (moved.backwards && before.act == Act::kForward && own) break;
      to = index - 1;
      --ahead;
    } else if (before.is_message() == moved.is_message() && before.backwards == moved.backwards) {
      break;
    }
  }
  std::rotate(row.begin() + static_cast<std::ptrdiff_t>(to), row.end() - 1, row.end());
}

}  // namespace

std::string_view name_of(Act act) {
  static constexpr std::string_view kNames[] = {"forward",
                                                "backward",
                                                "gradient of the input",
                                                "gradient of the weights",
                                                "send",
                                                "receive",
                                                "gather",
                                                "release",
                                                "reduce"};
  const auto at = static_cast<size_t>(act);
  return at < std::size(kNames) ? kNames[at] : "(no action)";
}

std::string Action::describe() const {
  std::string text(name_of(act));
  if (is_message()) text += backwards ? " (gradient)" : " (output)";
  text += " of stage " + std::to_string(stage);
  return micro == -1 ? text : text + ", micro-batch " + std::to_string(micro);
}

bool PipelineTable::lowered() const {
  return std::ranges::any_of(rows, [](const std::vector<Action>& row) {
    return std::ranges::any_of(row, [](const Action& action) { return !action.computes(); });
  });
}

ScheduleError::ScheduleError(int on_rank, const Action& action, const std::string& problem)
    : ValueError(std::string(kSchedule) + ": rank " + std::to_string(on_rank) + ": " +
                 action.describe() + ": " + problem),
      rank(on_rank),
      stage(action.stage),
      micro(action.micro) {}

double unit_cost(const Action& action) {
  if (!action.computes()) return 0;
  return action.act == Act::kBackward ? 2 : 1;
}

// ---- Generators ---------------------------------------------------------------------------------

PipelineTable gpipe(int ranks, int micro_batches) {
  PipelineTable schedule = empty_schedule(ranks, 1, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = schedule.rows[static_cast<size_t>(rank)];
    for (const Act act : {Act::kForward, Act::kBackward}) {
      for (int micro = 0; micro < micro_batches; ++micro)
        row.push_back(action_of(act, rank, micro));
    }
  }
  return schedule;
}

PipelineTable one_f_one_b(int ranks, int micro_batches) {
  PipelineTable schedule = empty_schedule(ranks, 1, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = schedule.rows[static_cast<size_t>(rank)];
    const int warmup = std::min(ranks - 1 - rank, micro_batches);
    for (int step = 0; step < warmup + micro_batches; ++step) {
      if (step < micro_batches) row.push_back(action_of(Act::kForward, rank, step));
      if (step >= warmup) row.push_back(action_of(Act::kBackward, rank, step - warmup));
    }
  }
  return schedule;
}

PipelineTable interleaved_1f1b(int ranks, int stages_per_rank, int micro_batches) {
  if (stages_per_rank == 1) return one_f_one_b(ranks, micro_batches);
  PipelineTable schedule = empty_schedule(ranks, stages_per_rank, micro_batches);
  const int group = ranks * stages_per_rank;
  const int full = (micro_batches + ranks - 1) / ranks * group;  // as if the last group were whole
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = schedule.rows[static_cast<size_t>(rank)];
    const auto add = [&](Act act, int number) {
      const int turn = number % group / ranks;
      const int local = act == Act::kForward ? turn : stages_per_rank - 1 - turn;
      const int micro = number / group * ranks + number % ranks;
      if (micro < micro_batches) row.push_back(action_of(act, local * ranks + rank, micro));
    };
    const int warmup = std::min(2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks, full);
    for (int step = 0; step < warmup + full; ++step) {
      if (step < full) add(Act::kForward, step);
      if (step >= warmup) add(Act::kBackward, step - warmup);
    }
  }
  return schedule;
}

PipelineTable zero_bubble_h1(int ranks, int micro_batches) {
  PipelineTable schedule = empty_schedule(ranks, 1, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = schedule.rows[static_cast<size_t>(rank)];
    const auto add = [&](Act act, int micro) {
      if (micro >= 0 && micro < micro_batches) row.push_back(action_of(act, rank, micro));
    };
    // Later ranks begin to turn later and keep their weights' gradients so much longer: all have as
    // many live activations.
    const int warmup = ranks - 1 - rank;
    for (int step = 0; step < micro_batches + ranks - 1; ++step) {
      add(Act::kForward, step);
      add(Act::kInputGradient, step - warmup);
      add(Act::kWeightGradient, step - warmup - rank);
    }
  }
  return schedule;
}

PipelineTable make_schedule(PipelineSchedule kind, int ranks, int stages_per_rank,
                            int micro_batches) {
  TS_CHECK(kind == PipelineSchedule::kOneFOneB || stages_per_rank == 1, kSchedule,
           "only 1f1b has several stages on a rank; got ", stages_per_rank);
  switch (kind) {
    case PipelineSchedule::kGPipe:
      return lower(gpipe(ranks, micro_batches));
    case PipelineSchedule::kOneFOneB:
      return lower(interleaved_1f1b(ranks, stages_per_rank, micro_batches));
    case PipelineSchedule::kZeroBubbleH1:
      return lower(zero_bubble_h1(ranks, micro_batches));
  }
  TS_THROW(ValueError, kSchedule, "there is no schedule ", static_cast<int>(kind));
}

Timing simulate(const PipelineTable& schedule, const Costs& costs) {
  Checker(schedule).check();
  return Simulator(schedule, costs).run();
}

PipelineTable lower(const PipelineTable& computes, const LoweringOptions& options) {
  TS_CHECK(!computes.lowered(), kSchedule, "is lowered already");
  TS_CHECK(options.ahead >= 0, kSchedule, "ahead is at least 0; got ", options.ahead);
  for (const auto& row : computes.rows) {
    for (const Action& action : row) {
      TS_CHECK(options.costs(action) > 0, kSchedule, "each calculation takes time; ",
               action.describe(), " takes ", options.costs(action));
    }
  }
  const Timing timing = simulate(computes, options.costs);

  // The total order: what is calculated when it begins, a message when what it sends has ended, of
  // equal times messages first and by the rank that sends.
  struct Placed {
    double time;
    int sender;  // of a message; of other actions the number of ranks
    Action action;
  };
  const int ranks = computes.ranks();
  std::vector<std::vector<Placed>> placed(computes.rows.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& row = computes.rows[static_cast<size_t>(rank)];
    for (size_t index = 0; index < row.size(); ++index) {
      const Action& action = row[index];
      const Timing::Span& span = timing.spans[static_cast<size_t>(rank)][index];
      placed[static_cast<size_t>(rank)].push_back({span.start, ranks, action});
      const bool backwards = action.act != Act::kForward;
      const int receiver = action.stage + (backwards ? -1 : 1);
      if (ranks > 1 && action.act != Act::kWeightGradient && receiver >= 0 &&
          receiver < computes.stages) {
        const auto to = static_cast<size_t>(computes.rank_of(receiver));
        const auto message = [&](Act act, int stage) {
          Action end = action_of(act, stage, action.micro);
          end.backwards = backwards;
          return Placed{span.end, rank, end};
        };
        placed[static_cast<size_t>(rank)].push_back(message(Act::kSend, action.stage));
        placed[to].push_back(message(Act::kReceive, receiver));
      }
      const bool weights = action.act == Act::kBackward || action.act == Act::kWeightGradient;
      if (!weights || action.micro + 1 < computes.micro_batches) continue;
      for (const Act act : {Act::kRelease, Act::kReduce}) {
        placed[static_cast<size_t>(rank)].push_back(
            {span.end, ranks, action_of(act, action.stage, -1)});
      }
    }
  }

  PipelineTable lowered{
      .stages = computes.stages, .micro_batches = computes.micro_batches, .rows = {}};
  for (auto& events : placed) {
    std::ranges::stable_sort(
        events, {}, [](const Placed& event) { return std::pair(event.time, event.sender); });
    std::vector<Action>& row = lowered.rows.emplace_back();
    for (const Placed& event : events) {
      const Action& action = event.action;
      const bool has_input = action.stage > 0 && ranks > 1;
      if (has_input ? says_shapes(action) : action.act == Act::kForward && action.micro == 0) {
        row.push_back(action_of(Act::kGather, action.stage, -1));
        move_ahead(row, options.ahead);
      }
      row.push_back(action);
      if (action.act == Act::kReceive && !says_shapes(action)) move_ahead(row, options.ahead);
    }
  }
  return lowered;
}

}  // namespace tessera::distributed
