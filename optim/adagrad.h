// Adagrad, with the other optimizers.
#pragma once

#include <tessera/optim/optimizers.h>
