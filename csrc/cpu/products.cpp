// The table of products, including products with adapters' factors, for instruction sets that do not speed up the other
// kernels; with tiles, also attention. All other kernels are those of a narrower set (dispatch.cpp). Compiled once for
// each set, as kernels.cpp is.
#include "experts.h"
#include "lora_a.h"
#ifdef OCTAVO_AMX
#include "attention.h"
#endif

namespace octavo {

const ProductKernels OCTAVO_CONCAT(kProducts_, OCTAVO_ISA) = {
    OCTAVO_ISA::linear,    OCTAVO_ISA::experts_up,           OCTAVO_ISA::experts_down,
    OCTAVO_ISA::shrink,    OCTAVO_ISA::experts_shrink<true>, OCTAVO_ISA::experts_shrink<false>,
#ifdef OCTAVO_AMX
    OCTAVO_ISA::attention,
#else
    nullptr,
#endif
};

}  // namespace octavo
