#include <tessera/nn/container.h>

namespace tessera::nn {
namespace detail {

template <class Derived>
ModuleBase& ListModule<Derived>::operator[](size_t index) const {
  TS_CHECK_INDEX(index < size(), this->type_name(), "index ", index, " is outside its ", size(),
                 " modules");
  return this->child(index);
}

template <class Derived>
void ListModule<Derived>::remake_children(const ModuleBase& source) {
  for (size_t i = 0; i < source.num_children(); ++i) {
    append_module(source.child(i).remake_module());
  }
}

template class ListModule<Sequential>;
template class ListModule<ModuleList>;

}  // namespace detail

// ---- Sequential --------------------------------------------------------------------------------

Tensor Sequential::forward(const Tensor& x) {
  Tensor y = x;
  for (size_t i = 0; i < size(); ++i) y = child(i).call_tensor(y);
  return y;
}
std::unique_ptr<Sequential> Sequential::remake() const {
  auto copy = std::make_unique<Sequential>();
  copy->remake_children(*this);
  return copy;
}

// ---- ModuleList --------------------------------------------------------------------------------

std::string ModuleList::repr() const {
  if (size() == 0) return "ModuleList()";
  std::string text = "ModuleList(\n";
  for (size_t begin = 0, end; begin < size(); begin = end) {
    const std::string one = child(begin).repr();
    for (end = begin + 1; end < size() && child(end).repr() == one;) ++end;
    const size_t count = end - begin;
    text += "  (" + std::to_string(begin);
    if (count > 1) text += "-" + std::to_string(end - 1);
    text += "): ";
    if (count > 1) text += std::to_string(count) + " x ";
    for (const char c : one) {
      text += c;
      if (c == '\n') text += "  ";
    }
    text += '\n';
  }
  return text + ")";
}
std::unique_ptr<ModuleList> ModuleList::remake() const {
  auto copy = std::make_unique<ModuleList>();
  copy->remake_children(*this);
  return copy;
}

// ---- ModuleDict --------------------------------------------------------------------------------

bool ModuleDict::contains(std::string_view name) const {
  for (size_t i = 0; i < num_children(); ++i) {
    if (child(i).name() == name) return true;
  }
  return false;
}
std::unique_ptr<ModuleDict> ModuleDict::remake() const {
  auto copy = std::make_unique<ModuleDict>();
  for (size_t i = 0; i < num_children(); ++i) {
    copy->adopt(child(i).name(), child(i).remake_module());
  }
  return copy;
}

}  // namespace tessera::nn
