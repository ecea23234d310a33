// Rows of adapters' factors on their way into panels (docs: AdapterFactors in lora_args.h).
#pragma once

#include <cstdint>

namespace octavo {

// source[rows, columns], `stride` elements from one row to the next, becomes words of 32 bits in `dtype`: a float, or
// two bf16 that are neighbours. Those of row r lie `lanes` words apart from out[places[r]] on; a row at -1 is left out.
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
