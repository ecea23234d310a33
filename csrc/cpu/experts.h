// Products of experts: rows grouped by expert meet the matrices of their expert, by the kernels of linear.h. Routing's
// decisions (ExpertsSchedule) are read here, when a pass runs: the number of tasks is fixed before, the work of each is
// not. Included by kernels.cpp and products.cpp only.
#pragma once

#include <vector>

#include "lora_a.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline int64_t row_elements(int64_t bytes, int32_t dtype) {
    return bytes / (dtype == kQ8 ? static_cast<int64_t>(sizeof(QBlock)) : dtype == kF32 ? 4 : 2);
}

// Sets up `linear` to add the adapters of a part's rows. `factors` are the stack's; shrunk rows have `width` elements.
inline void expand_part(LinearArgs& linear, const ExpertsPass& p, const ExpertRows& part, const AdapterFactors* factors,
                        int64_t width) {
    const ExpertsArgs& a = *p.args;
    linear.has_lora = 0;
    if (p.shrink_tasks == 0 || factors == nullptr) return;
    linear.slots = p.schedule->slots + part.begin;
    for (int64_t r = 0; r < part.rows; ++r) linear.has_lora |= linear.slots[r] >= 0;
    linear.num_slots = a.num_slots;
    linear.factors = factors + part.expert * a.num_slots;
    linear.factor_dtype = a.factor_dtype;
    linear.shrunk = p.schedule->shrunk + part.begin * width * (a.factor_dtype == kF32 ? 4 : 2);
    linear.shrunk_stride = width;
}

// Returns the input row of the first product at place `place`, in a part of `rows` rows.
inline const char* input_row(const ExpertsPass& p, int64_t place, int64_t rows) {
    const ExpertsArgs& a = *p.args;
    if (rows > 1 || a.scale_inputs) return p.schedule->inputs + place * p.input_bytes;
    const int64_t element_bytes = p.input_bytes / row_elements(p.input_bytes, p.input_dtype);
    return static_cast<const char*>(a.x) + p.schedule->tokens[place] * a.x_stride * element_bytes;
}

// Multiplies the rows of one of the products by their adapters' A. Neighbouring rows of an expert with the same adapter
// go together; tasks take turns over these groups.
template <bool kUp>
void experts_shrink(const void* args, int64_t task) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    const ExpertsSchedule& s = *p.schedule;
    const AdapterFactors* factors = kUp ? a.up_factors : a.down_factors;
    const int64_t bytes = kUp ? p.input_bytes : p.inner_bytes;
    int32_t rows[kAdapterRows];
    for (int r = 0; r < kAdapterRows; ++r) rows[r] = r;
    AdapterRows together{};
    const AdapterSchedule schedule{rows, &together, 1, 1};
    ShrinkArgs shrink{};
    shrink.k = kUp ? a.up->k : a.down->k;
    shrink.dtype = a.factor_dtype;
    shrink.x_dtype = kUp ? p.input_dtype : p.inner_dtype;
    shrink.x_stride = row_elements(bytes, shrink.x_dtype);
    shrink.out_stride = kUp ? a.up_width : a.down_width;
    shrink.scratch = s.copies + task * p.copy_bytes;
    shrink.schedule = &schedule;
    const int64_t out_bytes = shrink.out_stride * (a.factor_dtype == kF32 ? 4 : 2);
    int64_t turn = 0;
    for (int64_t i = 0; i < s.num_parts; ++i) {
        const ExpertRows& part = s.parts[i];
        shrink.factors = factors + part.expert * a.num_slots;
        const int32_t* slots = s.slots + part.begin;
        for (int32_t row = 0, end; row < part.rows; row = end) {
            const int32_t slot = slots[row];
            for (end = row + 1; end < part.rows && slots[end] == slot && end - row < kAdapterRows;) ++end;
            if (slot < 0 || shrink.factors[slot].panels == nullptr || turn++ % p.shrink_tasks != task) continue;
            together = {slot, 0, end - row};
            const int64_t place = part.begin + row;
            shrink.x = kUp ? input_row(p, place, part.rows) : s.inner + place * bytes;
            shrink.out = s.shrunk + place * out_bytes;
            with_element(a.factor_dtype, [&](auto element) { shrink_part<decltype(element)>(shrink, together, 0); });
        }
    }
}

// The first product. Tasks divide the cost of all parts evenly, in whole epilogues: a task may end in the middle of
// an expert, where the next begins.
void experts_up(const void* args, int64_t task) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    const ExpertsSchedule& s = *p.schedule;
    if (s.num_parts == 0) return;
    LinearArgs linear{};
    linear.out_dtype = p.inner_dtype;
    linear.epilogue = a.up->gated ? kGated : kActivated;
    linear.activation = a.activation;
    linear.clamp = {a.slope, a.limit};
    const int64_t sides = a.up->gated ? 2 : 1;
    const int64_t panels = (a.up->n / sides + kPanel - 1) / kPanel * sides;
    const int64_t epilogue_panels = epilogue_vecs(linear, kVecsPerPanel) / kVecsPerPanel;
    const int64_t epilogues = (panels + epilogue_panels - 1) / epilogue_panels;
    const int64_t cost = s.parts[s.num_parts - 1].cost_end;
    const int64_t begin = cost * task / p.up_tasks;
    const int64_t end = cost * (task + 1) / p.up_tasks;
    for (int64_t i = 0; i < s.num_parts; ++i) {
        const ExpertRows& part = s.parts[i];
        const int64_t part_begin = i == 0 ? 0 : s.parts[i - 1].cost_end;
        if (part.cost_end <= begin) continue;
        if (part_begin >= end) break;
        // Returns the first epilogue that begins at or after a place in the part's cost.
        const auto epilogue_at = [&](int64_t at) {
            const int64_t width = part.cost_end - part_begin;
            if (at <= part_begin) return int64_t{0};
            if (at >= part.cost_end) return epilogues;
            return ((at - part_begin) * epilogues + width - 1) / width;
        };
        const int64_t panel_begin = epilogue_at(begin) * epilogue_panels;
        const int64_t panel_end = min_of(epilogue_at(end) * epilogue_panels, panels);
        if (panel_begin >= panel_end) continue;
        linear.matrix = a.up[part.expert];
        linear.x = input_row(p, part.begin, part.rows);
        expand_part(linear, p, part, a.up_factors, a.up_width);
        linear.x_stride = row_elements(p.input_bytes, p.input_dtype);
        linear.rows = part.rows;
        linear.out = s.inner + part.begin * p.inner_bytes;
        linear.out_stride = row_elements(p.inner_bytes, p.inner_dtype);
        product_block(linear, 0, part.rows, panel_begin, panel_end);
    }
}

// Returns memory for a task's columns [tokens, width] of partial sums that wait for other segments.
inline float* waiting_outputs(int64_t floats) {
    static thread_local std::vector<float> waiting;
    const size_t wanted = static_cast<size_t>((kTreeDepth - 1) * floats);
    if (waiting.size() < wanted) waiting.resize(wanted);
    return waiting.data();
}

// The second product. A task owns columns of the output and adds a row's experts to them one after the other, segment
// by segment.
void experts_down(const void* args, int64_t task) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    const ExpertsSchedule& s = *p.schedule;
    LinearArgs linear{};
    linear.epilogue = kScatter;
    linear.x_stride = row_elements(p.inner_bytes, p.inner_dtype);
    const int64_t panels = (a.down->n + kPanel - 1) / kPanel;
    const int64_t panel_begin = panels * task / p.down_tasks;
    const int64_t panel_end = panels * (task + 1) / p.down_tasks;
    const int64_t width = min_of(panel_end * kPanel, a.down->n) - panel_begin * kPanel;
    const int64_t tokens = p.token_end - p.token_begin;
    float* waiting = a.segments == 1 ? nullptr : waiting_outputs(tokens * width);
    // The place of the first token's columns at a depth of the tree, and the distance from token to token.
    const auto at = [&](int depth) {
        return depth == 0 ? a.out + p.token_begin * a.down->n + panel_begin * kPanel
                          : waiting + (depth - 1) * tokens * width;
    };
    const auto stride = [&](int depth) { return depth == 0 ? a.down->n : width; };
    int64_t i = 0;
    in_tree(
        a.segments,
        [&](int segment, int depth) {
            float* sums = at(depth);
            for (int64_t t = 0; t < tokens; ++t) {
                memset(sums + t * stride(depth), 0, static_cast<size_t>(width) * sizeof(float));
            }
            // kScatter counts rows from the call's first token and columns from 0: the address of the output is moved
            // back to fit.
            const int64_t before = p.token_begin * stride(depth) + panel_begin * kPanel;
            linear.out = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(sums) -
                                                 static_cast<uintptr_t>(before) * sizeof(float));
            linear.out_stride = stride(depth);
            for (; i < s.num_parts && s.parts[i].expert * a.segments < (segment + 1) * a.num_experts; ++i) {
                const ExpertRows& part = s.parts[i];
                linear.matrix = a.down[part.expert];
                linear.x = s.inner + part.begin * p.inner_bytes;
                linear.rows = part.rows;
                expand_part(linear, p, part, a.down_factors, a.down_width);
                linear.out_rows = s.tokens + part.begin;
                linear.row_scales = a.scale_inputs ? nullptr : s.weights + part.begin;
                product_block(linear, 0, part.rows, panel_begin, panel_end);
            }
        },
        [&](int depth) {
            for (int64_t t = 0; t < tokens; ++t) {
                float* to = at(depth - 1) + t * stride(depth - 1);
                const float* more = at(depth) + t * stride(depth);
                for_vectors(width, [&](int64_t j, int lanes) {
                    store_some(to + j, add(load_some(to + j, lanes), load_some(more + j, lanes)), lanes);
                });
            }
        });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
