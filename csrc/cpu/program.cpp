#include "program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "dispatch.h"
#include "thread_pool.h"

namespace octavo {

namespace {

thread_local Program* recording_into = nullptr;
thread_local Extent recording_extent = Extent::kTokens;

const char* name(const LinearArgs&) { return "linear"; }
const char* name(const EmbeddingArgs&) { return "embedding"; }
const char* name(const NormArgs& a) { return a.centered ? "layer_norm" : "norm"; }
const char* name(const RotaryArgs&) { return "rotary_and_cache"; }
const char* name(const AttentionArgs&) { return "paged_attention"; }
const char* name(const TakeRowsArgs&) { return "take_rows"; }
const char* name(const QuantizeArgs&) { return "quantize"; }
const char* name(const ArgmaxArgs&) { return "argmax"; }
const char* name(const ActivationArgs&) { return "activation"; }
const char* name(const AddArgs&) { return "add"; }

int64_t rows_of(const LinearArgs& a) { return a.rows; }
int64_t rows_of(const EmbeddingArgs& a) { return a.tokens; }
int64_t rows_of(const NormArgs& a) { return a.outer; }
int64_t rows_of(const RotaryArgs& a) { return a.tokens; }
int64_t rows_of(const AttentionArgs& a) { return a.tokens; }
int64_t rows_of(const TakeRowsArgs& a) { return a.rows; }
int64_t rows_of(const QuantizeArgs& a) { return a.rows; }
int64_t rows_of(const ArgmaxArgs& a) { return a.rows; }
int64_t rows_of(const ActivationArgs& a) { return a.rows; }
int64_t rows_of(const AddArgs& a) { return a.rows; }

void set_rows(LinearArgs& a, int64_t rows) { a.rows = rows; }
void set_rows(EmbeddingArgs& a, int64_t rows) { a.tokens = rows; }
void set_rows(NormArgs& a, int64_t rows) { a.outer = rows; }
void set_rows(RotaryArgs& a, int64_t rows) { a.tokens = rows; }
void set_rows(AttentionArgs&, int64_t) {}
void set_rows(TakeRowsArgs& a, int64_t rows) { a.rows = rows; }
void set_rows(QuantizeArgs& a, int64_t rows) { a.rows = rows; }
void set_rows(ArgmaxArgs& a, int64_t rows) { a.rows = rows; }
void set_rows(ActivationArgs& a, int64_t rows) { a.rows = rows; }
void set_rows(AddArgs& a, int64_t rows) { a.rows = rows; }

bool are_planned_alike(const AttentionArgs& a, const AttentionArgs& b) {
    return a.query_start == b.query_start && a.seq_lens == b.seq_lens && a.max_blocks == b.max_blocks &&
           a.query_heads == b.query_heads && a.kv_heads == b.kv_heads && a.head_size == b.head_size &&
           a.block_size == b.block_size && a.window == b.window && a.dtype == b.dtype;
}

}  // namespace

Program* Program::recording() { return recording_into; }

void Program::start_recording(Program* program, Extent extent) {
    if (recording_into != nullptr) throw std::logic_error("a program is being recorded already.");
    recording_into = program;
    recording_extent = extent;
}

void Program::stop_recording() { recording_into = nullptr; }

void Program::add(const Args& args) {
    AttentionPlan* attention = nullptr;
    if (const AttentionArgs* a = std::get_if<AttentionArgs>(&args)) {
        for (const Call& call : calls_) {
            const AttentionArgs* other = std::get_if<AttentionArgs>(&call.args);
            if (other != nullptr && are_planned_alike(*a, *other)) attention = call.attention;
        }
        if (attention == nullptr) {
            attention = attention_plans_.emplace_back(std::make_unique<AttentionPlan>()).get();
        }
    }
    const int64_t rows = std::visit([](const auto& a) { return rows_of(a); }, args);
    calls_.push_back({args, recording_extent, rows, attention});
}

void Program::plan(int64_t tokens, int32_t seqs, int64_t samples) {
    const KernelTable& table = kernels();
    const int threads = num_threads();
    std::vector<const RotaryArgs*> checked;
    std::vector<const AttentionPlan*> planned;
    launches_.clear();
    names_.clear();
    for (Call& call : calls_) {
        const int64_t rows = call.extent == Extent::kTokens ? tokens : samples;
        if (rows == 0) continue;
        if (rows > call.recorded_rows) {
            throw std::invalid_argument("a step of " + std::to_string(rows) +
                                        " rows was asked of a program that was "
                                        "recorded with " +
                                        std::to_string(call.recorded_rows) + ".");
        }
        std::visit(
            [&](auto& args) {
                using A = std::decay_t<decltype(args)>;
                set_rows(args, rows);
                names_.push_back(name(args));
                // The calls of most layers read the same positions and slots.
                if constexpr (std::is_same_v<A, EmbeddingArgs> || std::is_same_v<A, TakeRowsArgs>) {
                    check(args);
                } else if constexpr (std::is_same_v<A, RotaryArgs>) {
                    const bool seen = std::any_of(checked.begin(), checked.end(), [&](const RotaryArgs* other) {
                        return args.slots == other->slots && args.num_slots == other->num_slots &&
                               args.positions == other->positions && args.max_positions == other->max_positions;
                    });
                    if (!seen) {
                        check(args);
                        checked.push_back(&args);
                    }
                }
                if constexpr (std::is_same_v<A, AttentionArgs>) {
                    args.num_seqs = seqs;
                    if (std::find(planned.begin(), planned.end(), call.attention) == planned.end()) {
                        call.attention->plan(args, threads);
                        planned.push_back(call.attention);
                    }
                    launches_.push_back(call.attention->launch(args, table));
                } else {
                    launches_.push_back(octavo::plan(args, table, threads));
                }
            },
            call.args);
    }
}

void Program::run(int64_t tokens, int32_t seqs, int64_t samples) {
    plan(tokens, seqs, samples);
    octavo::run(launches_.data(), launches_.size());
}

std::vector<std::pair<std::string, double>> Program::profile(int64_t tokens, int32_t seqs, int64_t samples) {
    plan(tokens, seqs, samples);
    std::vector<std::pair<std::string, double>> times;
    for (size_t i = 0; i < launches_.size(); ++i) {
        const auto begin = std::chrono::steady_clock::now();
        octavo::run(launches_[i]);
        const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
        times.emplace_back(names_[i], taken.count());
    }
    return times;
}

}  // namespace octavo
