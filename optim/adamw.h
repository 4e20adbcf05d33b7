// AdamW and Adam, with the other optimizers.
#pragma once

#include <tessera/optim/optimizers.h>
