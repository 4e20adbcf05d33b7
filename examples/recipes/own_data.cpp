// Learns from a table of your own: CSV to data set to loader to Accelerator, with checkpoints.
//
//     own_data data.csv 5
//     tessera launch -n 2 --mixed-precision bf16 own_data data.csv 5
//
// Trains 5 epochs; started again it goes on from its last checkpoint.
// The table has columns of numbers and a column `label` (0, 1, ...).
#include <string>
#include <vector>

#include <tessera.h>

using namespace tessera;

struct Row {
  Tensor features, label;
  void visit_tensors(auto&& visit) { visit(features), visit(label); }
};

// get() makes one example; workers of a loader call it at the same time. Batches are stacks of
// them.
class Rows : public data::Dataset<Row> {
 public:
  explicit Rows(const std::string& file) : table_(data::read_csv(file)) {
    for (const std::string& name : table_.columns()) {
      if (name != "label") columns_.push_back(name);
    }
  }
  int64_t size() const override { return table_.num_rows(); }
  int64_t features() const { return static_cast<int64_t>(columns_.size()); }
  Row get(int64_t index) const override {
    std::vector<double> values;
    for (const std::string& name : columns_) values.push_back(table_.number(index, name));
    return {tensor(values, {features()}),
            full({}, table_.integer(index, "label"), {.dtype = kI64})};
  }

 private:
  data::CsvTable table_;
  std::vector<std::string> columns_;
};

struct Network : nn::Module<Network> {
  explicit Network(int64_t features)
      : hidden(add<nn::Linear>("hidden", features, 32)), head(add<nn::Linear>("head", 32, 2)) {}
  Tensor forward(const Tensor& x) { return head(gelu(hidden(x))); }
  nn::Linear& hidden;
  nn::Linear& head;
};

void train(const std::string& file, int64_t epochs) {
  Accelerator accelerator({.seed = 1,
                           .project_dir = "out/own_data",
                           .automatic_checkpoint_naming = true,
                           .total_limit = 2});
  const auto rows = std::make_shared<Rows>(file);
  const int64_t known = rows->size() * 9 / 10;
  const auto parts = data::random_split(rows, {known, rows->size() - known}, /*seed=*/1);
  data::DataLoader<Row> loader(parts[0], {.batch_size = 16, .shuffle = true, .workers = 1});
  data::DataLoader<Row> validation(parts[1], {.batch_size = 64});
  Network model(rows->features());
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  accelerator.prepare(model, optimizer, loader, validation);

  if (!accelerate::list_checkpoints("out/own_data").empty()) {
    accelerator.print("going on from ", accelerator.load_state().folder);
  }
  while (loader.cursor().epoch < epochs) {  // where the checkpoint was, also within an epoch
    const int64_t epoch = loader.cursor().epoch;
    for (const Row& batch : loader) {
      {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(cross_entropy(model(batch.features), batch.label));
        optimizer.step(), optimizer.zero_grad();
      }
      if (accelerate::should_checkpoint() == RunRequest::kCheckpointAndStop) {  // SIGTERM
        accelerator.save_state();
        return;
      }
    }
    double right = 0, seen = 0;
    for (const Row& batch : validation) {
      const NoGradGuard no_grad;
      const auto [guesses, truth] =
          accelerator.gather_for_metrics(std::pair(model(batch.features).argmax(-1), batch.label));
      right += eq(guesses, truth).sum().item(), seen += static_cast<double>(truth.size(0));
    }
    accelerator.print("epoch ", epoch, ": ", right / seen, " of ", seen, " rows right");
    accelerator.save_state();
  }
  accelerate::save_model(model, "out/own_data/model");
}

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    TS_CHECK(arguments.size() == 2, "own_data", "give it a table and a number of epochs");
    train(arguments[0], std::stoll(arguments[1]));
  });
}
