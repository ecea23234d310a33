// Cutting kernel calls into tasks: enough of them to keep every thread busy to the end, few enough that handing them
// out costs nothing. No choice made here can change a result; the kernels see to that.
#include "launch.h"

#include <algorithm>
#include <numeric>
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
// Rows a thread from which on rows are shared out before panels are.
constexpr int64_t kOwnRows = 32;
// Of an integer product: the same two, as bytes of weights and of quantized rows.
constexpr int64_t kIntTaskBytes = 32 * 1024;
constexpr int64_t kChunkBytes = 256 * 1024;
// The least that is worth a task of its own where a row's keys are shared out.
constexpr double kLeastAttentionNs = 1000;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes that an element of a packed matrix takes.
double weight_bytes(const Matrix& m) {
    if (m.format == kWeightF32) return 4;
    if (m.format == kWeightBF16) return 2;
    return (m.format == kWeightInt4 ? 0.5 : 1.0) + 2.0 / m.group + (m.minima ? 2.0 / 32 : 0.0);
}

int64_t size_of(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

// A row-wise kernel: whole rows a task, at least some microseconds' worth, where a row costs `row_ns`.
template <class Args>
Launch by_rows(Kernel kernel, Args& args, int64_t rows, double row_ns, int threads) {
    const int64_t least = std::max<int64_t>(static_cast<int64_t>(2000 / std::max(row_ns, 0.1)), 1);
    args.rows_per_task = std::max(least, ceil_div(rows, kTasksPerThread * threads));
    return {kernel, &args, ceil_div(rows, args.rows_per_task), static_cast<double>(rows) * row_ns};
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

void check(const EmbeddingArgs& args) { check_indices("token id", args.token_ids, args.rows, 0, args.matrix.n); }

void check(const TakeRowsArgs& args) { check_indices("row", args.indices, args.rows, 0, args.x_rows); }

void check(const RotaryArgs& args) {
    check_indices("position", args.positions, args.rows, 0, args.max_positions);
    if (args.slots) check_indices("slot", args.slots, args.rows, INT64_MIN, args.num_slots);
}

void check(const MaskArgs& args) { check_indices("sample", args.samples, args.masks, 0, args.rows); }

void check(const LogSumArgs& args) { check_indices("sample", args.samples, args.num_samples, 0, args.rows); }

void check(const RankArgs& args) {
    check_indices("sample", args.samples, args.num_samples, 0, args.rows);
    if (args.tokens != nullptr) check_indices("token id", args.tokens, args.num_samples, 0, args.width);
}

Launch plan(PackArgs& args, const KernelTable&, int) {
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
    // Where each thread has rows enough of its own, it keeps to them from one product to the next: what it has written
    // is in its cache, and may be far from another's.
    if (args.rows >= kOwnRows * threads) args.row_chunks = ceil_div(args.row_chunks, threads) * threads;
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

Launch plan(EmbeddingArgs& args, const KernelTable& table, int) {
    args.rows_per_task = 4;
    // Every element lies on a cache line of its own (or every few).
    const double cost_ns = static_cast<double>(args.rows * args.matrix.k) * 4;
    return {table.embedding, &args, ceil_div(args.rows, args.rows_per_task), cost_ns};
}

Launch plan(TakeRowsArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.take_rows, args, args.rows, static_cast<double>(args.row_bytes) * 0.1, threads);
}

Launch plan(NormArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.hidden) * (args.out_dtype == kQ8 ? 0.5 : 0.15);
    return by_rows(table.norm, args, args.rows * args.inner, row_ns, threads);
}

Launch plan(ActivationArgs& args, const KernelTable& table, int threads) {
    const double element_ns = args.out_dtype == kQ8 && args.kind != kIdentity ? 0.8 : 0.4;
    return by_rows(table.activation, args, args.rows, static_cast<double>(args.width) * element_ns, threads);
}

Launch plan(AddArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.add, args, args.rows, static_cast<double>(args.width) * 0.15, threads);
}

Launch plan(RotaryArgs& args, const KernelTable& table, int threads) {
    const int64_t width = (args.query_heads + 4 * args.kv_heads) * static_cast<int64_t>(args.head_size);
    return by_rows(table.rotary, args, args.rows, static_cast<double>(width) * 0.2, threads);
}

Launch plan(ArgmaxArgs& args, const KernelTable& table, int) {
    return {table.argmax, &args, args.rows, static_cast<double>(args.rows * args.width) * 0.1};
}

Launch plan(SampleArgs& args, const KernelTable& table, int) {
    return {table.sample, &args, args.rows, static_cast<double>(args.rows * args.width) * 2};
}

Launch plan(MaskArgs& args, const KernelTable& table, int) {
    return {table.mask, &args, args.masks, static_cast<double>(args.masks * args.width) * 0.1};
}

Launch plan(LogSumArgs& args, const KernelTable& table, int) {
    return {table.log_sum, &args, args.num_samples, static_cast<double>(args.num_samples * args.width) * 0.5};
}

Launch plan(RankArgs& args, const KernelTable& table, int) {
    return {table.rank, &args, args.num_samples, static_cast<double>(args.num_samples * args.width) * 0.2};
}

Launch plan(AttentionArgs& args, const KernelTable& table, int threads) {
    static thread_local AttentionPlan plan;
    plan.plan(args, threads);
    return plan.launch(args, table);
}

void AttentionPlan::plan(const AttentionArgs& args, int threads) {
    costed_.clear();
    tasks_.clear();
    splits_.clear();
    cost_ns_ = 0;
    const int64_t ratio = args.query_heads / args.kv_heads;
    const double bytes_per_key = static_cast<double>(2 * args.head_size * size_of(args.dtype));
    const double flops_per_row = static_cast<double>(4 * args.head_size);
    const double flops_per_ns = args.dtype == kF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
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
        AttentionTask task{};
        task.seq = s;
        task.first_token = args.query_start[s];
        task.first_position = static_cast<int32_t>(seq_len - num_queries);
        const int64_t rows = num_queries * ratio;
        const int64_t chunks = ceil_div(rows, kQueryRows);
        for (int64_t c = 0; c < chunks; ++c) {
            task.row_begin = static_cast<int32_t>(rows * c / chunks);
            task.row_end = static_cast<int32_t>(rows * (c + 1) / chunks);
            const int64_t last = task.first_position + (task.row_end - 1) / ratio;
            const int64_t first_row = task.first_position + task.row_begin / ratio;
            const int64_t first = args.window > 0 ? std::max<int64_t>(first_row - args.window + 1, 0) : 0;
            task.part_begin = partition_of(static_cast<int>(first));
            task.part_end = partition_of(static_cast<int>(last)) + 1;
            const double row_ns = (task.row_end - task.row_begin) * flops_per_row / flops_per_ns;
            const double cost_ns =
                static_cast<double>(last - first + 1) * std::max(bytes_per_key / kBytesPerNs, row_ns);
            cost_ns_ += cost_ns * args.kv_heads;
            task.split = -1;
            costed_.push_back({cost_ns, first, last + 1, task});
        }
    }
    if (threads > 1) share_out(args, threads);
    // Longest first: the short ones fill the gaps at the end.
    std::sort(costed_.begin(), costed_.end(), [](const CostedTask& a, const CostedTask& b) {
        if (a.cost_ns != b.cost_ns) return a.cost_ns > b.cost_ns;
        if (a.task.seq != b.task.seq) return a.task.seq < b.task.seq;
        if (a.task.row_begin != b.task.row_begin) return a.task.row_begin < b.task.row_begin;
        return a.task.part_begin < b.task.part_begin;
    });
    for (const CostedTask& c : costed_) tasks_.push_back(c.task);
    remaining_.resize(splits_.size() * static_cast<size_t>(args.kv_heads));
    for (size_t i = 0; i < remaining_.size(); ++i) {
        remaining_[i] = splits_[i / static_cast<size_t>(args.kv_heads)].num_tasks;
    }
    schedule_.tasks = tasks_.data();
    schedule_.splits = splits_.data();
    schedule_.partials = partials_.data();
    schedule_.remaining = remaining_.data();
    schedule_.num_tasks = static_cast<int64_t>(tasks_.size()) * args.kv_heads;
}

// Cuts tasks that would keep a thread busy while others have run out of work: the long rows of few sequences.
void AttentionPlan::share_out(const AttentionArgs& args, int threads) {
    const int64_t padded = ceil_div(args.head_size, kValuePad) * kValuePad;
    const double wanted_ns = std::max(cost_ns_ / (kTasksPerThread * threads), kLeastAttentionNs);
    // Equal pieces come out even if the threads divide their number.
    const int64_t unit = threads / std::gcd<int64_t>(threads, args.kv_heads);
    const size_t num_whole = costed_.size();
    int64_t partial_floats = 0;
    for (size_t i = 0; i < num_whole; ++i) {
        const CostedTask whole = costed_[i];
        const int64_t num_parts = whole.task.part_end - whole.task.part_begin;
        int64_t pieces = static_cast<int64_t>(whole.cost_ns / wanted_ns);
        if (pieces < 2 && num_whole > 1) continue;
        pieces = std::min(ceil_div(std::max<int64_t>(pieces, 1), unit) * unit, num_parts);
        if (pieces < 2) continue;
        CostedTask piece = whole;
        piece.task.split = static_cast<int32_t>(splits_.size());
        AttentionSplit split{partial_floats, whole.task.part_begin, static_cast<int32_t>(num_parts),
                             whole.task.row_end - whole.task.row_begin, 0};
        partial_floats += args.kv_heads * num_parts * split.num_rows * (padded + 2);
        const int64_t keys = whole.end - whole.first;
        const auto keys_until = [&](int part) {
            return std::clamp<int64_t>(partition_begin(part) - whole.first, 0, keys);
        };
        for (int part = whole.task.part_begin; part < whole.task.part_end; ++split.num_tasks) {
            const int64_t share_end = keys * (split.num_tasks + 1) / pieces;
            piece.task.part_begin = part++;
            // A partition goes to the piece that holds its middle.
            while (part < whole.task.part_end && (keys_until(part) + keys_until(part + 1)) / 2 < share_end) ++part;
            piece.task.part_end = part;
            const int64_t piece_keys = keys_until(part) - keys_until(piece.task.part_begin);
            piece.cost_ns = whole.cost_ns * static_cast<double>(piece_keys) / static_cast<double>(keys);
            if (split.num_tasks == 0) {
                costed_[i] = piece;
            } else {
                costed_.push_back(piece);
            }
        }
        splits_.push_back(split);
    }
    if (partials_.size() < static_cast<size_t>(partial_floats)) partials_.resize(static_cast<size_t>(partial_floats));
}

Launch AttentionPlan::launch(AttentionArgs& args, const KernelTable& table) const {
    args.schedule = &schedule_;
    return {table.attention, &args, schedule_.num_tasks, cost_ns_};
}

}  // namespace octavo
