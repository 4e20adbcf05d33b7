// What a StagedModel is made of. Internal: staged_model.cpp and stage_shards.cpp share it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/autograd/meta_inputs.h>
#include <tessera/core/memory/storage.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/fully_shard/param_group.h>
#include <tessera/distributed/pipeline/staged_model.h>

namespace tessera::distributed {

inline constexpr std::string_view kStages = "pipeline";

// What products of a token are proportional to, in the modules of an order.
std::vector<double> arithmetic_of(nn::ModuleBase& model);
// What the tensor that ops read in a parameter's place is to the ranks that divide its layer.
uint64_t marks_of(const Tensor& parameter);

struct StagedModel::Impl {
  // What one call of a stage knows, until the backward of its micro-batch.
  struct Call : MetaInputs {
    enum class Phase : uint8_t { kBefore, kStage, kBehind };
    const Impl* impl = nullptr;
    int stage = 0;
    Phase phase = Phase::kBefore;
    TensorList received, outputs;
    // Arguments at the cut, which live as long as this, and what takes their place.
    std::vector<std::pair<Tensor, Tensor>> meanings;

    // Also of a copy that a recomputed call keeps of an argument.
    Tensor meaning_of(const Tensor& meta) const {
      for (const auto& [argument, value] : meanings) {
        if (argument.storage() == meta.storage() && argument.offset() == meta.offset() &&
            argument.shape() == meta.shape() && argument.strides() == meta.strides() &&
            argument.dtype() == meta.dtype()) {
          return value;
        }
      }
      return {};
    }
    TensorList resolved(const Op& op, std::span<const Tensor> inputs, bool in_place) const override;
  };
  // A stage of this rank.
  struct Stage : PipelineStage {
    Impl* impl = nullptr;
    int number = 0;
    std::map<int, std::shared_ptr<Call>> calls;  // by micro-batch, until its backward

    void gather() override { impl->finish_gathers(number); }
    void release() override { impl->release(number); }
    void reduce() override { impl->start_reductions(number, false); }
    std::vector<Tensor> forward(int micro, std::span<const Tensor> inputs) override;
    Tensor seed(int micro, const Tensor& loss) override {
      return impl->calls.seed ? impl->calls.seed(micro, loss) : Tensor();
    }
    std::shared_ptr<void> enter_backward(int micro, bool ends) override;
  };
  // Parameters of a stage of this rank that its data-parallel ranks divide.
  struct Shards {
    int stage;
    std::unique_ptr<ParamGroup> group;
    std::vector<size_t> parameters;  // their places in the list
    bool reduces = false;            // in this step, so far
  };
  // Of a parameter in one stage.
  struct Use {
    int stage;
    Tensor whole;  // a leaf that ops read; undefined on ranks that lack the stage
  };
  struct Parameter {
    std::string name;
    Tensor parameter;
    std::vector<Use> uses;     // by ascending stages; it belongs to the first one's
    Shards* shards = nullptr;  // that it is in, on ranks that have its stage
    bool arrived = false;      // a gradient in this step, on this rank
  };
  struct Place {
    Tensor* place;
    int stage;
    Tensor outside;  // of steps
    Tensor inside;   // of calls of the stage; undefined on ranks that lack it
    Tensor meta;     // in those of other stages
    bool is_buffer;
  };
  // A persistent one, and what shows whether this rank's has been written since all had the same.
  struct Buffer {
    std::string name;
    int stage;
    std::weak_ptr<Storage> storage = {};
    std::shared_ptr<VersionCounter> counter = {};
    uint32_t version = 0;

    bool is_unwritten(const Tensor& own) const {
      return storage.lock() == own.storage() && counter == own.impl()->version &&
             version == own.version();
    }
    void note(const Tensor& own) {
      storage = own.storage();
      counter = own.impl()->version;
      version = own.version();
    }
  };

  nn::ModuleBase* model = nullptr;
  Mesh* mesh = nullptr;
  int ranks = 1, rank = 0, stages = 1;
  std::vector<std::string> cuts;
  std::vector<Parameter> parameters;
  std::vector<Place> places;
  std::vector<Buffer> buffers;
  std::vector<std::unique_ptr<Stage>> own;
  std::vector<HookHandle> handles;
  std::vector<double> arithmetic;  // of each stage
  StageSharding sharding = StageSharding::kNone;
  bool is_divided = false;  // by tensor parallelism
  std::vector<std::unique_ptr<Shards>> shards;

  // Within a step.
  bool in_step = false, trains = false, in_backward = false;
  Calls calls;
  std::optional<PipelineGroups> groups;
  std::vector<Work> sends;
  int shown = -1;
  Call* current = nullptr;

  int rank_of(int stage) const { return stage % ranks; }
  bool has(int stage) const { return rank_of(stage) == rank; }
  // "stage 1, which begins with 'h.6'"
  std::string title(int stage) const {
    std::string text = "stage " + std::to_string(stage);
    if (stage > 0) text += ", which begins with '" + cuts[static_cast<size_t>(stage - 1)] + "'";
    return text;
  }

  void deal(const StagingOptions& options);
  void divide(Parameter& parameter);
  void shard();
  void finish_gathers(int stage);
  void release(int stage);
  void start_reductions(int stage, bool tied);
  void forget_shards();
  void at_cut(int stage, nn::TensorRefs inputs);
  void show(int stage);
  void hide();
  void begin();
  void finish();
  Tensor as_gradient(const Parameter& of, const Tensor& gradient) const;
};

}  // namespace tessera::distributed
