#include "source_dir.h"

namespace tessera::tests {

const char* source_dir() { return TESSERA_SOURCE_DIR; }

}  // namespace tessera::tests
