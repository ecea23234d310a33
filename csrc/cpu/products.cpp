// Products alone, for instruction sets that bring nothing to the other kernels: those are taken from a narrower set's
// table (dispatch.cpp). Compiled once per set, as kernels.cpp is.
#include "linear.h"

#define OCTAVO_CONCAT2(a, b) a##b
#define OCTAVO_CONCAT(a, b) OCTAVO_CONCAT2(a, b)

namespace octavo {

const Kernel OCTAVO_CONCAT(kLinear_, OCTAVO_ISA) = OCTAVO_ISA::linear;

}  // namespace octavo
