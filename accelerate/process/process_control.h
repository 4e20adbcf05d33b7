// The rank of this process, and code that only some ranks run; usable alone, and part of every
// Accelerator.
//
//     ProcessControl ranks;
//     auto vocabulary = ranks.main_process_first([&] { return build_or_read_cache(path); });
//     ranks.on_main_process([&] { write_report(); });
//     auto own = ranks.split_between_processes(prompts);
//
// Functions that wait for other ranks are marked "collective": every rank calls them in the same
// order. An exception in the body of such a function reaches every rank: the rank that threw gets
// its own, the others a DistributedError that quotes it, so no rank keeps waiting.
#pragma once

#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/accelerate/process/rank_device.h>
#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/source_location.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

namespace distributed {
class Group;
class ProcessGroup;
}  // namespace distributed

// Rows [begin, end) of a list for one rank, and how often the last row of the list is repeated.
struct RankPart {
  int64_t begin = 0, end = 0;
  int64_t repeats = 0;
};
// Contiguous parts; the first `length % ranks` have one more row. With padding all parts have as
// many rows as the first, filled up with repeats of the list's last row. ValueError for padding of
// no rows.
RankPart part_of(int64_t length, int rank, int ranks, bool apply_padding);

namespace detail {

// How split_between_processes splits a value: its number of rows, and a part of it as a new value.
inline int64_t rows_of(const Tensor& tensor) {
  TS_CHECK_SHAPE(tensor.dim() > 0, "split_between_processes", "needs rows; got ", tensor);
  return tensor.size(0);
}
Tensor take_rows(const Tensor& tensor, const RankPart& part);
template <class T>
int64_t rows_of(const std::vector<T>& list) {
  return static_cast<int64_t>(list.size());
}
template <class T>
std::vector<T> take_rows(const std::vector<T>& list, const RankPart& part) {
  std::vector<T> own(list.begin() + part.begin, list.begin() + part.end);
  for (int64_t i = 0; i < part.repeats; ++i) own.push_back(list.back());
  return own;
}
template <class... T>
int64_t rows_of(const std::variant<T...>& value) {
  return std::visit([](const auto& held) { return rows_of(held); }, value);
}
template <class... T>
std::variant<T...> take_rows(const std::variant<T...>& value, const RankPart& part) {
  return std::visit([&](const auto& held) { return std::variant<T...>(take_rows(held, part)); },
                    value);
}
void check_rows(std::string_view name, int64_t rows, int64_t expected);
template <class K, class V>
int64_t rows_of(const std::map<K, V>& values) {
  int64_t rows = values.empty() ? 0 : rows_of(values.begin()->second);
  for (const auto& [key, value] : values) check_rows(concatenate(key), rows_of(value), rows);
  return rows;
}
template <class K, class V>
std::map<K, V> take_rows(const std::map<K, V>& values, const RankPart& part) {
  std::map<K, V> own;
  for (const auto& [key, value] : values) own.emplace(key, take_rows(value, part));
  return own;
}

// std::optional of a body's result; void for a body without a result.
template <class Result>
struct OnRank {
  using type = std::optional<Result>;
};
template <>
struct OnRank<void> {
  using type = void;
};

}  // namespace detail

class ProcessControl {
 public:
  // Uses the ranks of the current Context. If a launcher started this process as one of several
  // ranks and no distributed::ProcessGroup exists, it joins the others here; it leaves them with
  // the last ProcessControl, or at the end of tessera::run. Collective then, and if ranks are on
  // several nodes.
  ProcessControl();
  // The same, with this process's device, so that tensors of the device can be sent too.
  using ChooseDevice = std::function<Device(const accelerate::RankPlace& place)>;
  explicit ProcessControl(const ChooseDevice& device);
  ~ProcessControl();
  ProcessControl(const ProcessControl&) = delete;
  ProcessControl& operator=(const ProcessControl&) = delete;

  int process_index() const { return rank_; }
  int num_processes() const { return ranks_; }
  int local_process_index() const { return local_rank_; }  // on this node
  int num_local_processes() const { return local_ranks_; }
  bool use_distributed() const { return ranks_ > 1; }
  bool is_main_process() const { return rank_ == 0; }
  bool is_local_main_process() const { return local_rank_ == 0; }
  bool is_last_process() const { return rank_ == ranks_ - 1; }

  // Collective. If ranks are missing, the message names the caller's line, here and below.
  void wait_for_everyone(const SourceLocation& where = SourceLocation::current()) const;

  // The body runs on the main rank first, then on the others at once. Collective; the local form is
  // so only for the ranks of this node, so nodes may call it at different times or not at all.
  template <class Body>
  auto main_process_first(Body&& body,
                          const SourceLocation& where = SourceLocation::current()) const {
    return first(world(), std::forward<Body>(body), where);
  }
  template <class Body>
  auto local_main_process_first(Body&& body,
                                const SourceLocation& where = SourceLocation::current()) const {
    return first(*local_, std::forward<Body>(body), where);
  }

  // The body runs on the named rank only; nothing waits. Returns an optional with its result, empty
  // on the other ranks; void for a body without one. ValueError on every rank for an index that no
  // rank has.
  template <class Body>
  auto on_main_process(Body&& body) const {
    return only(is_main_process(), std::forward<Body>(body));
  }
  template <class Body>
  auto on_local_main_process(Body&& body) const {
    return only(is_local_main_process(), std::forward<Body>(body));
  }
  template <class Body>
  auto on_last_process(Body&& body) const {
    return only(is_last_process(), std::forward<Body>(body));
  }
  template <class Body>
  auto on_process(int index, Body&& body) const {
    check_index("on_process", index, ranks_);
    return only(rank_ == index, std::forward<Body>(body));
  }
  template <class Body>
  auto on_local_process(int index, Body&& body) const {
    check_index("on_local_process", index, local_ranks_);
    return only(local_rank_ == index, std::forward<Body>(body));
  }

  // This rank's part of a list, a tensor's rows, or of maps and variants of them (whose values have
  // equal numbers of rows: ValueError); see part_of(). Returns a new value; a tensor shares memory
  // if nothing is padded. The argument is never changed. One process gets all of it.
  template <class T>
  T split_between_processes(const T& values, bool apply_padding = false) const {
    return detail::take_rows(values,
                             part_of(detail::rows_of(values), rank_, ranks_, apply_padding));
  }

  // A flag that any rank may set and all ranks read: true once after any rank has set it.
  void set_trigger() { trigger_ = true; }
  // Collective.
  bool check_trigger(const SourceLocation& where = SourceLocation::current());

  // Prints one line on stdout, on the main rank of each node, as std::cout << ... << args does.
  template <class... Args>
  void print(const Args&... args) const {
    if (!is_local_main_process()) return;
    PlainText<std::ostringstream> line;
    (line << ... << args);
    print_line(line.str());
  }

  distributed::Group& world() const { return *world_; }

 private:
  template <class Body>
  static auto only(bool here, Body&& body) {
    using Result = std::invoke_result_t<Body>;
    using Return = typename detail::OnRank<Result>::type;
    if constexpr (std::is_void_v<Result>) {
      if (here) body();
    } else {
      return here ? Return(body()) : Return();
    }
  }
  template <class Body>
  static auto first(distributed::Group& ranks, Body&& body, const SourceLocation& where) {
    using Result = std::invoke_result_t<Body>;
    if constexpr (std::is_void_v<Result>) {
      run_first(ranks, body, where);
    } else {
      std::optional<Result> result;
      run_first(
          ranks, [&] { result.emplace(body()); }, where);
      return std::move(*result);
    }
  }
  static void run_first(distributed::Group& ranks, const std::function<void()>& body,
                        const SourceLocation& where);
  static void check_index(std::string_view where, int index, int ranks);
  static void print_line(const std::string& line);

  std::shared_ptr<distributed::ProcessGroup> processes_;  // where this has joined them
  std::shared_ptr<distributed::Group> world_, local_;
  int rank_, ranks_, local_rank_, local_ranks_;
  bool trigger_ = false;
};

namespace detail {
// For tessera::run: ranks that a ProcessControl joins stay together until end() is called.
void keep_processes();
void end_processes();
// Tells this process's ProcessControl that an Accelerator has read the settings of its launch.
void note_settings_are_read();
}  // namespace detail

}  // namespace tessera
