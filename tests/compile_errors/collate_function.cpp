// error: a loader's function to collate takes a std::span of the data set's examples
#include <tessera/data/dataloader.h>

using namespace tessera;

struct Row {
  std::string text;
};
struct Rows : data::Dataset<Row> {
  int64_t size() const override { return 1; }
  Row get(int64_t) const override { return {}; }
};
#ifdef RIGHT
int64_t count(std::span<Row> rows) { return std::ssize(rows); }
#else
int64_t count(const std::vector<std::string>& rows) { return std::ssize(rows); }
#endif
void run(const Rows& rows) {
  for (auto& batch : data::DataLoader(rows, {.batch_size = 2}, count)) (void)batch;
}
