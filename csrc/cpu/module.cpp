// octavo._cpu: the Python face of the native kernels. Tensors arrive as addresses, sizes and strides (in elements);
// octavo/ops/cpu.py has checked them. A call builds the argument struct, plans it and runs it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "dispatch.h"
#include "launch.h"
#include "thread_pool.h"

namespace nb = nanobind;
using octavo::Launch;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Giving up the interpreter lock may cost a whole switch interval (5 ms) to get back when another thread wants it, so
// it is kept for calls that are over sooner than that thread would have been given its turn.
constexpr double kReleaseNs = 1e6;

void call(const Launch& launch) {
    if (launch.cost_ns > kReleaseNs) {
        nb::gil_scoped_release release;
        octavo::run(launch);
    } else {
        octavo::run(launch);
    }
}

// Large pages for weights and caches, which are read from end to end or all over: fewer page faults when they are first
// written, fewer TLB misses after.
void advise_huge_pages(Address address, size_t bytes) {
#ifdef __linux__
    constexpr Address kHuge = 2 << 20;
    const Address begin = (address + kHuge - 1) / kHuge * kHuge;
    const Address end = (address + bytes) / kHuge * kHuge;
    if (begin < end) madvise(at<void>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)bytes;
#endif
}

// A wrong index would read or write someone else's memory; looking at each costs a nanosecond.
template <class T>
void check_indices(const char* what, const T* indices, int64_t count, int64_t lowest, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] >= lowest && indices[i] < end) continue;
        throw nb::index_error((std::string(what) + " " + std::to_string(indices[i]) + " at index " + std::to_string(i) +
                               " is not below " + std::to_string(end) + ".")
                                  .c_str());
    }
}

void pack_linear(Address weight, int64_t stride, int64_t n, int64_t k, int32_t dtype, Address out, size_t out_bytes) {
    advise_huge_pages(out, out_bytes);
    octavo::PackArgs args{at<void>(weight), at<void>(out), stride, n, k, dtype};
    call(octavo::plan_pack(args));
}

void linear(Address x, int64_t x_stride, int64_t rows, Address weight, Address bias, int64_t k, int64_t n,
            int32_t dtype, Address out, int32_t out_dtype) {
    octavo::LinearArgs args{};
    args.x = at<void>(x);
    args.weight = at<void>(weight);
    args.bias = at<float>(bias);
    args.out = at<void>(out);
    args.x_stride = x_stride;
    args.out_stride = n;
    args.rows = rows;
    args.k = k;
    args.n = n;
    args.dtype = dtype;
    args.out_dtype = out_dtype;
    call(octavo::plan_linear(octavo::kernels(), args, octavo::num_threads()));
}

void embedding(Address token_ids, int64_t tokens, Address weight, int64_t n, int64_t k, int32_t dtype, Address out) {
    check_indices("token id", at<int32_t>(token_ids), tokens, 0, n);
    octavo::EmbeddingArgs args{at<int32_t>(token_ids), at<void>(weight), at<void>(out), tokens, n, k, dtype, 0};
    call(octavo::plan_embedding(octavo::kernels(), args));
}

void norm(Address x, Address residual, Address weight, Address out, int64_t outer, int64_t inner, int64_t hidden,
          int64_t outer_stride, int64_t inner_stride, int64_t residual_stride, float eps, int32_t dtype,
          int32_t weight_dtype) {
    octavo::NormArgs args{};
    args.x = at<void>(x);
    args.residual = at<void>(residual);
    args.weight = at<void>(weight);
    args.out = at<void>(out);
    args.outer = outer;
    args.inner = inner;
    args.hidden = hidden;
    args.x_outer_stride = outer_stride;
    args.x_inner_stride = inner_stride;
    args.residual_stride = residual_stride;
    args.eps = eps;
    args.dtype = dtype;
    args.weight_dtype = weight_dtype;
    call(octavo::plan_norm(octavo::kernels(), args, octavo::num_threads()));
}

void rotary_and_cache(Address query, int64_t query_stride, Address key, int64_t key_stride, Address value,
                      int64_t value_stride, Address positions, Address cos_sin, int64_t max_positions,
                      int32_t rotary_size, Address key_cache, Address value_cache, int64_t num_blocks, Address slots,
                      int64_t tokens, int32_t query_heads, int32_t kv_heads, int32_t head_size, int32_t block_size,
                      int32_t dtype) {
    check_indices("position", at<int64_t>(positions), tokens, 0, max_positions);
    check_indices("slot", at<int64_t>(slots), tokens, INT64_MIN, num_blocks * block_size);
    octavo::RotaryArgs args{};
    args.query = at<void>(query);
    args.key = at<void>(key);
    args.value = at<void>(value);
    args.positions = at<int64_t>(positions);
    args.cos_sin = at<float>(cos_sin);
    args.key_cache = at<void>(key_cache);
    args.value_cache = at<void>(value_cache);
    args.slots = at<int64_t>(slots);
    args.query_stride = query_stride;
    args.key_stride = key_stride;
    args.value_stride = value_stride;
    args.tokens = tokens;
    args.query_heads = query_heads;
    args.kv_heads = kv_heads;
    args.head_size = head_size;
    args.rotary_size = rotary_size;
    args.block_size = block_size;
    args.dtype = dtype;
    call(octavo::plan_rotary(octavo::kernels(), args, octavo::num_threads()));
}

void paged_attention(Address query, int64_t query_stride, Address key_cache, Address value_cache, Address block_tables,
                     int64_t table_stride, int64_t max_blocks, Address query_start, Address seq_lens, int32_t num_seqs,
                     int32_t query_heads, int32_t kv_heads, int32_t head_size, int32_t block_size, int32_t window,
                     float scale, int32_t dtype, Address out) {
    octavo::AttentionArgs args{};
    args.query = at<void>(query);
    args.key_cache = at<void>(key_cache);
    args.value_cache = at<void>(value_cache);
    args.block_tables = at<int32_t>(block_tables);
    args.query_start = at<int32_t>(query_start);
    args.seq_lens = at<int32_t>(seq_lens);
    args.out = at<void>(out);
    args.query_stride = query_stride;
    args.table_stride = table_stride;
    args.num_seqs = num_seqs;
    args.query_heads = query_heads;
    args.kv_heads = kv_heads;
    args.head_size = head_size;
    args.block_size = block_size;
    args.window = window;
    args.dtype = dtype;
    args.scale = scale;
    static thread_local octavo::AttentionPlan plan;
    call(plan.plan(octavo::kernels(), args, max_blocks, octavo::num_threads()));
}

void silu_and_mul(Address x, int64_t x_stride, int64_t rows, int64_t width, int32_t dtype, Address out) {
    octavo::SiluArgs args{at<void>(x), at<void>(out), x_stride, rows, width, dtype, 0};
    call(octavo::plan_silu(octavo::kernels(), args, octavo::num_threads()));
}

void argmax(Address x, int64_t stride, int64_t rows, int64_t width, Address out) {
    octavo::ArgmaxArgs args{at<float>(x), at<int64_t>(out), stride, width};
    call(octavo::plan_argmax(octavo::kernels(), args, rows));
}

void sample(Address logits, int64_t stride, int64_t rows, int64_t width, Address temperature, Address top_k,
            Address top_p, Address min_p, Address dice, Address out) {
    octavo::SampleArgs args{at<float>(logits),
                            at<float>(temperature),
                            at<int64_t>(top_k),
                            at<float>(top_p),
                            at<float>(min_p),
                            at<double>(dice),
                            at<int64_t>(out),
                            stride,
                            width};
    call(octavo::plan_sample(octavo::kernels(), args, rows));
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.doc() = "Octavo's native CPU kernels over raw addresses; octavo.ops.cpu is the interface for tensors.";
    m.attr("F32") = static_cast<int>(octavo::kF32);
    m.attr("BF16") = static_cast<int>(octavo::kBF16);
    m.attr("PANEL") = octavo::kPanel;
    m.attr("VALUE_PAD") = octavo::kValuePad;
    m.attr("MAX_HEAD_SIZE") = octavo::kMaxHeadSize;
    m.def("available_isas", &octavo::available_isas);
    m.def("isa", [] { return std::string(octavo::kernels().name); });
    m.def("set_isa", &octavo::set_isa);
    m.def("default_num_threads", &octavo::default_num_threads);
    m.def("num_threads", &octavo::num_threads);
    m.def("set_num_threads", &octavo::set_num_threads, nb::call_guard<nb::gil_scoped_release>());
    m.def("advise_huge_pages", &advise_huge_pages);
    m.def("pack_linear", &pack_linear);
    m.def("linear", &linear);
    m.def("embedding", &embedding);
    m.def("norm", &norm);
    m.def("rotary_and_cache", &rotary_and_cache);
    m.def("paged_attention", &paged_attention);
    m.def("silu_and_mul", &silu_and_mul);
    m.def("argmax", &argmax);
    m.def("sample", &sample);
}
