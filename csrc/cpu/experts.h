// Products of experts: rows grouped by expert meet the matrices of theirs by the kernels of linear.h. What routing has
// decided (ExpertsSchedule) is read here, when the pass runs: the number of tasks is fixed, what each has to do is not.
// Included by kernels.cpp and products.cpp only.
#pragma once

#include <vector>

#include "linear.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline int64_t row_elements(int64_t bytes, int32_t dtype) {
    return bytes / (dtype == kQ8 ? static_cast<int64_t>(sizeof(QBlock)) : dtype == kF32 ? 4 : 2);
}

// Tasks divide the cost of all parts evenly, in whole units of panels, so that one may end in the middle of an expert
// and another begin there.
void experts_up(const void* args, int64_t task) {
    const ExpertsPass& p = *static_cast<const ExpertsPass*>(args);
    const ExpertsArgs& a = *p.args;
    const ExpertsSchedule& s = *p.schedule;
    if (s.num_parts == 0) return;
    LinearArgs linear{};
    linear.out_dtype = p.inner_dtype;
    linear.epilogue = a.up->gated ? kGated : kActivated;
    linear.activation = a.activation;
    linear.clamp = a.clamp;
    const int64_t sides = a.up->gated ? 2 : 1;
    const int64_t panels = (a.up->n / sides + kPanel - 1) / kPanel * sides;
    const int64_t unit = unit_vecs(linear, kVecsPerPanel) / kVecsPerPanel;
    const int64_t units = (panels + unit - 1) / unit;
    const int64_t cost = s.parts[s.num_parts - 1].cost_end;
    const int64_t begin = cost * task / p.up_tasks;
    const int64_t end = cost * (task + 1) / p.up_tasks;
    for (int64_t i = 0; i < s.num_parts; ++i) {
        const ExpertRows& part = s.parts[i];
        const int64_t part_begin = i == 0 ? 0 : s.parts[i - 1].cost_end;
        if (part.cost_end <= begin) continue;
        if (part_begin >= end) break;
        // The first unit that begins at or after a place in the part.
        const auto unit_at = [&](int64_t at) {
            const int64_t width = part.cost_end - part_begin;
            return at <= part_begin ? 0 : at >= part.cost_end ? units : ((at - part_begin) * units + width - 1) / width;
        };
        const int64_t panel_begin = unit_at(begin) * unit;
        const int64_t panel_end = min_of(unit_at(end) * unit, panels);
        if (panel_begin >= panel_end) continue;
        linear.matrix = a.up[part.expert];
        if (part.rows == 1 && !a.scale_inputs) {
            const int64_t element_bytes = p.input_bytes / row_elements(p.input_bytes, p.input_dtype);
            linear.x = static_cast<const char*>(a.x) + s.tokens[part.begin] * a.x_stride * element_bytes;
        } else {
            linear.x = s.inputs + part.begin * p.input_bytes;
        }
        linear.x_stride = row_elements(p.input_bytes, p.input_dtype);
        linear.rows = part.rows;
        linear.out = s.inner + part.begin * p.inner_bytes;
        linear.out_stride = row_elements(p.inner_bytes, p.inner_dtype);
        product_block(linear, 0, part.rows, panel_begin, panel_end);
    }
}

// Outputs [tokens, width] of a task's columns whose sums wait for those of other segments.
inline float* waiting_outputs(int64_t floats) {
    static thread_local std::vector<float> waiting;
    const size_t wanted = static_cast<size_t>((kTreeDepth - 1) * floats);
    if (waiting.size() < wanted) waiting.resize(wanted);
    return waiting.data();
}

// A task owns columns of the output and adds the experts of a row to them one after the other, segment by segment.
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
    // The columns of the pass's first token, and from each token to the next.
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
            // Rows are counted from the call's first token, and columns from the first of all.
            const int64_t before = p.token_begin * stride(depth) + panel_begin * kPanel;
            linear.out = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(sums) -
                                                 static_cast<uintptr_t>(before) * sizeof(float));
            linear.out_stride = stride(depth);
            for (; i < s.num_parts && s.parts[i].expert * a.segments < (segment + 1) * a.num_experts; ++i) {
                const ExpertRows& part = s.parts[i];
                linear.matrix = a.down[part.expert];
                linear.x = s.inner + part.begin * p.inner_bytes;
                linear.rows = part.rows;
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
