// Packing of adapters' factors into panels (their layout: AdapterFactors in lora_args.h).
#pragma once

#include <cstdint>

namespace octavo {

// Packs source[rows, columns], whose rows lie `stride` elements apart, as words of 32 bits in `dtype`: a float, or two
// neighbouring bf16. Row r's words lie `lanes` words apart from out[places[r]] on. A row whose place is -1 is left out.
struct FactorRows {
    const float* source;
    int64_t stride, rows, columns;
    const int64_t* places;
    uint32_t* out;
    int64_t lanes;
    int32_t dtype;
};

void pack_factor_rows(const FactorRows& args);

}  // namespace octavo
