// What the packers of float and of integer matrices share.
#pragma once

#include "kernels.h"

namespace octavo {

// The first `steps` words of 32 bits of 32 rows that lie so many bytes apart, as [step][32].
void transpose_panel(const char* rows, int64_t stride_bytes, int64_t steps, char* out);

}  // namespace octavo
