// Says which functions a program and the processes that it starts enter, without building anything anew:
//     g++ -std=c++20 -O1 -shared -fPIC scripts/mutate_coverage.cpp -o coverage.so
//     COVERAGE_ROOT=build/dev COVERAGE_OUT=folder LD_PRELOAD=./coverage.so build/dev/tests/test_X
// The first byte of each function of the objects below COVERAGE_ROOT becomes a breakpoint; the first entry into one
// notes it and puts the byte back. COVERAGE_OUT/NAME-OF-OBJECT holds a byte for each entry of its .symtab, in order: 1
// where the function was entered. It is a shared mapping, so what a killed process did is in it, too. x86-64, Linux.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct Function {
  uint8_t* entry;
  uint8_t* entered;
  uint8_t byte;
};
std::vector<Function>* functions = nullptr;  // by entry; never changed once the handler stands

void on_breakpoint(int, siginfo_t*, void* context) {
  greg_t& next = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  uint8_t* entry = reinterpret_cast<uint8_t*>(next) - 1;
  const auto found = std::lower_bound(functions->begin(), functions->end(), entry,
                                      [](const Function& f, uint8_t* at) { return f.entry < at; });
  if (found == functions->end() || found->entry != entry) {
    std::signal(SIGTRAP, SIG_DFL);
    return;
  }
  *found->entered = 1;
  *entry = found->byte;  // other threads that were stopped here find it as they go on
  next = reinterpret_cast<greg_t>(entry);
}

template <class T>
T* mapped(const std::string& path, int flags, size_t size) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (file < 0) return nullptr;
  struct stat status = {};
  ::fstat(file, &status);
  if (size == 0) size = static_cast<size_t>(status.st_size);
  if ((flags & O_CREAT) != 0 && ::ftruncate(file, static_cast<off_t>(size)) != 0) return nullptr;
  const int writes = (flags & O_CREAT) != 0 ? PROT_WRITE : 0;
  void* memory = ::mmap(nullptr, size, PROT_READ | writes, MAP_SHARED, file, 0);
  ::close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
}

int add_object(dl_phdr_info* object, size_t, void*) {
  char real[4096];
  const char* name = object->dlpi_name[0] != 0 ? object->dlpi_name : "/proc/self/exe";
  if (::realpath(name, real) == nullptr) return 0;
  const std::string path = real, root = std::getenv("COVERAGE_ROOT");
  if (path.compare(0, root.size(), root) != 0) return 0;
  const auto* elf = mapped<uint8_t>(path, O_RDONLY, 0);
  if (elf == nullptr) return 0;
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(elf);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(elf + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(elf + sections[i].sh_offset);
    const size_t count = sections[i].sh_size / sizeof(Elf64_Sym);
    const std::string out = std::getenv("COVERAGE_OUT");
    auto* entered = mapped<uint8_t>(out + path.substr(path.rfind('/')), O_RDWR | O_CREAT, count);
    if (entered == nullptr) continue;
    for (size_t j = 0; j < count; ++j) {
      if (ELF64_ST_TYPE(symbols[j].st_info) != STT_FUNC || symbols[j].st_size == 0) continue;
      auto* entry = reinterpret_cast<uint8_t*>(object->dlpi_addr + symbols[j].st_value);
      functions->push_back({entry, entered + j, *entry});
    }
  }
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& part = object->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const uintptr_t begin = (object->dlpi_addr + part.p_vaddr) & ~uintptr_t{4095};
    const uintptr_t end = object->dlpi_addr + part.p_vaddr + part.p_memsz;
    ::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE | PROT_EXEC);
  }
  return 0;
}

[[gnu::constructor]] void start() {
  if (std::getenv("COVERAGE_ROOT") == nullptr || std::getenv("COVERAGE_OUT") == nullptr) return;
  functions = new std::vector<Function>;
  dl_iterate_phdr(add_object, nullptr);
  const auto before = [](const Function& a, const Function& b) { return a.entry < b.entry; };
  const auto same = [](const Function& a, const Function& b) { return a.entry == b.entry; };
  std::stable_sort(functions->begin(), functions->end(), before);
  functions->erase(std::unique(functions->begin(), functions->end(), same), functions->end());
  struct sigaction action = {};
  action.sa_sigaction = on_breakpoint;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigaction(SIGTRAP, &action, nullptr);
  for (const Function& function : *functions) *function.entry = 0xCC;
}

}  // namespace
