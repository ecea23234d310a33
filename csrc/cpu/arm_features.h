// What a 64-bit ARM processor has beyond NEON. The system tells: programs may not read the processor's own registers.
// Included by dispatch.cpp, and by CMakeLists.txt if a build is for this machine alone.
#pragma once

#ifdef __APPLE__
#include <stddef.h>
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

namespace octavo {

#ifdef __APPLE__

inline bool arm_has(const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
// SDOT (FEAT_DotProd).
inline bool arm_has_dot_products() { return arm_has("hw.optional.arm.FEAT_DotProd"); }
// USDOT and USMMLA (FEAT_I8MM), BFDOT and BFMMLA (FEAT_BF16): no processor of today has only one of the two features.
inline bool arm_has_matrix_products() {
    return arm_has("hw.optional.arm.FEAT_I8MM") && arm_has("hw.optional.arm.FEAT_BF16");
}

#else

// Bits of the Linux ABI (asm/hwcap.h); older C libraries have no names for the last two.
inline bool arm_has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }
inline bool arm_has_matrix_products() {
    const unsigned long capabilities = getauxval(AT_HWCAP2);
    return (capabilities >> 13 & 1) && (capabilities >> 14 & 1);
}

#endif

}  // namespace octavo
