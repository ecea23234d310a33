// octavo._cpu: the Python interface of the native kernels. Arrays arrive as addresses, sizes and strides (in elements),
// which octavo/ops/cpu.py has checked. A call fills in the argument struct, plans it and runs it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "all_reduce.h"
#include "dispatch.h"
#include "launch.h"
#include "pack_int.h"
#include "pack_lora.h"
#include "program.h"
#include "summation_tree.h"
#include "thread_pool.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

// Where an array's elements begin. Python passes a numpy array, an address as a number, or None for no array.
struct Address {
    uintptr_t value = 0;
};

namespace {
PyTypeObject* numpy_array = nullptr;  // kept alive by numpy's module
}

// Reads a numpy array's address from its struct. numpy's own ways to ask for it take two microseconds, and its buffers
// do not know ml_dtypes' types. The field is the first of PyArrayObject_fields in numpy's C API, which its compiled
// users rely on.
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

// The least time of a call that releases the interpreter lock. Getting the lock back may take a whole switch interval
// (5 ms) if another thread wants it, so shorter calls keep it: they end before that thread would get its turn.
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

// Runs an operation now, or adds it to the program that is being recorded. While a program is recorded, Python does not
// call operations that programs cannot hold.
template <class Args>
void submit(Args& args) {
    if constexpr (std::is_constructible_v<Program::Args, Args>) {
        if (Program* program = Program::recording()) return program->add(args);
    }
    octavo::check(args);
    if constexpr (std::is_same_v<Args, octavo::ExpertsArgs>) {
        // Each thread has its own; they are valid until its next call.
        thread_local octavo::ExpertsScratch scratch;
        thread_local octavo::ExpertsPlan plan;
        plan.plan(args, octavo::kernels(), octavo::num_threads(), scratch);
        double cost_ns = 0;
        for (const Launch& launch : plan.launches()) cost_ns += launch.cost_ns;
        const std::vector<Launch>& launches = plan.launches();  // this thread's
        without_lock(cost_ns, [&] { octavo::run(launches.data(), launches.size()); });
    } else if constexpr (std::is_same_v<Args, octavo::ExchangeArgs>) {
        const std::vector<Launch> launches = octavo::plan_exchange(args, octavo::num_threads());
        nb::gil_scoped_release release;  // other processes may be late by any amount
        octavo::run(launches.data(), launches.size());
        octavo::check_group(*args.group);
    } else {
        call(octavo::plan(args, octavo::kernels(), octavo::num_threads()));
    }
}

// Matrices of one layout, side by side; experts are in the order of their numbers.
struct Matrices {
    std::vector<octavo::Matrix> of;
};

void make_matrices(Matrices* self, nb::sequence given) {
    new (self) Matrices{};
    for (nb::handle matrix : given) self->of.push_back(nb::cast<octavo::Matrix>(matrix));
}

template <class Struct, class Field>
Field field_of(Field Struct::*);

// The type that Python passes for a field: an array, or nothing, for most pointers.
template <auto field>
using Field = decltype(field_of(field));
template <class Field>
struct PassedFor {
    using Type = std::conditional_t<std::is_pointer_v<Field>, Address, Field>;
};
template <>
struct PassedFor<const octavo::Matrix*> {
    using Type = const Matrices&;
};
template <>
struct PassedFor<octavo::Group*> {
    using Type = octavo::Group*;
};
template <auto field>
using Passed = typename PassedFor<Field<field>>::Type;

template <auto field>
Field<field> value_of(const Passed<field>& passed) {
    if constexpr (std::is_same_v<Passed<field>, Address>) {
        return reinterpret_cast<Field<field>>(passed.value);
    } else if constexpr (std::is_same_v<Passed<field>, const Matrices&>) {
        return passed.of.data();
    } else {
        return passed;
    }
}

// The name of a field, which the compiler writes into the name of this function: "... &octavo::LinearArgs::rows]".
template <auto field>
constexpr auto name_of() {
    const std::string_view text = __PRETTY_FUNCTION__;
    const size_t end = text.find_first_of("];", text.find("= &"));
    const size_t begin = text.rfind("::", end) + 2;
    std::array<char, 32> name{};  // ends with a zero
    for (size_t i = begin; i < end; ++i) name[i - begin] = text[i];
    return name;
}

template <auto field>
constexpr auto kName = name_of<field>();

template <auto field>
auto argument() {
    if constexpr (std::is_same_v<Passed<field>, Address>) {
        return nb::arg(kName<field>.data()).none();
    } else {
        return nb::arg(kName<field>.data());
    }
}

// Defines an operation. Its arguments in Python are these fields of its struct, by name; all have to be given.
template <class Args, auto... fields>
void define(nb::module_& m, const char* name) {
    m.def(
        name,
        [](Passed<fields>... passed) {
            Args args{};
            ((args.*fields = value_of<fields>(passed)), ...);
            submit(args);
        },
        nb::kw_only(), argument<fields>()...);
}

// Asks for large pages for weights and caches, which are read from end to end or all over: fewer page faults when they
// are first written, fewer TLB misses later.
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

void make_matrix(octavo::Matrix* self, Address data, Address bias, int64_t n, int64_t k, float factor, int32_t format,
                 int32_t group, int32_t minima, int32_t gated, nb::bytes table) {
    new (self) octavo::Matrix{at<void>(data), at<float>(bias), n, k, factor, format, group, minima, gated, 1, {}};
    if (table.size() != (octavo::has_table(*self) ? octavo::kTableSize : 0)) {
        throw std::invalid_argument("a table of " + std::to_string(table.size()) + " numbers.");
    }
    std::memcpy(self->table, table.data(), table.size());
}

// Returns the number of elements of k in a block; segments end between blocks.
int block_of(const octavo::Matrix& matrix) {
    if (matrix.format == octavo::kWeightF32) return 1;
    if (matrix.format == octavo::kWeightBF16) return 2;
    return octavo::keeps_superblocks(matrix.format) ? octavo::kSuperblock : octavo::kQBlock;
}

void set_segments(octavo::Matrix& self, int32_t segments) {
    const int block = block_of(self);
    if (segments < 1 || segments > octavo::kMaxSegments || (segments > 1 && self.k % (segments * block) != 0)) {
        throw std::invalid_argument(std::to_string(self.k) + " elements, in blocks of " + std::to_string(block) +
                                    ", do not make " + std::to_string(segments) + " segments.");
    }
    self.segments = segments;
}

void make_group(octavo::Group* self, int rank, int size, Address memory, size_t num_bytes, std::vector<int> watched) {
    new (self) octavo::Group(rank, size, at<void>(memory), num_bytes, std::move(watched));
}

void define_operations(nb::module_& m) {
    using namespace octavo;
    using T = RouteArgs;
    using A = AttentionArgs;
    using R = RotaryArgs;
    using M = MultiplyArgs;
    using C = ConvArgs;
    using S = ScanArgs;
    using D = DeltaArgs;
    using G = RecurrenceArgs;
    using PW = PackWordsArgs;
    define<PackArgs, &PackArgs::weight, &PackArgs::stride, &PackArgs::n, &PackArgs::k, &PackArgs::dtype, &PackArgs::out,
           &PackArgs::panel_step>(m, "pack_linear");
    define<LinearArgs, &LinearArgs::x, &LinearArgs::x_stride, &LinearArgs::x_is_paired, &LinearArgs::rows,
           &LinearArgs::matrix, &LinearArgs::out, &LinearArgs::out_stride, &LinearArgs::out_dtype,
           &LinearArgs::epilogue, &LinearArgs::scale, &LinearArgs::activation, &LinearArgs::slots,
           &LinearArgs::num_slots, &LinearArgs::factors, &LinearArgs::shrunk, &LinearArgs::shrunk_stride,
           &LinearArgs::factor_dtype>(m, "linear");
    using K = ShrinkArgs;
    define<K, &K::x, &K::x_stride, &K::x_dtype, &K::rows, &K::slots, &K::num_slots, &K::factors, &K::out,
           &K::out_stride, &K::scratch, &K::k, &K::dtype>(m, "shrink");
    define<EmbeddingArgs, &EmbeddingArgs::token_ids, &EmbeddingArgs::rows, &EmbeddingArgs::matrix, &EmbeddingArgs::out,
           &EmbeddingArgs::out_dtype, &EmbeddingArgs::scale, &EmbeddingArgs::slots, &EmbeddingArgs::num_slots,
           &EmbeddingArgs::factors, &EmbeddingArgs::factor_dtype>(m, "embedding");
    define<TakeRowsArgs, &TakeRowsArgs::x, &TakeRowsArgs::x_rows, &TakeRowsArgs::row_bytes,
           &TakeRowsArgs::x_stride_bytes, &TakeRowsArgs::indices, &TakeRowsArgs::rows, &TakeRowsArgs::out>(m,
                                                                                                           "take_rows");
    using P = ReplaceRowsArgs;
    define<P, &P::replacements, &P::num_replacements, &P::width, &P::indices, &P::rows, &P::out, &P::out_stride,
           &P::out_dtype, &P::adds>(m, "replace_rows");
    define<PoolArgs, &PoolArgs::x, &PoolArgs::x_rows, &PoolArgs::x_stride, &PoolArgs::starts, &PoolArgs::ends,
           &PoolArgs::rows, &PoolArgs::width, &PoolArgs::dtype, &PoolArgs::out, &PoolArgs::out_dtype, &PoolArgs::kind>(
        m, "pool");
    define<NormArgs, &NormArgs::x, &NormArgs::weight, &NormArgs::bias, &NormArgs::out, &NormArgs::rows,
           &NormArgs::inner, &NormArgs::hidden, &NormArgs::x_stride, &NormArgs::x_inner_stride, &NormArgs::eps,
           &NormArgs::dtype, &NormArgs::weight_dtype, &NormArgs::out_dtype, &NormArgs::centered,
           &NormArgs::weight_stride>(m, "norm");
    define<ActivationArgs, &ActivationArgs::x, &ActivationArgs::x_stride, &ActivationArgs::rows, &ActivationArgs::width,
           &ActivationArgs::dtype, &ActivationArgs::out, &ActivationArgs::out_dtype, &ActivationArgs::kind,
           &ActivationArgs::parameter0, &ActivationArgs::parameter1, &ActivationArgs::parameter2,
           &ActivationArgs::parameter3, &ActivationArgs::order>(m, "activation");
    define<AddArgs, &AddArgs::x, &AddArgs::x_stride, &AddArgs::dtype, &AddArgs::out, &AddArgs::out_stride,
           &AddArgs::out_dtype, &AddArgs::rows, &AddArgs::width, &AddArgs::scale>(m, "add");
    define<AddArgs, &AddArgs::x, &AddArgs::x_stride, &AddArgs::dtype, &AddArgs::out, &AddArgs::out_stride,
           &AddArgs::out_dtype, &AddArgs::rows, &AddArgs::width, &AddArgs::ids, &AddArgs::weights, &AddArgs::top_k,
           &AddArgs::first_id>(m, "add_chosen");
    define<R, &R::query, &R::query_stride, &R::key, &R::key_stride, &R::value, &R::value_stride, &R::positions,
           &R::cos_sin, &R::max_positions, &R::rotary_size, &R::key_cache, &R::value_cache, &R::num_slots, &R::slots,
           &R::rows, &R::query_heads, &R::kv_heads, &R::head_size, &R::key_size, &R::value_size, &R::block_size,
           &R::dtype, &R::cache_dtype, &R::query_scales, &R::axes, &R::positions_stride, &R::index_key,
           &R::index_stride, &R::index_size>(m, "rotary_and_cache");
    define<A, &A::query, &A::rows, &A::query_stride, &A::key_cache, &A::value_cache, &A::block_tables, &A::table_stride,
           &A::max_blocks, &A::query_start, &A::seq_lens, &A::num_seqs, &A::query_heads, &A::kv_heads, &A::head_size,
           &A::block_size, &A::window, &A::scale, &A::dtype, &A::cache_dtype, &A::out, &A::softcap, &A::slopes,
           &A::sinks, &A::bidirectional, &A::biases, &A::bias_reach, &A::key_ends, &A::value_size>(m,
                                                                                                   "paged_attention");
    define<A, &A::query, &A::rows, &A::query_stride, &A::rotated_query, &A::rotated_stride, &A::rotated_head_stride,
           &A::rotated_size, &A::key_cache, &A::value_cache, &A::block_tables, &A::table_stride, &A::max_blocks,
           &A::query_start, &A::seq_lens, &A::num_seqs, &A::query_heads, &A::kv_heads, &A::head_size, &A::block_size,
           &A::scale, &A::dtype, &A::cache_dtype, &A::out, &A::value_size, &A::index_size, &A::chosen, &A::num_chosen>(
        m, "latent_attention");
    using H = ChooseArgs;
    define<H, &H::query, &H::query_stride, &H::weights, &H::weights_stride, &H::rows, &H::key_cache, &H::block_tables,
           &H::table_stride, &H::max_blocks, &H::query_start, &H::seq_lens, &H::num_seqs, &H::heads, &H::size,
           &H::key_size, &H::block_size, &H::num_chosen, &H::dtype, &H::chosen, &H::scratch, &H::scratch_rows,
           &H::merges>(m, "choose_keys");
    define<ArgmaxArgs, &ArgmaxArgs::x, &ArgmaxArgs::stride, &ArgmaxArgs::rows, &ArgmaxArgs::width, &ArgmaxArgs::out>(
        m, "argmax");
    define<SampleArgs, &SampleArgs::logits, &SampleArgs::stride, &SampleArgs::rows, &SampleArgs::width,
           &SampleArgs::temperature, &SampleArgs::top_k, &SampleArgs::top_p, &SampleArgs::min_p, &SampleArgs::uniforms,
           &SampleArgs::out>(m, "sample");
    define<MaskArgs, &MaskArgs::logits, &MaskArgs::stride, &MaskArgs::rows, &MaskArgs::width, &MaskArgs::words,
           &MaskArgs::words_stride, &MaskArgs::num_words, &MaskArgs::samples, &MaskArgs::masks>(m, "mask_tokens");
    define<LogSumArgs, &LogSumArgs::logits, &LogSumArgs::stride, &LogSumArgs::rows, &LogSumArgs::width,
           &LogSumArgs::samples, &LogSumArgs::temperatures, &LogSumArgs::num_samples, &LogSumArgs::out>(m, "log_sums");
    define<RankArgs, &RankArgs::logits, &RankArgs::stride, &RankArgs::rows, &RankArgs::width, &RankArgs::samples,
           &RankArgs::num_samples, &RankArgs::tokens, &RankArgs::ranks, &RankArgs::count, &RankArgs::top,
           &RankArgs::top_values>(m, "rank");
    define<T, &T::logits, &T::stride, &T::rows, &T::bias, &T::scales, &T::ids, &T::weights, &T::num_experts, &T::top_k,
           &T::scoring, &T::bias_logits, &T::num_groups, &T::kept_groups, &T::group_by_two, &T::normalize, &T::scale,
           &T::softcap, &T::jitter>(m, "route");
    using E = ExpertsArgs;
    define<E, &E::x, &E::x_stride, &E::x_dtype, &E::rows, &E::ids, &E::weights, &E::up, &E::down, &E::num_experts,
           &E::first_expert, &E::out, &E::top_k, &E::scale_inputs, &E::activation, &E::slope, &E::limit, &E::slots,
           &E::num_slots, &E::up_factors, &E::down_factors, &E::up_width, &E::down_width, &E::factor_dtype,
           &E::segments>(m, "experts");
    using L = HeadLinearArgs;
    define<L, &L::x, &L::x_stride, &L::x_head_stride, &L::x_bytes, &L::rows, &L::matrices, &L::heads, &L::out,
           &L::out_stride, &L::out_head_stride, &L::out_dtype>(m, "linear_by_head");
    using X = ExchangeArgs;
    define<X, &X::group, &X::x, &X::x_stride, &X::rows, &X::x_width, &X::begin, &X::out, &X::width, &X::sums, &X::bias>(
        m, "exchange");
    define<M, &M::x, &M::x_stride, &M::y, &M::y_stride, &M::rows, &M::width, &M::dtype, &M::out, &M::out_dtype,
           &M::kind, &M::shared>(m, "multiply");
    define<C, &C::states, &C::state_stride, &C::num_blocks, &C::slots, &C::query_start, &C::seq_lens, &C::num_seqs,
           &C::rows, &C::dtype, &C::out, &C::x, &C::x_stride, &C::weight, &C::bias, &C::width, &C::kernel, &C::kind>(
        m, "causal_conv");
    define<S, &S::states, &S::state_stride, &S::num_blocks, &S::slots, &S::query_start, &S::seq_lens, &S::num_seqs,
           &S::rows, &S::dtype, &S::out, &S::x, &S::x_stride, &S::time, &S::time_stride, &S::b, &S::b_stride, &S::c,
           &S::c_stride, &S::a, &S::wide, &S::d, &S::time_bias, &S::time_min, &S::time_max, &S::channels, &S::head_size,
           &S::groups, &S::state_size>(m, "selective_scan");
    define<D, &D::states, &D::state_stride, &D::num_blocks, &D::slots, &D::query_start, &D::seq_lens, &D::num_seqs,
           &D::rows, &D::dtype, &D::out, &D::query, &D::query_stride, &D::key, &D::key_stride, &D::value,
           &D::value_stride, &D::decay, &D::decay_stride, &D::beta, &D::beta_stride, &D::a, &D::decay_bias,
           &D::beta_scale, &D::key_heads, &D::value_heads, &D::key_size, &D::value_size, &D::by_element, &D::lowest,
           &D::alternates>(m, "gated_delta");
    define<G, &G::states, &G::state_stride, &G::num_blocks, &G::slots, &G::query_start, &G::seq_lens, &G::num_seqs,
           &G::rows, &G::dtype, &G::out, &G::x, &G::x_stride, &G::input, &G::input_stride, &G::decay, &G::decay_stride,
           &G::a, &G::input_bias, &G::decay_bias, &G::width>(m, "gated_recurrence");
    define<PackPartArgs, &PackPartArgs::to, &PackPartArgs::first_row, &PackPartArgs::source,
           &PackPartArgs::source_format, &PackPartArgs::stride, &PackPartArgs::rows>(m, "pack_part");
    define<PW, &PW::to, &PW::first_row, &PW::words, &PW::output_stride, &PW::word_stride, &PW::rows, &PW::bits,
           &PW::by_outputs, &PW::scales, &PW::minima, &PW::shifts, &PW::group, &PW::order>(m, "pack_words");
}

void pack_factor_rows(Address source, int64_t stride, int64_t rows, int64_t columns, Address places, Address out,
                      int64_t lanes, int32_t dtype) {
    octavo::pack_factor_rows(
        {at<float>(source), stride, rows, columns, at<int64_t>(places), at<uint32_t>(out), lanes, dtype});
}

float max_scale(Address source, int32_t source_format, int64_t stride, int64_t rows, int64_t k) {
    std::vector<float> largest(static_cast<size_t>((rows + octavo::kPanel - 1) / octavo::kPanel));
    octavo::MaxScaleArgs args{at<uint8_t>(source), stride, rows, k, source_format, largest.data()};
    call(octavo::plan(args));
    return largest.empty() ? 0.0f : *std::max_element(largest.begin(), largest.end());
}

nb::dict numbered(const std::vector<const char*>& names) {
    nb::dict numbers;
    for (size_t i = 0; i < names.size(); ++i) numbers[names[i]] = i;
    return numbers;
}

}  // namespace

NB_MODULE(_cpu, m) {
    numpy_array = reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").ptr());
    m.doc() = "Octavo's native CPU kernels over raw addresses; octavo.ops.cpu is the interface for arrays.";
    m.attr("F32") = static_cast<int>(octavo::kF32);
    m.attr("BF16") = static_cast<int>(octavo::kBF16);
    m.attr("Q8") = static_cast<int>(octavo::kQ8);
    m.attr("Q16") = static_cast<int>(octavo::kQ16);
    m.attr("INT8") = static_cast<int>(octavo::kInt8);
    m.attr("FLOAT8_E4M3") = static_cast<int>(octavo::kFloat8E4M3);
    m.attr("FLOAT8_E5M2") = static_cast<int>(octavo::kFloat8E5M2);
    m.attr("ROWS_F32") = static_cast<int>(octavo::kRowsF32);
    m.attr("ROWS_BF16") = static_cast<int>(octavo::kRowsBF16);
    m.attr("WEIGHT_F32") = static_cast<int>(octavo::kWeightF32);
    m.attr("WEIGHT_BF16") = static_cast<int>(octavo::kWeightBF16);
    m.attr("WEIGHT_INT4") = static_cast<int>(octavo::kWeightInt4);
    m.attr("WEIGHT_INT8") = static_cast<int>(octavo::kWeightInt8);
    m.attr("WEIGHT_TABLE") = static_cast<int>(octavo::kWeightTable);
    m.attr("WEIGHT_POWERS") = static_cast<int>(octavo::kWeightPowers);
    m.attr("WEIGHT_IQ4_XS") = static_cast<int>(octavo::kWeightIQ4XS);
    m.attr("WEIGHT_Q4_K") = static_cast<int>(octavo::kWeightQ4K);
    m.attr("WEIGHT_Q6_K") = static_cast<int>(octavo::kWeightQ6K);
    m.attr("WEIGHT_Q5_K") = static_cast<int>(octavo::kWeightQ5K);
    m.attr("WEIGHT_Q3_K") = static_cast<int>(octavo::kWeightQ3K);
    m.attr("WEIGHT_Q2_K") = static_cast<int>(octavo::kWeightQ2K);
    m.attr("STORE") = static_cast<int>(octavo::kStore);
    m.attr("ADD") = static_cast<int>(octavo::kAdd);
    m.attr("GATED") = static_cast<int>(octavo::kGated);
    m.attr("ACTIVATED") = static_cast<int>(octavo::kActivated);
    m.attr("ACTIVATIONS") = numbered({"silu", "gelu", "gelu_tanh", "relu", "relu2", "identity", "xielu", "softcap",
                                      "clip", "clamped", "sigmoid", "softplus"});
    m.attr("POOLINGS") = numbered({"mean", "max", "mean_sqrt", "weighted_mean"});
    m.attr("SCORINGS") = numbered({"softmax", "sigmoid", "sparsemixer"});
    m.attr("STATE_TILE") = octavo::kStateTile;
    m.attr("MAX_STATE_SIZE") = octavo::kMaxStateSize;
    m.attr("MAX_CONV_KERNEL") = octavo::kMaxConvKernel;
    m.attr("MAX_EXPERTS") = octavo::kMaxExperts;
    m.attr("PANEL") = octavo::kPanel;
    m.attr("FACTOR_PANEL") = octavo::kFactorPanel;
    m.attr("MAX_RANK") = octavo::kMaxRank;
    m.attr("QBLOCK") = octavo::kQBlock;
    m.attr("MAX_SEGMENTS") = octavo::kMaxSegments;
    m.attr("QBLOCK_BYTES") = sizeof(octavo::QBlock);
    m.attr("KEY_TILE") = octavo::kKeyTile;
    m.attr("POSITION_AXES") = octavo::kPositionAxes;
    m.attr("VALUE_PAD") = octavo::kValuePad;
    m.attr("MAX_HEAD_SIZE") = octavo::kMaxHeadSize;
    m.attr("MAX_ROTATED_SIZE") = octavo::kMaxRotatedSize;
    m.attr("MAX_CHOSEN") = octavo::kMaxChosen;
    m.def("available_isas", &octavo::available_isas);
    m.def("isa", [] { return std::string(octavo::kernels().name); });
    m.def("set_isa", &octavo::set_isa);
    m.def("default_placement", [] {
        const octavo::Placement placement = octavo::default_placement();
        return std::make_pair(placement.threads, placement.cpus);
    });
    m.def("place_threads", [](const octavo::CoresByNode& nodes, double quota) {
        const octavo::Placement placement = octavo::place_threads(nodes, quota);
        return std::make_pair(placement.threads, placement.cpus);
    });
    m.def("victim", &octavo::victim);
    m.def("bind_thread", &octavo::bind_thread);
    m.def("num_threads", &octavo::num_threads);
    m.def("nodes_of_threads", &octavo::nodes_of_threads);
    m.def(
        "place_pages",
        [](Address memory, size_t bytes, size_t page_bytes, const std::vector<int>& nodes, bool in_shares) {
            return octavo::place_pages(at<void>(memory), bytes, page_bytes, nodes, in_shares);
        },
        nb::kw_only(), "memory"_a, "bytes"_a, "page_bytes"_a, "nodes"_a, "in_shares"_a);
    m.def("set_threads", &octavo::set_threads, nb::arg("n"), nb::arg("cpus") = std::vector<int>{},
          nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Program>(m, "Program", "Recorded calls; octavo.ops.cpu_program is the interface.")
        .def(nb::init<>())
        .def("__len__", &Program::size)
        .def("record", &Program::record)
        .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
        .def("profile", &Program::profile);
    m.def("stop_recording", &Program::stop_recording);
    nb::class_<octavo::Group>(m, "Group",
                              "Of processes that exchange rows; octavo.ops.cpu_collectives is the interface.")
        .def("__init__", &make_group)
        .def("is_broken", &octavo::Group::is_broken);
    // Returns the Python object of the program that is being recorded, or None.
    m.def("recording", &Program::recording, nb::rv_policy::reference);
    m.def("advise_huge_pages", &advise_huge_pages);
    nb::class_<octavo::Matrix>(m, "Matrix")
        .def("__init__", &make_matrix, "data"_a, "bias"_a, "n"_a, "k"_a, "factor"_a, "format"_a, "group"_a, "minima"_a,
             "gated"_a, "table"_a = nb::bytes("", 0))
        .def_prop_ro("block", &block_of)
        .def_prop_rw("segments", [](const octavo::Matrix& self) { return self.segments; }, &set_segments);
    nb::class_<Matrices>(m, "Matrices").def("__init__", &make_matrices);
    define_operations(m);
    m.attr("SOURCE_FORMATS") = numbered(octavo::source_formats());
    m.def("packed_bytes", &octavo::packed_bytes);
    m.def("shrink_scratch_rows", &octavo::shrink_scratch_rows);
    m.def("choose_scratch_rows", &octavo::choose_scratch_rows);
    m.def("max_scale", &max_scale);
    m.def("pack_factor_rows", &pack_factor_rows, nb::kw_only(), "source"_a, "stride"_a, "rows"_a, "columns"_a,
          "places"_a, "out"_a, "lanes"_a, "dtype"_a, nb::call_guard<nb::gil_scoped_release>());
}
