// octavo._cpu: the Python face of the native kernels. Arrays arrive as addresses, sizes and strides (in elements);
// octavo/ops/cpu.py has checked them. A call builds the argument struct, plans it and runs it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "dispatch.h"
#include "launch.h"
#include "pack_int.h"
#include "program.h"
#include "thread_pool.h"

namespace nb = nanobind;

// Where an array's elements begin: of a numpy array, an address as a number, or None for nowhere.
struct Address {
    uintptr_t value = 0;
};

namespace {
PyTypeObject* numpy_array = nullptr;  // kept alive by numpy's module
}

// numpy's own ways to ask an array for its address take two microseconds, and its buffers do not know ml_dtypes' types.
// The field is the first of PyArrayObject_fields in numpy's C API, which its compiled users rely on.
template <>
struct nb::detail::type_caster<Address> {
    NB_TYPE_CASTER(Address, const_name("numpy.ndarray | int | None"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        if (PyObject_TypeCheck(source.ptr(), numpy_array)) {
            memcpy(&value.value, reinterpret_cast<const char*>(source.ptr()) + sizeof(PyObject), sizeof(value.value));
            return true;
        }
        value.value = 0;
        if (source.is_none()) return true;
        if (!PyLong_Check(source.ptr())) return false;
        value.value = PyLong_AsSize_t(source.ptr());
        if (value.value != static_cast<size_t>(-1) || PyErr_Occurred() == nullptr) return true;
        PyErr_Clear();
        return false;
    }
};

using octavo::Launch;
using octavo::Program;

namespace {

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address.value);
}

// Giving up the interpreter lock may cost a whole switch interval (5 ms) to get back when another thread wants it, so
// it is kept for calls that are over sooner than that thread would have been given its turn.
constexpr double kReleaseNs = 1e6;

template <class F>
void without_lock(double cost_ns, F f) {
    if (cost_ns > kReleaseNs) {
        nb::gil_scoped_release release;
        f();
    } else {
        f();
    }
}

void call(const Launch& launch) {
    without_lock(launch.cost_ns, [&] { octavo::run(launch); });
}

// Runs an operation now, or adds it to the program that is being recorded.
template <class Args>
void submit(Args& args) {
    if (Program* program = Program::recording()) {
        program->add(args);
    } else {
        call(octavo::plan(args, octavo::kernels(), octavo::num_threads()));
    }
}

// Large pages for weights and caches, which are read from end to end or all over: fewer page faults when they are first
// written, fewer TLB misses after.
void advise_huge_pages(Address address, size_t bytes) {
#ifdef __linux__
    constexpr uintptr_t kHuge = 2 << 20;
    const uintptr_t begin = (address.value + kHuge - 1) / kHuge * kHuge;
    const uintptr_t end = (address.value + bytes) / kHuge * kHuge;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address;
    (void)bytes;
#endif
}

void pack_linear(Address weight, int64_t stride, int64_t n, int64_t k, int32_t dtype, Address out, size_t out_bytes,
                 int64_t panel_step) {
    advise_huge_pages(out, out_bytes);
    octavo::PackArgs args{at<void>(weight), at<void>(out), stride, n, k, panel_step, dtype};
    call(octavo::plan(args));
}

void make_matrix(octavo::Matrix* self, Address data, Address bias, int64_t n, int64_t k, float factor, int32_t format,
                 int32_t group, int32_t minima, int32_t gated) {
    new (self) octavo::Matrix{at<void>(data), at<float>(bias), n, k, factor, format, group, minima, gated};
}

void linear(Address x, int64_t x_stride, int64_t rows, const octavo::Matrix& matrix, Address out, int64_t out_stride,
            int32_t out_dtype, int32_t epilogue, float scale) {
    octavo::LinearArgs args{};
    args.x = at<void>(x);
    args.x_stride = x_stride;
    args.matrix = matrix;
    args.out = at<void>(out);
    args.out_stride = out_stride;
    args.rows = rows;
    args.out_dtype = out_dtype;
    args.epilogue = epilogue;
    args.scale = scale;
    submit(args);
}

void quantize(Address x, int64_t x_stride, int64_t rows, int64_t width, int32_t dtype, Address out) {
    octavo::QuantizeArgs args{at<void>(x), at<octavo::QBlock>(out), x_stride, rows, width, dtype, 0};
    submit(args);
}

void embedding(Address token_ids, int64_t tokens, const octavo::Matrix& matrix, Address out, int32_t out_dtype,
               float scale) {
    octavo::EmbeddingArgs args{at<int32_t>(token_ids), matrix, at<void>(out), tokens, scale, out_dtype, 0};
    if (!Program::recording()) octavo::check(args);
    submit(args);
}

void take_rows(Address x, int64_t x_rows, int64_t row_bytes, int64_t stride_bytes, Address indices, int64_t rows,
               Address out) {
    octavo::TakeRowsArgs args{
        at<void>(x), at<int64_t>(indices), at<void>(out), rows, x_rows, row_bytes, stride_bytes, 0};
    if (!Program::recording()) octavo::check(args);
    submit(args);
}

void norm(Address x, Address weight, Address bias, Address out, int64_t outer, int64_t inner, int64_t hidden,
          int64_t outer_stride, int64_t inner_stride, float eps, int32_t dtype, int32_t weight_dtype, int32_t out_dtype,
          bool centered) {
    octavo::NormArgs args{};
    args.x = at<void>(x);
    args.weight = at<void>(weight);
    args.bias = at<void>(bias);
    args.out = at<void>(out);
    args.outer = outer;
    args.inner = inner;
    args.hidden = hidden;
    args.x_outer_stride = outer_stride;
    args.x_inner_stride = inner_stride;
    args.eps = eps;
    args.dtype = dtype;
    args.weight_dtype = weight_dtype;
    args.out_dtype = out_dtype;
    args.centered = centered;
    submit(args);
}

void activation(Address x, int64_t x_stride, int64_t rows, int64_t width, int32_t dtype, Address out, int32_t out_dtype,
                int32_t kind) {
    octavo::ActivationArgs args{at<void>(x), at<void>(out), x_stride, rows, width, dtype, out_dtype, kind, 0};
    submit(args);
}

void add(Address x, int64_t x_stride, int32_t dtype, Address out, int64_t out_stride, int32_t out_dtype, int64_t rows,
         int64_t width, float scale) {
    octavo::AddArgs args{at<void>(x), at<void>(out), x_stride, out_stride, rows, width, scale, dtype, out_dtype, 0};
    submit(args);
}

void rotary_and_cache(Address query, int64_t query_stride, Address key, int64_t key_stride, Address value,
                      int64_t value_stride, Address positions, Address cos_sin, int64_t max_positions,
                      int32_t rotary_size, Address key_cache, Address value_cache, int64_t num_blocks, Address slots,
                      int64_t tokens, int32_t query_heads, int32_t kv_heads, int32_t head_size, int32_t block_size,
                      int32_t dtype) {
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
    args.max_positions = max_positions;
    args.num_slots = num_blocks * block_size;
    args.query_heads = query_heads;
    args.kv_heads = kv_heads;
    args.head_size = head_size;
    args.rotary_size = rotary_size;
    args.block_size = block_size;
    args.dtype = dtype;
    if (!Program::recording()) octavo::check(args);
    submit(args);
}

void paged_attention(Address query, int64_t tokens, int64_t query_stride, Address key_cache, Address value_cache,
                     Address block_tables, int64_t table_stride, int64_t max_blocks, Address query_start,
                     Address seq_lens, int32_t num_seqs, int32_t query_heads, int32_t kv_heads, int32_t head_size,
                     int32_t block_size, int32_t window, float scale, int32_t dtype, Address out) {
    octavo::AttentionArgs args{};
    args.query = at<void>(query);
    args.key_cache = at<void>(key_cache);
    args.value_cache = at<void>(value_cache);
    args.block_tables = at<int32_t>(block_tables);
    args.query_start = at<int32_t>(query_start);
    args.seq_lens = at<int32_t>(seq_lens);
    args.out = at<void>(out);
    args.tokens = tokens;
    args.query_stride = query_stride;
    args.table_stride = table_stride;
    args.max_blocks = max_blocks;
    args.num_seqs = num_seqs;
    args.query_heads = query_heads;
    args.kv_heads = kv_heads;
    args.head_size = head_size;
    args.block_size = block_size;
    args.window = window;
    args.dtype = dtype;
    args.scale = scale;
    if (Program* program = Program::recording()) {
        program->add(args);
        return;
    }
    static thread_local octavo::AttentionPlan plan;
    plan.plan(args, octavo::num_threads());
    call(plan.launch(args, octavo::kernels()));
}

void argmax(Address x, int64_t stride, int64_t rows, int64_t width, Address out) {
    octavo::ArgmaxArgs args{at<float>(x), at<int64_t>(out), stride, width, rows};
    submit(args);
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
                            width,
                            rows};
    call(octavo::plan(args, octavo::kernels(), octavo::num_threads()));
}

void mask_tokens(Address logits, int64_t stride, int64_t rows, int64_t width, Address words, int64_t words_stride,
                 int64_t num_words, Address samples, int64_t masks) {
    octavo::MaskArgs args{at<float>(logits),
                          at<uint32_t>(words),
                          at<int64_t>(samples),
                          stride,
                          width,
                          words_stride,
                          num_words,
                          masks,
                          rows};
    octavo::check(args);
    call(octavo::plan(args, octavo::kernels(), octavo::num_threads()));
}

octavo::Matrix integer_matrix(Address data, int64_t n, int64_t k, float factor, int32_t bits, int32_t group,
                              int32_t minima, int32_t gated) {
    const int32_t format = bits == 4 ? octavo::kWeightInt4 : octavo::kWeightInt8;
    return {at<void>(data), nullptr, n, k, factor, format, group, minima, gated};
}

int64_t integer_matrix_bytes(int64_t n, int64_t k, int32_t bits, int32_t group, bool minima, bool gated) {
    const octavo::Matrix matrix = integer_matrix({}, n, k, 1, bits, group, minima, gated);
    const int64_t sides = gated ? 2 : 1;
    const int64_t panels = sides * ((n / sides + octavo::kPanel - 1) / octavo::kPanel);
    return panels * ((k + octavo::kQBlock - 1) / octavo::kQBlock) * octavo::packed_block_bytes(matrix);
}

void pack_part(Address data, int64_t n, int64_t k, float factor, int32_t bits, int32_t group, bool minima, bool gated,
               int64_t first_row, Address source, int32_t source_format, int64_t stride, int64_t rows) {
    octavo::PackPartArgs args{integer_matrix(data, n, k, factor, bits, group, minima, gated),
                              at<uint8_t>(source),
                              stride,
                              rows,
                              first_row,
                              source_format};
    call(octavo::plan(args));
}

float max_scale(Address source, int32_t source_format, int64_t stride, int64_t rows, int64_t k) {
    std::vector<float> largest(static_cast<size_t>((rows + octavo::kPanel - 1) / octavo::kPanel));
    octavo::MaxScaleArgs args{at<uint8_t>(source), stride, rows, k, source_format, largest.data()};
    call(octavo::plan(args));
    return largest.empty() ? 0.0f : *std::max_element(largest.begin(), largest.end());
}

}  // namespace

NB_MODULE(_cpu, m) {
    numpy_array = reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr());
    m.doc() = "Octavo's native CPU kernels over raw addresses; octavo.ops.cpu is the interface for arrays.";
    m.attr("F32") = static_cast<int>(octavo::kF32);
    m.attr("BF16") = static_cast<int>(octavo::kBF16);
    m.attr("Q8") = static_cast<int>(octavo::kQ8);
    m.attr("WEIGHT_F32") = static_cast<int>(octavo::kWeightF32);
    m.attr("WEIGHT_BF16") = static_cast<int>(octavo::kWeightBF16);
    m.attr("WEIGHT_INT4") = static_cast<int>(octavo::kWeightInt4);
    m.attr("WEIGHT_INT8") = static_cast<int>(octavo::kWeightInt8);
    m.attr("STORE") = static_cast<int>(octavo::kStore);
    m.attr("ADD") = static_cast<int>(octavo::kAdd);
    m.attr("GATED") = static_cast<int>(octavo::kGated);
    nb::dict activations;
    const char* names[] = {"silu", "gelu", "gelu_tanh", "relu", "relu2"};
    for (int i = 0; i <= octavo::kRelu2; ++i) activations[names[i]] = i;
    m.attr("ACTIVATIONS") = activations;
    m.attr("PANEL") = octavo::kPanel;
    m.attr("QBLOCK") = octavo::kQBlock;
    m.attr("QBLOCK_BYTES") = sizeof(octavo::QBlock);
    m.attr("VALUE_PAD") = octavo::kValuePad;
    m.attr("MAX_HEAD_SIZE") = octavo::kMaxHeadSize;
    m.def("available_isas", &octavo::available_isas);
    m.def("isa", [] { return std::string(octavo::kernels().name); });
    m.def("set_isa", &octavo::set_isa);
    m.def("default_placement", [] {
        const octavo::Placement placement = octavo::default_placement();
        return std::make_pair(placement.threads, placement.cpus);
    });
    m.def("bind_thread", &octavo::bind_thread);
    m.def("num_threads", &octavo::num_threads);
    m.def("set_threads", &octavo::set_threads, nb::arg("n"), nb::arg("cpus") = std::vector<int>{},
          nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Program>(m, "Program", "Recorded calls; octavo.ops.cpu_program is the interface.")
        .def(nb::init<>())
        .def("__len__", &Program::size)
        .def("record",
             [](Program& p, bool samples) {
                 Program::start_recording(&p, samples ? octavo::Extent::kSamples : octavo::Extent::kTokens);
             })
        .def("run",
             [](Program& p, int64_t tokens, int32_t seqs, int64_t samples) {
                 nb::gil_scoped_release release;
                 p.run(tokens, seqs, samples);
             })
        .def("profile", &Program::profile);
    m.def("stop_recording", &Program::stop_recording);
    // The Python object that the program is of, or None.
    m.def("recording", &Program::recording, nb::rv_policy::reference);
    m.def("advise_huge_pages", &advise_huge_pages);
    nb::class_<octavo::Matrix>(m, "Matrix")
        .def("__init__", &make_matrix, nb::arg("data"), nb::arg("bias").none(), nb::arg("n"), nb::arg("k"),
             nb::arg("factor"), nb::arg("format"), nb::arg("group"), nb::arg("minima"), nb::arg("gated"));
    m.def("pack_linear", &pack_linear);
    m.def("linear", &linear);
    m.def("quantize", &quantize);
    m.def("embedding", &embedding);
    m.def("take_rows", &take_rows);
    m.def("norm", &norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("out"), nb::arg("outer"),
          nb::arg("inner"), nb::arg("hidden"), nb::arg("outer_stride"), nb::arg("inner_stride"), nb::arg("eps"),
          nb::arg("dtype"), nb::arg("weight_dtype"), nb::arg("out_dtype"), nb::arg("centered"));
    m.def("activation", &activation);
    m.def("add", &add);
    m.def("rotary_and_cache", &rotary_and_cache);
    m.def("paged_attention", &paged_attention);
    m.def("argmax", &argmax);
    m.def("sample", &sample);
    m.def("mask_tokens", &mask_tokens);
    nb::dict sources;
    for (int i = 0; i < octavo::kNumSourceFormats; ++i) sources[octavo::kSourceNames[i]] = i;
    m.attr("SOURCE_FORMATS") = sources;
    m.def("integer_matrix_bytes", &integer_matrix_bytes);
    m.def("pack_part", &pack_part);
    m.def("max_scale", &max_scale);
}
