// A shared library that is loaded when it is first needed, and stays.
#pragma once

#include <dlfcn.h>

#include <string>

namespace tessera::gpu {

class LazyLibrary {
 public:
  // `file` as the loader finds it, "libcudnn.so.9"; `package` is what a message says to install.
  LazyLibrary(const std::string& file, const char* package)
      : file_(file), handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ != nullptr) return;
    reason_ = file + " cannot be loaded (" + dlerror() + "); install " + package +
              " or add its folder to LD_LIBRARY_PATH";
  }

  template <class Function>
  void find(const char* name, Function*& function) {
    if (handle_ == nullptr) return;
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (function == nullptr) reason_ = file_ + " lacks " + name + "; install another version";
  }

  // Why it is not there, or not whole; empty where it is.
  const std::string& reason() const { return reason_; }

 private:
  std::string file_, reason_;
  void* handle_;
};

}  // namespace tessera::gpu
