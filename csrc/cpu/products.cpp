// Products alone, with tiles attention too, those with adapters' factors among them, for instruction sets that bring
// nothing to the other kernels: those are taken from a narrower set's table (dispatch.cpp). Compiled once per set, as
// kernels.cpp is.
#include "experts.h"
#include "lora_a.h"
#ifdef OCTAVO_TILES
#include "attention.h"
#endif

namespace octavo {

const ProductKernels OCTAVO_CONCAT(kProducts_, OCTAVO_ISA) = {
    OCTAVO_ISA::linear,    OCTAVO_ISA::experts_up,           OCTAVO_ISA::experts_down,
    OCTAVO_ISA::shrink,    OCTAVO_ISA::experts_shrink<true>, OCTAVO_ISA::experts_shrink<false>,
#ifdef OCTAVO_TILES
    OCTAVO_ISA::attention,
#else
    nullptr,
#endif
};

}  // namespace octavo
