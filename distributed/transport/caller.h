// The line of the program behind collectives that the library calls far below it.
// A function that takes the line of its caller opens a scope with it around its work.
#pragma once

#include <tessera/core/context.h>
#include <tessera/core/source_location.h>

namespace tessera::distributed {

// For the time of the scope records and messages of this Context's collectives name `where`,
// messages with the library's own line behind it. The innermost scope counts.
class CallerScope {
 public:
  explicit CallerScope(const SourceLocation& where)
      : where_(Context::current().slot<Slot>().where, where) {}
  // Of the scope that is open; its line is 0 where none is.
  static const SourceLocation& current() { return Context::current().slot<Slot>().where; }

 private:
  struct Slot {
    SourceLocation where;
  };
  ScopedValue<SourceLocation> where_;
};

}  // namespace tessera::distributed
