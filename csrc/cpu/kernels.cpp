// The table of all kernels for one instruction set. The build compiles this file once for each set, with that set's
// flags and OCTAVO_ISA (its namespace and the suffix of its table) defined.
#include "attention.h"
#include "elementwise_kernels.h"
#include "embedding.h"
#include "expert_routing.h"
#include "experts.h"
#include "logprobs.h"
#include "lora_a.h"
#include "norms_and_rotary.h"
#include "recurrent.h"
#include "sampling.h"
#include "sparse_attention.h"

namespace octavo {

const KernelTable OCTAVO_CONCAT(kTable_, OCTAVO_ISA) = {
    OCTAVO_STRING(OCTAVO_ISA),
    OCTAVO_ISA::linear,
    OCTAVO_ISA::embedding,
    OCTAVO_ISA::take_rows,
    OCTAVO_ISA::norm,
    OCTAVO_ISA::activation,
    OCTAVO_ISA::add_rows,
    OCTAVO_ISA::rotary,
    OCTAVO_ISA::attention,
    OCTAVO_ISA::argmax,
    OCTAVO_ISA::sample,
    OCTAVO_ISA::mask,
    OCTAVO_ISA::log_sum,
    OCTAVO_ISA::rank,
    OCTAVO_ISA::route,
    OCTAVO_ISA::gather_experts,
    OCTAVO_ISA::experts_up,
    OCTAVO_ISA::experts_down,
    OCTAVO_ISA::experts_shrink<true>,
    OCTAVO_ISA::experts_shrink<false>,
    OCTAVO_ISA::multiply,
    OCTAVO_ISA::conv,
    OCTAVO_ISA::scan,
    OCTAVO_ISA::delta,
    OCTAVO_ISA::recurrence,
    OCTAVO_ISA::shrink,
    OCTAVO_ISA::pool,
    OCTAVO_ISA::latent_attention,
    OCTAVO_ISA::chosen_attention,
    OCTAVO_ISA::choose,
    OCTAVO_ISA::merge_chosen,
    OCTAVO_ISA::replace_rows,
};

}  // namespace octavo
