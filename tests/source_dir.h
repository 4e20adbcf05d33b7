// The tree that was built. A function, so that programs of every checkout compile to the same
// objects and a compiler cache finds them.
#pragma once

namespace tessera::tests {

const char* source_dir();

}  // namespace tessera::tests
