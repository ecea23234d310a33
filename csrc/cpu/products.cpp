// Products alone, for instruction sets that bring nothing to the other kernels: those are taken from a narrower set's
// table (dispatch.cpp). Compiled once per set, as kernels.cpp is.
#include "linear.h"

namespace octavo {

const Kernel OCTAVO_CONCAT(kLinear_, OCTAVO_ISA) = OCTAVO_ISA::linear;

}  // namespace octavo
