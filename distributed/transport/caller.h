// Reports the program's line for collectives that the library calls internally: a function that
// takes its caller's line opens a scope with it around its work.
#pragma once

#include <tessera/core/context.h>
#include <tessera/core/source_location.h>

namespace tessera::distributed {

// Within the scope records and messages of this Context's collectives name `where`, and messages
// add the library's own line. The innermost scope counts.
class CallerScope {
 public:
  explicit CallerScope(const SourceLocation& where)
      : where_(Context::current().slot<Slot>().where, where) {}
  // The line of the open scope; 0 if none is open.
  static const SourceLocation& current() { return Context::current().slot<Slot>().where; }

 private:
  struct Slot {
    SourceLocation where;
  };
  ScopedValue<SourceLocation> where_;
};

}  // namespace tessera::distributed
