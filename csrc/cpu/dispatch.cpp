// Run-time dispatch by cpuid. The compiler's own __builtin_cpu_supports also asks whether the operating system saves
// the wide registers, which cpuid's feature bits alone do not tell.
#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace octavo {

namespace {

std::vector<const KernelTable*> available_tables() {
    std::vector<const KernelTable*> tables;
#ifdef OCTAVO_X86_KERNELS
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (avx512_bf16) tables.push_back(&kTable_avx512_bf16);
    if (avx512) tables.push_back(&kTable_avx512);
    if (avx2) tables.push_back(&kTable_avx2);
#endif
    tables.push_back(&kTable_portable);
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
