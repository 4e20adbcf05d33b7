// Runs a pipeline schedule on ranks: each walks its row of the table.
//
//     const auto outputs = world().split(0), gradients = world().split(0);  // a queue each
//     PipelineExecutor pipeline(make_schedule(PipelineSchedule::kOneFOneB, 4, 1, 8), {&stage},
//                               {*outputs, *gradients});
//     const std::vector<Tensor> losses = pipeline.step();  // of the rank with the last stage
//
// The gradients of parameters are those of one process that runs the micro-batches one after the
// other, to the bit: each backward adds one micro-batch's sum, in ascending order.
//
// Of what a stage returns only the history is kept until its backward; the elements go when they
// were sent, unless that backward reads them. Between the halves of a backward its linear layers
// keep their inputs and the gradients of their outputs (autograd/engine.h). An error says
// in which action of which rank it happened.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <tessera/autograd/engine.h>
#include <tessera/autograd/node.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/pipeline/schedule.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// A stage of a model, as its rank has it.
class PipelineStage {
 public:
  virtual ~PipelineStage() = default;
  // `inputs`: what the stage before returned, as leaves; nothing for the first stage. Returns what
  // the next stage takes, 1 to 8 tensors of at most 8 dimensions, alike for all micro-batches
  // (undefined ones arrive as such); the last stage one scalar, the loss. Gradients come back of
  // those that require them.
  virtual std::vector<Tensor> forward(int micro, std::span<const Tensor> inputs) = 0;
  // The last stage's: the gradient with which the backward of a loss begins; undefined: 1.
  virtual Tensor seed(int /*micro*/, const Tensor& /*loss*/) { return {}; }
  // Lives while the backward of a micro-batch runs, or one of its halves; `ends`: none follows.
  virtual std::shared_ptr<void> enter_backward(int /*micro*/, bool /*ends*/) { return nullptr; }
  // For stages whose parameters are sharded: gather and release parameters, reduce gradients.
  virtual void gather() {}
  virtual void release() {}
  virtual void reduce() {}
};

// Two groups of the ranks of a pipeline, by their order in the table: messages of each are one
// queue.
struct PipelineGroups {
  Group& outputs;
  Group& gradients;
};

struct ExecutorOptions {
  Device device = kCpu;  // of what stages return
  // Micro-batches may have different shapes: each one's are sent, and a rank waits for those where
  // it issues the receive.
  bool shapes_vary = false;
};

class PipelineExecutor {
 public:
  // `stages`: this rank's, rank, rank + ranks, ... They and the groups outlive the executor. Throws
  // ScheduleError; ValueError for a table without messages, stages or groups that do not fit it.
  PipelineExecutor(PipelineTable schedule, std::vector<PipelineStage*> stages,
                   PipelineGroups groups, const ExecutorOptions& options = {});

  // One step. The losses of all micro-batches, on the rank of the last stage; elsewhere none.
  // ShapeError and DTypeError where outputs are not as those of the first micro-batch.
  std::vector<Tensor> step();
  // The forwards alone, without gradients, in the order of the table: what the last stage returns
  // for each micro-batch, one tensor of any shape; elsewhere none.
  std::vector<Tensor> evaluate();
  // What the last call did, in its order: the row of the table, where it came to its end.
  const std::vector<Action>& trace() const { return trace_; }

 private:
  using Key = std::pair<int, int>;  // stage, micro-batch
  struct Live {
    std::vector<Tensor> inputs;
    Tensor loss;                // of the last stage
    std::vector<Edge> history;  // of the outputs that require grad
  };
  struct Arriving {
    std::vector<Tensor> tensors;
    std::vector<Work> works;
  };
  // How the tensors between two stages look.
  struct Look {
    DType dtype;
    bool requires_grad;
    Shape shape;
    bool present = true;
    friend bool operator==(const Look&, const Look&) = default;
  };

  std::vector<Tensor> walk(bool trains);
  void forget();
  template <typename Part, typename Where>
  void named(const Part& part, const Where& where) const;
  void run(const Action& action);
  void forward(const Action& action);
  void backward(const Action& action);
  void weight_gradients(const Action& action);
  void send(const Action& action);
  void receive(const Action& action);
  std::vector<Tensor> taken(std::map<Key, Arriving>& from, Key key);
  void hand_on(bool backwards, const Action& from, std::vector<Tensor> tensors);
  // Where the looks of a micro-batch's tensors are kept: all have those of the first one, unless
  // they vary.
  Key look_key(const Action& action) const {
    return {action.stage, options_.shapes_vary ? action.micro : 0};
  }
  bool sends_looks(const Action& action) const {
    return !action.backwards && (action.micro == 0 || options_.shapes_vary);
  }
  PipelineStage& stage_of(int stage);
  Group& group_of(bool backwards) { return backwards ? groups_.gradients : groups_.outputs; }
  int peer_of(const Action& action) const;

  const PipelineTable schedule_;
  const std::vector<PipelineStage*> stages_;
  const PipelineGroups groups_;
  const ExecutorOptions options_;
  const int rank_;
  bool trains_ = true;
  std::vector<Action> trace_;
  std::vector<Tensor> losses_;
  std::map<Key, Live> live_;                               // between forward and backward
  std::map<Key, SplitBackward> halves_;                    // between the halves of a backward
  std::map<Key, Arriving> arriving_[2];                    // outputs and gradients that are taken
  std::map<Key, std::vector<Tensor>> leaving_[2];          // that are sent
  std::map<Key, std::vector<Look>> looks_in_, looks_out_;  // see look_key()
  std::vector<Work> sends_;
};

}  // namespace tessera::distributed
