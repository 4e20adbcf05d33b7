#include <tessera.h>

double price(double rate) { return tessera::tensor({rate, 2.0}).sum().item(); }
