// Cuts kernel calls into tasks: enough to keep every thread busy to the end, few enough that handing them out costs
// nothing. Also checks indices before kernels use them. Experts are in launch_experts.cpp, rates and sizes in
// launch_costs.h. No choice made here can change a result; the kernels see to that.
#include "launch.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch_costs.h"
#include "pack_int.h"
#include "summation_tree.h"
#include "thread_pool.h"

namespace octavo {

namespace {

// The least time of a task if a row's keys are divided among tasks.
constexpr double kLeastAttentionNs = 1000;

// Plans a kernel whose rows are independent, `row_ns` each: a task is whole rows, at least some microseconds' worth.
template <class Args>
Launch by_rows(Kernel kernel, Args& args, int64_t rows, double row_ns, int threads) {
    const int64_t least = std::max<int64_t>(static_cast<int64_t>(2000 / std::max(row_ns, 0.1)), 1);
    args.rows_per_task = std::max(least, ceil_div(rows, kTasksPerThread * threads));
    return {kernel, &args, ceil_div(rows, args.rows_per_task), static_cast<double>(rows) * row_ns};
}

// Plans a kernel over states. A sequence has `units` units that do not depend on each other; a token costs `row_ns`
// over all of them. A task is some units of one sequence.
Launch by_states(Kernel kernel, StateArgs& args, const void* self, int64_t units, double row_ns, int threads) {
    const int64_t num_seqs = std::max<int64_t>(args.num_seqs, 1);
    const int64_t wanted = kTasksPerThread * threads;
    const double seq_ns = row_ns * static_cast<double>(args.rows) / static_cast<double>(num_seqs);
    args.parts = std::max(ceil_div(wanted, num_seqs), static_cast<int64_t>(seq_ns / 2000));
    args.parts = std::clamp<int64_t>(args.parts, 1, std::min(units, wanted));
    return {kernel, self, args.num_seqs * args.parts, row_ns * static_cast<double>(args.rows)};
}

// Throws std::out_of_range unless all indices are in [lowest, end).
template <class T>
void check_indices(const char* what, const T* indices, int64_t count, int64_t lowest, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] >= lowest && indices[i] < end) continue;
        throw std::out_of_range(std::string(what) + " " + std::to_string(indices[i]) + " at index " +
                                std::to_string(i) + " is not below " + std::to_string(end) + ".");
    }
}

// Returns the last key that the token of sequence `seq` at `position` sees. If keys are chosen, they are counted as if
// there were no others.
int64_t last_key(const AttentionArgs& args, int32_t seq, int64_t position) {
    if (args.chosen) return std::min<int64_t>(position, args.num_chosen - 1);
    if (args.key_ends) {
        const int64_t token = position - args.seq_lens[seq] + args.query_start[seq + 1];
        return std::max<int64_t>(position, args.key_ends[token] - 1);
    }
    if (!args.bidirectional) return position;
    const int64_t last = args.seq_lens[seq] - 1;
    return args.window > 0 ? std::min<int64_t>(position + args.window - 1, last) : last;
}

// Throws unless a step's tokens are a part of their sequences and their blocks exist.
void check_states(const StateArgs& args) {
    for (int32_t s = 0; s < args.num_seqs; ++s) {
        const int64_t num_tokens = args.query_start[s + 1] - args.query_start[s];
        if (num_tokens == 0) continue;
        if (num_tokens < 0 || num_tokens > args.seq_lens[s] || args.query_start[s + 1] > args.rows) {
            throw std::invalid_argument("sequence " + std::to_string(s) + " of " + std::to_string(args.seq_lens[s]) +
                                        " tokens cannot compute " + std::to_string(num_tokens) + " of a step's " +
                                        std::to_string(args.rows) + ".");
        }
        for (int32_t t = args.query_start[s]; t < args.query_start[s + 1]; ++t) {
            if (args.slots[t] >= 0 && args.slots[t] < args.num_blocks) continue;
            throw std::out_of_range("block " + std::to_string(args.slots[t]) + " of sequence " + std::to_string(s) +
                                    " is not below " + std::to_string(args.num_blocks) + ".");
        }
    }
}

}  // namespace

void check(const ConvArgs& args) { check_states(args); }
void check(const ScanArgs& args) { check_states(args); }
void check(const DeltaArgs& args) { check_states(args); }
void check(const RecurrenceArgs& args) { check_states(args); }

void check(const LinearArgs& args) {
    if (args.slots != nullptr) check_indices("adapter slot", args.slots, args.rows, -1, args.num_slots);
}

void check(const ShrinkArgs& args) { check_indices("adapter slot", args.slots, args.rows, -1, args.num_slots); }

void check(const EmbeddingArgs& args) {
    check_indices("token id", args.token_ids, args.rows, 0, args.matrix.n);
    if (args.slots != nullptr) check_indices("adapter slot", args.slots, args.rows, -1, args.num_slots);
}

void check(const ExpertsArgs& args) {
    if (args.segments < 1 || args.segments > kMaxSegments || args.num_experts % args.segments != 0) {
        throw std::invalid_argument(std::to_string(args.num_experts) + " experts do not make " +
                                    std::to_string(args.segments) + " segments.");
    }
    if (args.slots != nullptr) check_indices("adapter slot", args.slots, args.rows, -1, args.num_slots);
}

void check(const TakeRowsArgs& args) { check_indices("row", args.indices, args.rows, 0, args.x_rows); }

void check(const ReplaceRowsArgs& args) {
    check_indices("replacement", args.indices, args.rows, -1, args.num_replacements);
}

void check(const RotaryArgs& args) {
    for (int axis = 0; axis < (args.axes ? kPositionAxes : 1); ++axis) {
        check_indices("position", args.positions + axis * args.positions_stride, args.rows, 0, args.max_positions);
    }
    if (args.slots) check_indices("slot", args.slots, args.rows, INT64_MIN, args.num_slots);
}

void check(const PoolArgs& args) {
    check_indices("first row", args.starts, args.rows, 0, args.x_rows);
    check_indices("last row", args.ends, args.rows, 0, args.x_rows);
    for (int64_t r = 0; r < args.rows; ++r) {
        if (args.ends[r] < args.starts[r]) {
            throw std::invalid_argument("pool: rows " + std::to_string(args.starts[r]) + " to " +
                                        std::to_string(args.ends[r]) + " are none.");
        }
    }
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
    if (m.format < 0) throw std::invalid_argument("linear: a table whose rows are looked up is in no product.");
    const bool integers = is_integer(m.format);
    const int64_t panels = m.gated ? 2 * ceil_div(m.n / 2, kPanel) : ceil_div(m.n, kPanel);
    // A unit is what one task must have together: a pair of gate and up panels, and a whole block where the output is
    // quantized.
    const int64_t units = ceil_div(panels, (m.gated ? 2 : 1) * (is_quantized(args.out_dtype) ? 2 : 1));
    const double products = static_cast<double>(panels * kPanel) * static_cast<double>(m.k);
    const double bytes = products * weight_bytes(m);
    const int64_t rows_of_one = args.x_is_paired ? 2 : 1;
    const double flops = 2 * products * static_cast<double>(args.rows * rows_of_one);
    const double rate = integers ? kIntOpsPerNs : m.format == kWeightF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
    const double cost_ns = std::max(bytes / kBytesPerNs, flops / rate);
    const int64_t wanted = kTasksPerThread * threads;
    const auto [chunk_bytes, least_rows] =
        table.has_tiles ? std::pair(kTileChunkBytes, kMinTileChunkRows) : std::pair(kChunkBytes, kMinChunkRows);
    const int64_t row_bytes = rows_of_one * ceil_div(m.k, kQBlock) * static_cast<int64_t>(sizeof(QBlock));
    const int64_t chunk_rows =
        integers ? std::clamp(chunk_bytes / row_bytes, least_rows, kMaxChunkRows) : kMaxChunkRows;
    args.row_chunks = ceil_div(args.rows, chunk_rows);
    if (args.row_chunks * units < wanted) {
        args.row_chunks = std::max(args.row_chunks, std::min(ceil_div(wanted, units), args.rows / kMinChunkRows));
    }
    // With enough rows, each thread keeps the same rows from one product to the next, because their inputs are in its
    // own cache.
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
    args.has_lora = args.slots != nullptr && std::any_of(args.slots, args.slots + args.rows, [&](int32_t slot) {
                        return slot >= 0 && args.factors[slot].panels != nullptr;
                    });
    args.next = nullptr;
    return {table.linear, &args, args.row_chunks * args.panel_chunks, cost_ns};
}

Launch plan(HeadLinearArgs& args, const KernelTable& table, int threads) {
    LinearArgs& product = args.product;
    product = {};
    product.rows = args.rows;
    product.x = args.x;
    product.x_stride = args.x_stride;
    product.matrix = args.matrices[0];
    product.out = args.out;
    product.out_stride = args.out_stride;
    product.out_dtype = args.out_dtype;
    product.epilogue = kStore;
    product.scale = 1;
    // Heads share the threads, so a head's product is cut only if there are fewer heads than threads.
    const Launch head = plan(product, table, static_cast<int>(ceil_div(threads, args.heads)));
    args.kernel = head.kernel;
    args.tasks_per_head = head.num_tasks;
    return {linear_by_head, &args, head.num_tasks * args.heads, head.cost_ns * args.heads};
}

void linear_by_head(const void* args, int64_t task) {
    const HeadLinearArgs& a = *static_cast<const HeadLinearArgs*>(args);
    const int64_t head = task / a.tasks_per_head;
    LinearArgs product = a.product;
    product.matrix = a.matrices[head];
    product.x = static_cast<const char*>(a.x) + head * a.x_head_stride * a.x_bytes;
    product.out = static_cast<char*>(a.out) + head * a.out_head_stride * size_of(a.out_dtype);
    a.kernel(&product, task % a.tasks_per_head);
}

Launch plan(EmbeddingArgs& args, const KernelTable& table, int) {
    args.rows_per_task = 4;
    // A row of a packed matrix is one lane of a panel: every element (or every few) lies on a cache line of its own.
    const double cost_ns = static_cast<double>(args.rows * args.matrix.k) * 4;
    return {table.embedding, &args, ceil_div(args.rows, args.rows_per_task), cost_ns};
}

Launch plan(TakeRowsArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.take_rows, args, args.rows, static_cast<double>(args.row_bytes) * 0.1, threads);
}

Launch plan(ReplaceRowsArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.replace_rows, args, args.rows, static_cast<double>(args.width) * 0.4, threads);
}

Launch plan(PoolArgs& args, const KernelTable& table, int threads) {
    int64_t rows = 0;
    for (int64_t r = 0; r < args.rows; ++r) rows += args.ends[r] - args.starts[r] + 1;
    const double row_ns = static_cast<double>(rows * args.width) * 0.15 / static_cast<double>(args.rows);
    return by_rows(table.pool, args, args.rows, row_ns, threads);
}

Launch plan(NormArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.hidden) * (is_quantized(args.out_dtype) ? 0.5 : 0.15);
    return by_rows(table.norm, args, args.rows * args.inner, row_ns, threads);
}

Launch plan(ActivationArgs& args, const KernelTable& table, int threads) {
    const double element_ns = is_quantized(args.out_dtype) && args.kind != kIdentity ? 0.8 : 0.4;
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
    const double bytes_per_key = static_cast<double>((args.head_size + args.value_size) * size_of(args.cache_dtype));
    const double flops_per_row = static_cast<double>(2 * (args.head_size + args.value_size));
    const double flops_per_ns = args.dtype == kF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
    for (int32_t s = 0; s < args.num_seqs; ++s) {
        const int64_t num_queries = args.query_start[s + 1] - args.query_start[s];
        const int64_t seq_len = args.seq_lens[s];
        if (num_queries == 0) continue;
        // Without positions, as in cross attention, there may be fewer keys than queries.
        const bool has_places = !args.bidirectional || args.window > 0 || args.biases;
        if (num_queries < 0 || seq_len < 1 || (has_places && num_queries > seq_len) ||
            ceil_div(seq_len, args.block_size) > args.max_blocks) {
            throw std::invalid_argument("paged_attention: sequence " + std::to_string(s) + " has " +
                                        std::to_string(num_queries) + " query rows, " + std::to_string(seq_len) +
                                        " keys and a table of " + std::to_string(args.max_blocks) + " blocks of " +
                                        std::to_string(args.block_size) + ".");
        }
        if (args.biases && seq_len > args.bias_reach) {
            throw std::invalid_argument("paged_attention: sequence " + std::to_string(s) + " has " +
                                        std::to_string(seq_len) + " keys and the biases reach " +
                                        std::to_string(args.bias_reach) + ".");
        }
        if (args.key_ends) {
            check_indices("last key", args.key_ends + args.query_start[s], num_queries, 0, seq_len + 1);
        }
        AttentionTask task{};
        task.seq = s;
        task.first_token = args.query_start[s];
        task.first_position = static_cast<int32_t>(seq_len - num_queries);
        // Tokens that see chosen keys share no keys: each is a run of its own.
        const int64_t runs = args.chosen ? num_queries : 1;
        const int64_t rows = num_queries / runs * ratio;
        const int64_t chunks = ceil_div(rows, kQueryRows);
        for (int64_t c = 0; c < runs * chunks; ++c) {
            const int64_t first_of_run = c / chunks * rows;
            task.row_begin = static_cast<int32_t>(first_of_run + rows * (c % chunks) / chunks);
            task.row_end = static_cast<int32_t>(first_of_run + rows * (c % chunks + 1) / chunks);
            const int64_t last = last_key(args, s, task.first_position + (task.row_end - 1) / ratio);
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
    // Longest first: short tasks fill the gaps at the end.
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

// Cuts the tasks that would keep a thread busy after others have run out of work: rows with long contexts in a step of
// few sequences.
void AttentionPlan::share_out(const AttentionArgs& args, int threads) {
    const int64_t padded = ceil_div(args.value_size, kValuePad) * kValuePad;
    const double wanted_ns = std::max(cost_ns_ / (kTasksPerThread * threads), kLeastAttentionNs);
    // Equal pieces finish together if their number, times the heads, is a multiple of the number of threads.
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
            // A partition belongs to the piece that has its middle key.
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

Launch plan(MultiplyArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.multiply, args, args.rows, static_cast<double>(args.width) * 0.5, threads);
}

Launch plan(ConvArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.width * args.kernel) * 0.1;
    return by_states(table.conv, args, &args, ceil_div(args.width, kStateTile), row_ns, threads);
}

Launch plan(ScanArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.channels * args.state_size) * (args.wide ? 0.4 : 0.1);
    const int64_t tiles = args.groups * ceil_div(args.channels / args.groups, kStateTile);
    return by_states(table.scan, args, &args, tiles, row_ns, threads);
}

Launch plan(DeltaArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.value_heads * args.value_size * args.key_size) * 0.15;
    const int64_t tiles = args.value_heads * ceil_div(args.value_size, kStateTile);
    return by_states(table.delta, args, &args, tiles, row_ns, threads);
}

Launch plan(RecurrenceArgs& args, const KernelTable& table, int threads) {
    const double row_ns = static_cast<double>(args.width) * 2.0;
    return by_states(table.recurrence, args, &args, ceil_div(args.width, kStateTile), row_ns, threads);
}

Launch plan(RouteArgs& args, const KernelTable& table, int threads) {
    return by_rows(table.route, args, args.rows, static_cast<double>(args.num_experts * (args.top_k + 4)), threads);
}

Launch plan(ChooseArgs& args, const KernelTable& table, int) {
    double keys = 0;
    int64_t longest = 0;
    for (int32_t s = 0; s < args.num_seqs; ++s) {
        const int64_t num_queries = args.query_start[s + 1] - args.query_start[s];
        if (num_queries == 0) continue;
        if (num_queries < 0 || num_queries > args.seq_lens[s] || args.query_start[s + 1] > args.rows ||
            ceil_div(args.seq_lens[s], args.block_size) > args.max_blocks) {
            throw std::invalid_argument("choose_keys: sequence " + std::to_string(s) + " has " +
                                        std::to_string(num_queries) + " query rows and " +
                                        std::to_string(args.seq_lens[s]) + " keys.");
        }
        keys += static_cast<double>(num_queries) * args.seq_lens[s];
        longest = std::max<int64_t>(longest, args.seq_lens[s]);
    }
    // With few rows each row's keys are divided among tasks, in parts of at least a partition.
    const int64_t most = std::max<int64_t>(args.scratch_rows / std::max<int64_t>(args.rows, 1), 1);
    args.parts = std::clamp<int64_t>(ceil_div(longest, kKeyPartition), 1, most);
    if (args.merges) {
        const double cost_ns = static_cast<double>(args.rows * args.parts * args.num_chosen) * 10;
        return {table.merge_chosen, &args, args.parts == 1 ? 0 : args.rows, cost_ns};
    }
    const double flops_per_ns = args.dtype == kF32 ? kF32FlopsPerNs : kBf16FlopsPerNs;
    return {table.choose, &args, args.rows * args.parts, 2.0 * keys * args.heads * args.size / flops_per_ns};
}

int64_t choose_scratch_rows() { return kTasksPerThread * num_threads(); }

int64_t shrink_scratch_rows(int64_t rows) { return rows + kAdapterRows * num_threads(); }

void AdapterPlan::plan(const ShrinkArgs& args, int threads) {
    rows_.clear();
    parts_.clear();
    for (int64_t r = 0; r < args.rows; ++r) {
        if (args.slots[r] >= 0) rows_.push_back(static_cast<int32_t>(r));
    }
    std::stable_sort(rows_.begin(), rows_.end(), [&](int32_t a, int32_t b) { return args.slots[a] < args.slots[b]; });
    for (size_t begin = 0, end; begin < rows_.size(); begin = end) {
        const int32_t slot = args.slots[rows_[begin]];
        for (end = begin; end < rows_.size() && args.slots[rows_[end]] == slot;) ++end;
        const int64_t count = static_cast<int64_t>(end - begin), tasks = ceil_div(count, kAdapterRows);
        for (int64_t i = 0; i < tasks; ++i) {
            const int64_t from = count * i / tasks, to = count * (i + 1) / tasks;
            parts_.push_back(
                {slot, static_cast<int32_t>(static_cast<int64_t>(begin) + from), static_cast<int32_t>(to - from)});
        }
    }
    const int64_t num_parts = static_cast<int64_t>(parts_.size());
    // With few parts each part's outputs are divided among tasks, and each task copies the inputs for itself.
    const int64_t splits = num_parts == 0 ? 1 : std::max<int64_t>(threads / num_parts, 1);
    schedule_ = {rows_.data(), parts_.data(), num_parts, splits};
}

Launch AdapterPlan::launch(ShrinkArgs& args, const KernelTable& table) const {
    args.schedule = &schedule_;
    const double row_ns = static_cast<double>(args.k) * 0.5;
    return {table.shrink, &args, schedule_.num_parts * schedule_.splits, static_cast<double>(rows_.size()) * row_ns};
}

Launch plan(ShrinkArgs& args, const KernelTable& table, int threads) {
    static thread_local AdapterPlan plan;
    plan.plan(args, threads);
    return plan.launch(args, table);
}

Launch AttentionPlan::launch(AttentionArgs& args, const KernelTable& table) const {
    args.schedule = &schedule_;
    const Kernel latent = args.chosen ? table.chosen_attention : table.latent_attention;
    return {args.rotated_query ? latent : table.attention, &args, schedule_.num_tasks, cost_ns_};
}

}  // namespace octavo
