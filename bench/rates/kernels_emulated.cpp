// The kernels as C++, for the emulation.
#include "kernels.cu"
