// Products alone, for instruction sets that bring nothing to the other kernels: those are taken from a narrower set's
// table (dispatch.cpp). Compiled once per set, as kernels.cpp is.
#include "experts.h"

namespace octavo {

const ProductKernels OCTAVO_CONCAT(kProducts_, OCTAVO_ISA) = {
    OCTAVO_ISA::linear,
    OCTAVO_ISA::experts_up,
    OCTAVO_ISA::experts_down,
};

}  // namespace octavo
