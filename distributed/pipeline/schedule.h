// Pipeline schedules as data: what each rank does in one step, in its order, without tensors.
//
//     const PipelineTable schedule = lower(one_f_one_b(4, 8));  // ranks, micro-batches
//     const Timing timing = simulate(schedule);  // ScheduleError where it cannot be
//     timing.bubble;                             // 3 / 11
//
// Stage s is on rank s % ranks. A generator gives what is calculated; lower() adds what ranks send
// each other and when parameters are gathered and gradients reduced. Any table that simulate()
// accepts can be run.
//
// [Note: messages of a pipeline] Each rank has two queues, one for the outputs that go to the next
// stage and one for the gradients that come back, and messages of a queue are carried out in its
// order. A send may end only with its receive, as NCCL's do. lower() puts what is calculated and
// what is sent into one total order, that of a simulated run, and each row and each queue into the
// order of these. So of the operations that are not finished the first one has all that it waits
// for: both ends of a message are at the head of their queues, what is calculated has its inputs.
// No run gets stuck, whatever its times are. The first output that a stage receives says which
// shapes all have: there the rank waits where it issues the receive, in its place of the order.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::distributed {

enum class Act : uint8_t {
  kForward,
  kBackward,        // gradients of inputs and of weights
  kInputGradient,   // the first half of a backward,
  kWeightGradient,  // and the second, which nobody waits for
  kSend,            // issued: the rank goes on
  kReceive,         // issued; what is calculated from it waits, for a stage's first output the rank
  kGather,          // parameters of the stage, where its ranks hold parts of them
  kRelease,         // them
  kReduce,          // gradients of the stage over the data-parallel ranks
};
std::string_view name_of(Act act);  // "forward"

struct Action {
  Act act = Act::kForward;
  bool backwards = false;  // kSend, kReceive: a gradient
  int16_t stage = 0;       // that acts: a receive's is the one that gets the message
  int32_t micro = 0;       // -1: all of them (kGather, kRelease, kReduce)
  bool computes() const { return act <= Act::kWeightGradient; }
  bool is_message() const { return act == Act::kSend || act == Act::kReceive; }
  // "send (gradient) of stage 1, micro-batch 3"
  std::string describe() const;
  friend bool operator==(const Action&, const Action&) = default;
};

struct PipelineTable {
  int stages = 0;
  int micro_batches = 0;
  std::vector<std::vector<Action>> rows;  // of each rank
  int ranks() const { return static_cast<int>(rows.size()); }
  int rank_of(int stage) const { return stage % ranks(); }
  // Whether the messages are in it, too.
  bool lowered() const;
};

// What a schedule does wrong, and where.
class ScheduleError : public ValueError {
 public:
  ScheduleError(int rank, const Action& action, const std::string& problem);
  int rank, stage, micro;  // micro: -1 for all of them
};

// ---- Generators: of any number of micro-batches, 1 and fewer than stages included. ValueError for
// numbers below 1.

// All forwards, then all backwards. Activations of all micro-batches are alive.
PipelineTable gpipe(int ranks, int micro_batches);
// A rank r begins with ranks - 1 - r forwards and then takes turns, so that activations of at most
// min(micro_batches, ranks - r) micro-batches are alive (PipeDream-Flush).
PipelineTable one_f_one_b(int ranks, int micro_batches);
// Several stages on each rank, micro-batches by groups of `ranks` (Megatron): a bubble that is
// smaller by the number of stages, for more messages. What is missing in the last group is left
// out.
PipelineTable interleaved_1f1b(int ranks, int stages_per_rank, int micro_batches);
// Gradients of weights wait for where there is nothing else to do, with at most as many live
// activations as 1F1B's first rank has (Qi et al., Zero Bubble Pipeline Parallelism, ZB-H1).
PipelineTable zero_bubble_h1(int ranks, int micro_batches);

enum class PipelineSchedule : uint8_t {
  kGPipe,
  kOneFOneB,  // interleaved where a rank has several stages
  kZeroBubbleH1,
};
// One of them, lowered. ValueError for several stages on a rank where only 1F1B has them.
PipelineTable make_schedule(PipelineSchedule kind, int ranks, int stages_per_rank,
                            int micro_batches);

// ---- Time

// Seconds, or any unit, of an action; of a message those of its kSend.
using Costs = std::function<double(const Action&)>;
// A forward 1, a backward 2, half of a backward 1, all else 0.
double unit_cost(const Action& action);

struct LoweringOptions {
  // Receives and gathers are issued this many calculations of the rank before they are needed, if
  // that keeps the order of their queue.
  int ahead = 1;
  // The costs of calculations, above 0. They choose the total order; results do not depend on them.
  Costs costs = unit_cost;
};
// `computes`: a schedule without messages. ScheduleError, ValueError for a lowered one.
PipelineTable lower(const PipelineTable& computes, const LoweringOptions& options = {});

struct Timing {
  struct Span {
    double start = 0, end = 0;
  };
  std::vector<std::vector<Span>> spans;  // of each action of each row; of both ends of a message
  // For each rank the largest number of (stage, micro-batch) pairs at a time whose forward has
  // begun and whose backward has not ended.
  std::vector<int> live_activations;
  double seconds = 0;  // until the last calculation has ended
  double bubble = 0;   // share of these seconds in which a rank calculates nothing, over all ranks
};
// Runs a table on ranks that calculate one thing at a time, with queues as in
// [Note: messages of a pipeline]; without messages, stages hand over at once. First it checks:
// everything that a step needs is there once, on the rank of its stage; forwards, gradients of
// inputs and gradients of weights come by ascending micro-batches in each stage (random numbers,
// and the bits of sums); each has its inputs; sends follow what they send; both ends of each pair
// of ranks have one order of messages; parameters are there while they are used; a reduction comes
// after the last gradient. ScheduleError, also if ranks would wait forever.
Timing simulate(const PipelineTable& schedule, const Costs& costs = unit_cost);

}  // namespace tessera::distributed
