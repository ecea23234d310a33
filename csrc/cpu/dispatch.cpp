// Run-time dispatch by cpuid, or by what an ARM system says of its processor (arm_features.h). The compiler's
// __builtin_cpu_supports also asks whether the operating system saves the wide registers, which cpuid's feature bits
// alone do not tell. Features that not every compiler knows by name are read as bits here.
#include "dispatch.h"

#include <atomic>
#include <stdexcept>

// The build defines OCTAVO_HAS_<set> for each set that it compiles.
#if defined(OCTAVO_HAS_avx2) || defined(OCTAVO_HAS_avx512) || defined(OCTAVO_HAS_avx512_bf16)
#define OCTAVO_X86_KERNELS
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(OCTAVO_HAS_neon_dotprod) || defined(OCTAVO_HAS_neon_bf16)
#include "arm_features.h"
#endif

namespace octavo {

namespace {

#ifdef OCTAVO_X86_KERNELS

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid_features(unsigned subleaf) {
    Registers r;
    __get_cpuid_count(7, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// Returns whether this process may use the tile registers, after asking for them. Linux keeps room for them (8 KB a
// thread) only in processes that asked; threads and forked children are included.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    if ((cpuid_features(0).edx & kAll) != kAll) return false;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
    // The system must have set XCR0's bits for tiles (17: their shapes, 18: their data) to grant this. They are checked
    // all the same: not every hypervisor and sandbox is faithful.
    unsigned low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
#else
    return false;
#endif
}

// Returns the table of a set that differs from `base` only in its products. It lives as long as the process.
[[maybe_unused]] const KernelTable* with_products(const char* name, const KernelTable& base,
                                                  const ProductKernels& products) {
    KernelTable* table = new KernelTable(base);
    table->name = name;
    table->linear = products.linear;
    table->experts_up = products.experts_up;
    table->experts_down = products.experts_down;
    table->shrink = products.shrink;
    table->experts_shrink_up = products.experts_shrink_up;
    table->experts_shrink_down = products.experts_shrink_down;
    table->has_tiles = products.attention != nullptr;
    if (table->has_tiles) table->attention = products.attention;
    return table;
}

#endif

std::vector<const KernelTable*> find_tables() {
    std::vector<const KernelTable*> tables;
#ifdef OCTAVO_X86_KERNELS
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    [[maybe_unused]] const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    [[maybe_unused]] const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
#ifdef OCTAVO_HAS_amx
    if (avx512_bf16 && may_use_tiles()) tables.push_back(with_products("amx", kTable_avx512_bf16, kProducts_amx));
#endif
#ifdef OCTAVO_HAS_avx512_bf16
    if (avx512_bf16) tables.push_back(&kTable_avx512_bf16);
#endif
#ifdef OCTAVO_HAS_avx512
    if (avx512_vnni) tables.push_back(with_products("avx512_vnni", kTable_avx512, kProducts_avx512_vnni));
    if (avx512) tables.push_back(&kTable_avx512);
#endif
#ifdef OCTAVO_HAS_avx2_vnni
    if (avx2 && (cpuid_features(1).eax >> 4 & 1)) {
        tables.push_back(with_products("avx2_vnni", kTable_avx2, kProducts_avx2_vnni));
    }
#endif
#ifdef OCTAVO_HAS_avx2
    if (avx2) tables.push_back(&kTable_avx2);
#endif
    // Slow emulations, for tests. They come after the sets that they build on, so the best table is never one of them.
#ifdef OCTAVO_HAS_amx_emulated
    if (avx512_bf16) tables.push_back(with_products("amx_emulated", kTable_avx512_bf16, kProducts_amx_emulated));
    if (avx2) tables.push_back(with_products("avx2_vnni_emulated", kTable_avx2, kProducts_avx2_vnni_emulated));
#endif
#endif
#ifdef OCTAVO_HAS_neon_bf16
    if (arm_has_dot_products() && arm_has_matrix_products()) tables.push_back(&kTable_neon_bf16);
#endif
#ifdef OCTAVO_HAS_neon_dotprod
    if (arm_has_dot_products()) tables.push_back(&kTable_neon_dotprod);
#endif
#ifdef OCTAVO_HAS_neon
    tables.push_back(&kTable_neon);
#endif
#ifdef OCTAVO_HAS_portable
    tables.push_back(&kTable_portable);
#endif
    if (tables.empty()) {
        throw std::runtime_error(
            "octavo's kernels were compiled for the processor of another machine alone (OCTAVO_HOST_ONLY); install it "
            "again on this one.");
    }
    return tables;
}

const std::vector<const KernelTable*>& available_tables() {
    static const std::vector<const KernelTable*> tables = find_tables();
    return tables;
}

std::atomic<const KernelTable*> selected{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : available_tables()) names.emplace_back(table->name);
    return names;
}

const KernelTable& kernels() {
    const KernelTable* table = selected.load(std::memory_order_relaxed);
    if (table == nullptr) {
        table = available_tables().front();
        selected.store(table, std::memory_order_relaxed);
    }
    return *table;
}

void set_isa(const std::string& name) {
    std::string known;
    for (const KernelTable* table : available_tables()) {
        if (name == table->name) {
            selected.store(table, std::memory_order_relaxed);
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::invalid_argument("instruction set '" + name +
                                "' is not one that this machine runs; use one of: " + known + ".");
}

}  // namespace octavo
