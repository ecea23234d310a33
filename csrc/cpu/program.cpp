#include "program.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "all_reduce.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace octavo {

namespace {

thread_local Program* recording_into = nullptr;
thread_local bool recording_per_sample = false;

// Names of operations, in the order of the types in Program::Args.
constexpr const char* kNames[] = {"linear",
                                  "embedding",
                                  "take_rows",
                                  "norm",
                                  "rotary_and_cache",
                                  "paged_attention",
                                  "argmax",
                                  "activation",
                                  "add",
                                  "route",
                                  "experts",
                                  "multiply",
                                  "causal_conv",
                                  "selective_scan",
                                  "gated_delta",
                                  "shrink",
                                  "pool",
                                  "linear_by_head",
                                  "exchange",
                                  "replace_rows",
                                  "gated_recurrence",
                                  "choose_keys"};
static_assert(std::size(kNames) == std::variant_size_v<Program::Args>);

const char* name_of(const Program::Args& args) {
    if (const auto* norm = std::get_if<NormArgs>(&args); norm && norm->centered) return "layer_norm";
    if (const auto* f = std::get_if<ActivationArgs>(&args); f && f->kind == kIdentity) return "quantize";
    if (const auto* a = std::get_if<AttentionArgs>(&args); a && a->rotated_query) return "latent_attention";
    return kNames[args.index()];
}

// Returns whether one plan of a step's attention tasks serves both calls.
bool are_planned_alike(const AttentionArgs& a, const AttentionArgs& b) {
    return a.query_start == b.query_start && a.seq_lens == b.seq_lens && a.max_blocks == b.max_blocks &&
           a.query_heads == b.query_heads && a.kv_heads == b.kv_heads && a.head_size == b.head_size &&
           a.value_size == b.value_size && a.block_size == b.block_size && a.window == b.window &&
           a.bidirectional == b.bidirectional && a.dtype == b.dtype && a.cache_dtype == b.cache_dtype &&
           a.bias_reach == b.bias_reach && a.key_ends == b.key_ends && !a.chosen == !b.chosen &&
           a.num_chosen == b.num_chosen;
}

}  // namespace

Program* Program::recording() { return recording_into; }

void Program::record(bool per_sample) {
    if (recording_into != nullptr) throw std::logic_error("a program is being recorded already.");
    recording_into = this;
    recording_per_sample = per_sample;
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
    AdapterPlan* adapters = nullptr;
    if (const ShrinkArgs* a = std::get_if<ShrinkArgs>(&args)) {
        for (const Call& call : calls_) {
            const ShrinkArgs* other = std::get_if<ShrinkArgs>(&call.args);
            if (other != nullptr && other->slots == a->slots) adapters = call.adapters;
        }
        if (adapters == nullptr) adapters = adapter_plans_.emplace_back(std::make_unique<AdapterPlan>()).get();
    }
    const int64_t rows = std::visit([](const RowArgs& a) { return a.rows; }, args);
    const bool has_experts = std::holds_alternative<ExpertsArgs>(args);
    calls_.push_back({args, recording_per_sample, rows, attention,
                      has_experts ? std::make_unique<ExpertsPlan>() : nullptr, adapters});
}

void Program::plan(int64_t tokens, int32_t seqs, int64_t samples) {
    const KernelTable& table = kernels();
    const int threads = num_threads();
    std::vector<const RotaryArgs*> checked;
    std::vector<const AttentionPlan*> planned;
    std::vector<const AdapterPlan*> ordered;
    LinearArgs* last_product = nullptr;  // the last product since a call for adapters
    launches_.clear();
    names_.clear();
    for (Call& call : calls_) {
        const int64_t rows = call.per_sample ? samples : tokens;
        if (rows == 0) continue;
        if (rows > call.recorded_rows) {
            throw std::invalid_argument("a step of " + std::to_string(rows) +
                                        " rows was asked of a program that was recorded with " +
                                        std::to_string(call.recorded_rows) + ".");
        }
        const bool exchanges = std::holds_alternative<ExchangeArgs>(call.args);
        const bool names_itself = call.experts == nullptr && call.adapters == nullptr && !exchanges;
        if (names_itself) names_.push_back(name_of(call.args));
        std::visit(
            [&](auto& args) {
                using A = std::decay_t<decltype(args)>;
                args.rows = rows;
                if constexpr (std::is_base_of_v<StateArgs, A> || std::is_same_v<A, ChooseArgs>) args.num_seqs = seqs;
                // The calls of most layers read the same positions and slots, so each is checked once.
                if constexpr (std::is_same_v<A, RotaryArgs>) {
                    const bool seen = std::any_of(checked.begin(), checked.end(), [&](const RotaryArgs* other) {
                        return args.slots == other->slots && args.num_slots == other->num_slots &&
                               args.positions == other->positions && args.max_positions == other->max_positions;
                    });
                    if (!seen) {
                        check(args);
                        checked.push_back(&args);
                    }
                } else {
                    check(args);
                }
                if constexpr (std::is_same_v<A, AttentionArgs>) {
                    args.num_seqs = seqs;
                    if (std::find(planned.begin(), planned.end(), call.attention) == planned.end()) {
                        call.attention->plan(args, threads);
                        planned.push_back(call.attention);
                    }
                    launches_.push_back(call.attention->launch(args, table));
                } else if constexpr (std::is_same_v<A, ShrinkArgs>) {
                    if (std::find(ordered.begin(), ordered.end(), call.adapters) == ordered.end()) {
                        call.adapters->plan(args, threads);
                        ordered.push_back(call.adapters);
                    }
                    const Launch launch = call.adapters->launch(args, table);
                    if (launch.num_tasks == 0) return;  // no row has an adapter: the call is left out
                    names_.push_back(name_of(call.args));
                    launches_.push_back(launch);
                    if (last_product != nullptr) last_product->next = &args;
                    last_product = nullptr;
                } else if constexpr (std::is_same_v<A, ExpertsArgs>) {
                    call.experts->plan(args, table, threads, experts_scratch_);
                    const std::vector<Launch>& launches = call.experts->launches();
                    const std::vector<const char*>& names = call.experts->names();
                    launches_.insert(launches_.end(), launches.begin(), launches.end());
                    names_.insert(names_.end(), names.begin(), names.end());
                } else if constexpr (std::is_same_v<A, ExchangeArgs>) {
                    group_ = args.group;
                    for (const Launch& launch : plan_exchange(args, threads)) {
                        names_.push_back(name_of(call.args));
                        launches_.push_back(launch);
                    }
                } else {
                    launches_.push_back(octavo::plan(args, table, threads));
                    if constexpr (std::is_same_v<A, LinearArgs>) last_product = &args;
                }
            },
            call.args);
    }
}

void Program::run(int64_t tokens, int32_t seqs, int64_t samples) {
    plan(tokens, seqs, samples);
    octavo::run(launches_.data(), launches_.size());
    if (group_ != nullptr) check_group(*group_);
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
