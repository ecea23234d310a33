// Cuts a mixture of experts into tasks: passes over tokens that fit the scratch memory, and in each pass the choices
// sorted by expert.
#include <algorithm>

#include "launch.h"
#include "launch_costs.h"

namespace octavo {

namespace {

// Memory for experts' input rows and for the rows between the two products. More tokens than fit take several passes,
// each of which reads the experts that it needs.
constexpr int64_t kExpertsScratchBytes = int64_t{32} << 20;
// Reading an expert's weights takes as long as multiplying about this many rows by them.
constexpr int64_t kRowsOfRead = 4;
// Units of cost in a row: finer than rows, so that a task may end within a part.
constexpr int64_t kCostScale = 4096;

}  // namespace

void ExpertsScratch::reserve(size_t entries, size_t parts, size_t input_bytes, size_t inner_bytes) {
    const auto grow = [](auto& memory, size_t count) {
        if (memory.size() < count) memory.resize(count);
        return memory.data();
    };
    schedule_.entries = grow(entries_, entries);
    schedule_.tokens = grow(tokens_, entries);
    schedule_.weights = grow(weights_, entries);
    schedule_.slots = grow(slots_, entries);
    schedule_.parts = grow(parts_, parts);
    schedule_.inputs = reinterpret_cast<char*>(grow(inputs_, input_bytes / sizeof(Line) + 1));
    schedule_.inner = reinterpret_cast<char*>(grow(inner_, inner_bytes / sizeof(Line) + 1));
}

void ExpertsScratch::reserve_adapters(size_t shrunk_bytes, size_t copy_bytes) {
    if (shrunk_.size() < shrunk_bytes / sizeof(Line) + 1) shrunk_.resize(shrunk_bytes / sizeof(Line) + 1);
    if (copies_.size() < copy_bytes / sizeof(Line) + 1) copies_.resize(copy_bytes / sizeof(Line) + 1);
    schedule_.shrunk = reinterpret_cast<char*>(shrunk_.data());
    schedule_.copies = reinterpret_cast<char*>(copies_.data());
}

namespace {

int32_t multiplied_dtype(const Matrix& m) {
    return m.format == kWeightF32 ? kF32 : m.format == kWeightBF16 ? kBF16 : kQ8;
}

int64_t row_bytes(int64_t width, int32_t dtype) {
    return dtype == kQ8 ? ceil_div(width, kQBlock) * static_cast<int64_t>(sizeof(QBlock)) : width * size_of(dtype);
}

double products_ns(const Matrix& m, int64_t rows, int64_t num_matrices) {
    const bool integers = is_integer(m.format);
    const double elements = static_cast<double>(m.n) * static_cast<double>(m.k);
    const double rate = integers ? kIntOpsPerNs : m.format == kWeightF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
    return std::max(elements * weight_bytes(m) * static_cast<double>(num_matrices) / kBytesPerNs,
                    2 * elements * static_cast<double>(rows) / rate);
}

}  // namespace

void ExpertsPlan::plan(const ExpertsArgs& args, const KernelTable& table, int threads, ExpertsScratch& scratch) {
    ExpertsPass pass{};
    pass.args = &args;
    pass.schedule = scratch.schedule();
    pass.input_dtype = multiplied_dtype(*args.up);
    pass.inner_dtype = multiplied_dtype(*args.down);
    pass.input_bytes = row_bytes(args.up->k, pass.input_dtype);
    pass.inner_bytes = row_bytes(args.down->k, pass.inner_dtype);
    pass.part_rows = std::clamp<int64_t>(kChunkBytes / pass.input_bytes, kMinChunkRows, kMaxChunkRows);
    const int64_t wanted = kTasksPerThread * threads;
    // Few tasks, because each begins to read anew at its own place in every expert.
    pass.down_tasks = std::min(ceil_div(args.down->n, kPanel), threads == 1 ? 1 : wanted / 2);
    pass.up_tasks = threads == 1 ? 1 : wanted;
    const int64_t token_bytes = args.top_k * (pass.input_bytes + pass.inner_bytes);
    const int64_t most = std::max<int64_t>(kExpertsScratchBytes / token_bytes, 1);
    const int64_t num_passes = ceil_div(args.rows, most);
    const auto has_adapter = [&](const ExpertsPass& p) {
        return args.slots != nullptr && std::any_of(args.slots + p.token_begin, args.slots + p.token_end,
                                                    [](int32_t slot) { return slot >= 0; });
    };
    passes_.clear();
    launches_.clear();
    names_.clear();
    for (int64_t i = 0; i < num_passes; ++i) {
        pass.token_begin = args.rows * i / num_passes;
        pass.token_end = args.rows * (i + 1) / num_passes;
        pass.gather_tasks = pass.token_end - pass.token_begin < kOwnRows ? 1 : threads;
        pass.shrink_tasks = has_adapter(pass) ? wanted : 0;
        pass.copy_bytes = kAdapterRows * std::max(args.up->k, args.down->k) * size_of(args.factor_dtype);
        passes_.push_back(pass);
    }
    for (const ExpertsPass& p : passes_) {
        const int64_t entries = (p.token_end - p.token_begin) * args.top_k;
        const int64_t touched = std::min<int64_t>(entries, args.num_experts);
        scratch.reserve(static_cast<size_t>(entries), static_cast<size_t>(args.num_experts + entries / p.part_rows + 1),
                        static_cast<size_t>(entries * p.input_bytes), static_cast<size_t>(entries * p.inner_bytes));
        const double copy_ns = static_cast<double>(entries * p.input_bytes) * (args.scale_inputs ? 1.0 : 0.1);
        const auto add_shrink = [&](const char* name, Kernel kernel, const Matrix& m) {
            const double cost_ns = static_cast<double>(entries) * static_cast<double>(m.k) * 0.5;
            add(name, {kernel, &p, p.shrink_tasks, cost_ns});
        };
        if (p.shrink_tasks > 0) {
            scratch.reserve_adapters(
                static_cast<size_t>(entries * std::max(args.up_width, args.down_width) * size_of(args.factor_dtype)),
                static_cast<size_t>(p.shrink_tasks * p.copy_bytes));
        }
        add("group_experts", {group_experts, &p, 1, static_cast<double>(entries) * 5});
        add("gather_experts", {table.gather_experts, &p, p.gather_tasks, copy_ns});
        if (p.shrink_tasks > 0 && args.up_factors) {
            add_shrink("experts_shrink_up", table.experts_shrink_up, *args.up);
        }
        add("experts_up", {table.experts_up, &p, p.up_tasks, products_ns(*args.up, entries, touched)});
        if (p.shrink_tasks > 0 && args.down_factors) {
            add_shrink("experts_shrink_down", table.experts_shrink_down, *args.down);
        }
        add("experts_down", {table.experts_down, &p, p.down_tasks, products_ns(*args.down, entries, touched)});
    }
}

void ExpertsPlan::add(const char* name, const Launch& launch) {
    names_.push_back(name);
    launches_.push_back(launch);
}

// Sorts the pass's choices by expert (a counting sort), and cuts each expert's rows into parts.
void group_experts(const void* args, int64_t) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    ExpertsSchedule& s = *p.schedule;
    const int64_t num_choices = (p.token_end - p.token_begin) * a.top_k;
    const int32_t* ids = a.ids + p.token_begin * a.top_k;
    const float* weights = a.weights + p.token_begin * a.top_k;
    int64_t next[kMaxExperts + 1] = {};
    const auto expert = [&](int64_t i) { return static_cast<int64_t>(ids[i]) - a.first_expert; };
    const auto is_expert = [&](int64_t i) { return expert(i) >= 0 && expert(i) < a.num_experts; };
    for (int64_t i = 0; i < num_choices; ++i) {
        if (is_expert(i)) ++next[expert(i) + 1];
    }
    s.num_parts = 0;
    int64_t cost = 0;
    for (int32_t e = 0; e < a.num_experts; ++e) {
        const int64_t rows = next[e + 1];
        const int64_t parts = ceil_div(rows, p.part_rows);
        for (int64_t i = 0; i < parts; ++i) {
            const int64_t begin = rows * i / parts;
            const int64_t count = rows * (i + 1) / parts - begin;
            cost += kRowsOfRead + count;
            s.parts[s.num_parts++] = {e, static_cast<int32_t>(next[e] + begin), static_cast<int32_t>(count),
                                      cost * kCostScale};
        }
        next[e + 1] += next[e];
    }
    s.num_entries = next[a.num_experts];
    for (int64_t i = 0; i < num_choices; ++i) {
        if (!is_expert(i)) continue;
        const int64_t place = next[expert(i)]++;
        s.entries[place] = static_cast<int32_t>(i);
        s.tokens[place] = static_cast<int32_t>(p.token_begin + i / a.top_k);
        s.weights[place] = weights[i];
        if (a.slots) s.slots[place] = a.slots[s.tokens[place]];
    }
}

}  // namespace octavo
