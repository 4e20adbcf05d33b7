// error: no rule makes batches of this type of example
#include <tessera/data/dataloader.h>

using namespace tessera;

struct Row {
  Tensor features;
  int label = 0;
#ifdef RIGHT
  void visit_tensors(auto&& visit) { visit(features); }
#endif
};
struct Rows : data::Dataset<Row> {
  int64_t size() const override { return 1; }
  Row get(int64_t) const override { return {}; }
};
void run(const Rows& rows) {
  for (auto& batch : data::DataLoader(rows, {.batch_size = 2})) (void)batch;
}
