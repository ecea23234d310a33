// Cutting kernel calls into tasks: enough of them to keep every thread busy to the end, few enough that handing them
// out costs nothing. No choice made here can change a result; the kernels see to that.
#include "launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

// Rough single-thread rates, for cost estimates only.
constexpr double kBytesPerNs = 20;
constexpr double kBf16FlopsPerNs = 150;
constexpr double kF32FlopsPerNs = 80;
constexpr double kIntOpsPerNs = 300;
// Tasks a thread should find, so that one slow thread does not hold up the rest.
constexpr int64_t kTasksPerThread = 8;
// Weights that one task of a narrow product streams: some microseconds.
constexpr int64_t kTaskBytes = 128 * 1024;
// Rows whose inputs stay in a second-level cache while a thread's panels go by.
constexpr int64_t kMaxChunkRows = 256;
constexpr int64_t kMinChunkRows = 48;
// Of an integer product: the same two, as bytes of weights and of quantized rows.
constexpr int64_t kIntTaskBytes = 32 * 1024;
constexpr int64_t kChunkBytes = 256 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes that an element of a packed matrix takes.
double weight_bytes(const Matrix& m) {
    if (m.format == kWeightF32) return 4;
    if (m.format == kWeightBF16) return 2;
    return (m.format == kWeightInt4 ? 0.5 : 1.0) + 2.0 / m.group + (m.minima ? 2.0 / 32 : 0.0);
}

int64_t size_of(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

// Rows a task for row-wise kernels: whole rows, at least some microseconds' worth.
int64_t rows_per_task(int64_t rows, double cost_ns, int threads) {
    const double row_ns = std::max(cost_ns / static_cast<double>(std::max<int64_t>(rows, 1)), 0.1);
    const int64_t least = std::max<int64_t>(static_cast<int64_t>(2000 / row_ns), 1);
    return std::max(least, ceil_div(rows, kTasksPerThread * threads));
}

template <class T>
void check_indices(const char* what, const T* indices, int64_t count, int64_t lowest, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] >= lowest && indices[i] < end) continue;
        throw std::out_of_range(std::string(what) + " " + std::to_string(indices[i]) + " at index " +
                                std::to_string(i) + " is not below " + std::to_string(end) + ".");
    }
}

}  // namespace

void check(const EmbeddingArgs& args) { check_indices("token id", args.token_ids, args.tokens, 0, args.matrix.n); }

void check(const TakeRowsArgs& args) { check_indices("row", args.indices, args.rows, 0, args.x_rows); }

void check(const RotaryArgs& args) {
    check_indices("position", args.positions, args.tokens, 0, args.max_positions);
    check_indices("slot", args.slots, args.tokens, INT64_MIN, args.num_slots);
}

Launch plan(PackArgs& args) {
    const int64_t panels = ceil_div(args.n, kPanel);
    return {pack_panel, &args, panels, static_cast<double>(args.n * args.k * size_of(args.dtype)) / 2};
}

Launch plan(LinearArgs& args, const KernelTable& table, int threads) {
    const Matrix& m = args.matrix;
    const bool integers = m.format == kWeightInt4 || m.format == kWeightInt8;
    const int64_t panels = m.gated ? 2 * ceil_div(m.n / 2, kPanel) : ceil_div(m.n, kPanel);
    // Gated panels come in pairs, and as whole blocks where the output is quantized.
    const int64_t units = ceil_div(panels, !m.gated ? 1 : args.out_dtype == kQ8 ? 4 : 2);
    const double products = static_cast<double>(panels * kPanel) * static_cast<double>(m.k);
    const double bytes = products * weight_bytes(m);
    const double flops = 2 * products * static_cast<double>(args.rows);
    const double rate = integers ? kIntOpsPerNs : m.format == kWeightF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
    const double cost_ns = std::max(bytes / kBytesPerNs, flops / rate);
    const int64_t wanted = kTasksPerThread * threads;
    const int64_t chunk_rows =
        integers ? std::clamp<int64_t>(kChunkBytes / (ceil_div(m.k, kQBlock) * static_cast<int64_t>(sizeof(QBlock))),
                                       kMinChunkRows, kMaxChunkRows)
                 : kMaxChunkRows;
    args.row_chunks = ceil_div(args.rows, chunk_rows);
    if (args.row_chunks * units < wanted) {
        args.row_chunks = std::max(args.row_chunks, std::min(ceil_div(wanted, units), args.rows / kMinChunkRows));
    }
    const int64_t task_bytes = integers ? kIntTaskBytes : kTaskBytes;
    args.panel_chunks = integers ? std::min(static_cast<int64_t>(bytes) / task_bytes, wanted)
                                 : static_cast<int64_t>(bytes) / task_bytes;
    args.panel_chunks = std::max<int64_t>(args.panel_chunks, threads);
    if (args.rows > kMinChunkRows || !integers) {
        args.panel_chunks = std::max(args.panel_chunks, ceil_div(wanted, std::max<int64_t>(args.row_chunks, 1)));
    }
    args.panel_chunks = std::min(ceil_div(args.panel_chunks, threads) * threads, units);
    if (threads == 1) args.panel_chunks = std::min<int64_t>(args.panel_chunks, 1);
    return {table.linear, &args, args.row_chunks * args.panel_chunks, cost_ns};
}

Launch plan(EmbeddingArgs& args, const KernelTable& table, int /*threads*/) {
    args.tokens_per_task = 4;
    // Every element lies on a cache line of its own (or every few).
    const double cost_ns = static_cast<double>(args.tokens * args.matrix.k) * 4;
    return {table.embedding, &args, ceil_div(args.tokens, args.tokens_per_task), cost_ns};
}

Launch plan(TakeRowsArgs& args, const KernelTable& table, int threads) {
    const double cost_ns = static_cast<double>(args.rows * args.row_bytes) * 0.1;
    args.rows_per_task = rows_per_task(args.rows, cost_ns, threads);
    return {table.take_rows, &args, ceil_div(args.rows, args.rows_per_task), cost_ns};
}

Launch plan(QuantizeArgs& args, const KernelTable& table, int threads) {
    const double cost_ns = static_cast<double>(args.rows * args.width) * 0.4;
    args.rows_per_task = rows_per_task(args.rows, cost_ns, threads);
    return {table.quantize, &args, ceil_div(args.rows, args.rows_per_task), cost_ns};
}

Launch plan(NormArgs& args, const KernelTable& table, int threads) {
    const int64_t rows = args.outer * args.inner;
    const double cost_ns = static_cast<double>(rows * args.hidden) * (args.out_dtype == kQ8 ? 0.5 : 0.15);
    args.rows_per_task = rows_per_task(rows, cost_ns, threads);
    return {table.norm, &args, ceil_div(rows, args.rows_per_task), cost_ns};
}

Launch plan(RotaryArgs& args, const KernelTable& table, int threads) {
    const int64_t width = (args.query_heads + 4 * args.kv_heads) * static_cast<int64_t>(args.head_size);
    const double cost_ns = static_cast<double>(args.tokens * width) * 0.2;
    args.tokens_per_task = rows_per_task(args.tokens, cost_ns, threads);
    return {table.rotary, &args, ceil_div(args.tokens, args.tokens_per_task), cost_ns};
}

Launch plan(ArgmaxArgs& args, const KernelTable& table, int /*threads*/) {
    return {table.argmax, &args, args.rows, static_cast<double>(args.rows * args.width) * 0.1};
}

Launch plan(SampleArgs& args, const KernelTable& table, int /*threads*/) {
    return {table.sample, &args, args.rows, static_cast<double>(args.rows * args.width) * 2};
}

Launch AttentionPlan::plan(AttentionArgs& args, const KernelTable& table, int threads) {
    costed_.clear();
    tasks_.clear();
    splits_.clear();
    const int64_t ratio = args.query_heads / args.kv_heads;
    const int64_t padded = ceil_div(args.head_size, kValuePad) * kValuePad;
    int64_t partial_floats = 0;
    int64_t total_cost = 0;
    for (int32_t s = 0; s < args.num_seqs; ++s) {
        const int64_t num_queries = args.query_start[s + 1] - args.query_start[s];
        const int64_t seq_len = args.seq_lens[s];
        if (num_queries == 0) continue;
        if (num_queries < 0 || num_queries > seq_len || ceil_div(seq_len, args.block_size) > args.max_blocks) {
            throw std::invalid_argument("paged_attention: sequence " + std::to_string(s) + " has " +
                                        std::to_string(num_queries) + " query rows, " + std::to_string(seq_len) +
                                        " keys and a table of " + std::to_string(args.max_blocks) + " blocks of " +
                                        std::to_string(args.block_size) + ".");
        }
        const int64_t rows = num_queries * ratio;
        const int64_t chunks = ceil_div(rows, kQueryRows);
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t begin = rows * c / chunks;
            const int64_t end = rows * (c + 1) / chunks;
            const int64_t last = seq_len - num_queries + (end - 1) / ratio;
            const int64_t first_row = seq_len - num_queries + begin / ratio;
            const int64_t first = args.window > 0 ? std::max<int64_t>(first_row - args.window + 1, 0) : 0;
            const int64_t part_begin = first / kKeyPartition;
            const int64_t part_end = last / kKeyPartition + 1;
            AttentionTask task{s,
                               static_cast<int32_t>(begin),
                               static_cast<int32_t>(end),
                               static_cast<int32_t>(part_begin),
                               static_cast<int32_t>(part_end),
                               -1};
            const int64_t cost = (end - begin) * (last - first + 64);
            total_cost += cost;
            // A long row that is alone in its sequence (a decode) is shared out; a prefill has tasks enough.
            if (threads == 1 || chunks > 1 || part_end - part_begin == 1) {
                costed_.push_back({cost, task});
                continue;
            }
            task.split = static_cast<int32_t>(splits_.size());
            const int64_t num_parts = part_end - part_begin;
            splits_.push_back(
                {partial_floats, task.part_begin, static_cast<int32_t>(num_parts), static_cast<int32_t>(end - begin)});
            partial_floats += args.kv_heads * num_parts * (end - begin) * (padded + 2);
            for (int64_t p = part_begin; p < part_end; ++p) {
                task.part_begin = static_cast<int32_t>(p);
                task.part_end = static_cast<int32_t>(p + 1);
                costed_.push_back({cost / num_parts, task});
            }
        }
    }
    // Longest first: the short ones fill the gaps at the end.
    std::stable_sort(costed_.begin(), costed_.end(),
                     [](const CostedTask& a, const CostedTask& b) { return a.cost > b.cost; });
    for (const CostedTask& c : costed_) tasks_.push_back(c.task);
    remaining_.resize(splits_.size() * static_cast<size_t>(args.kv_heads));
    for (size_t i = 0; i < remaining_.size(); ++i) {
        remaining_[i] = splits_[i / static_cast<size_t>(args.kv_heads)].num_parts;
    }
    if (partials_.size() < static_cast<size_t>(partial_floats)) partials_.resize(static_cast<size_t>(partial_floats));
    args.tasks = tasks_.data();
    args.splits = splits_.data();
    args.partials = partials_.data();
    args.remaining = remaining_.data();
    args.num_tasks = static_cast<int64_t>(tasks_.size()) * args.kv_heads;
    const double cost_ns = static_cast<double>(total_cost * args.kv_heads * args.head_size) * 0.05;
    return {table.attention, &args, args.num_tasks, cost_ns};
}

}  // namespace octavo
