#include "pack_int.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "int_sources.h"
#include "pack.h"

namespace octavo {

namespace {

// 32 outputs by 64 elements, before they are laid out.
struct PanelBlock {
    alignas(64) uint8_t codes[kPanel][kQBlock];
    uint16_t scales[kScales][kPanel];
    uint16_t minima[kPanel][kMinima];
};

// One row's share of a block.
template <class Source>
void read_row(const Matrix& to, const uint8_t* row, int64_t block, int lane, PanelBlock& out) {
    const int valid = static_cast<int>(std::min<int64_t>(to.k - block * kQBlock, kQBlock));
    const int zero = to.format == kWeightInt4 ? 8 : 128;
    const float inverse = 1 / to.factor;
    float scales[kScales] = {}, minima[kMinima] = {}, rounded[kScales];
    Source::read_scales(row, block, valid, scales, minima);
    for (int i = 0; i < kScales; ++i) {
        out.scales[i][lane] = float_to_half(scales[i] * inverse);
        rounded[i] = half_to_float(out.scales[i][lane]) * to.factor;
    }
    uint8_t* codes = out.codes[lane];
    Source::read_codes(row, block, valid, rounded, codes);
    for (int i = 0; i < kMinima; ++i) {
        const float scale = scales[2 * i];
        int shift = Source::kZero;  // from the source's codes, whose zero is here, to codes whose zero is `zero`
        float minimum = 0;
        if (Source::kHasMinima) {
            if (to.format == kWeightInt4 || Source::kBits == 8) {
                shift = zero;
            } else {
                // Eight bits have room to shift the codes so that hardly any minimum remains to be rounded.
                const float steps = -minima[i] / scale;
                shift = steps > -96 ? (steps < 128 ? static_cast<int>(std::lrintf(steps)) : 128) : -96;
                if (scale == 0 || !(std::fabs(steps) < 0x1p30f)) shift = 0;
            }
            minimum = minima[i] + static_cast<float>(shift) * scale;
        }
        out.minima[lane][i] = float_to_bf16(minimum * inverse);
        if (32 * i >= valid) {
            std::memset(codes + 32 * i, zero, 32);
        } else if (shift != zero) {
            for (int e = 0; e < 32; ++e) codes[32 * i + e] = static_cast<uint8_t>(codes[32 * i + e] + zero - shift);
        }
    }
}

// Lays lanes [begin, end) out; the others keep what they have.
void write_block(const Matrix& to, const PanelBlock& block, int begin, int end, uint8_t* out) {
    for (int step = 0; step < kQBlock / 4; ++step) {
        if (to.format == kWeightInt4 && step % 2) continue;
        for (int lane = begin; lane < end; ++lane) {
            const uint8_t* codes = block.codes[lane] + 4 * step;
            uint32_t word = load<uint32_t>(codes);
            if (to.format == kWeightInt4) word |= load<uint32_t>(codes + 4) << 4;
            std::memcpy(out + 4 * lane, &word, 4);
        }
        out += 4 * kPanel;
    }
    const size_t lanes = static_cast<size_t>(end - begin);
    for (int group = 0; group < kQBlock / to.group; ++group) {
        std::memcpy(out + 2 * begin, block.scales[group * to.group / 16] + begin, 2 * lanes);
        out += 2 * kPanel;
    }
    if (to.minima) std::memcpy(out + 4 * begin, block.minima[begin], 4 * lanes);
}

}  // namespace

int64_t packed_block_bytes(const Matrix& matrix) {
    if (matrix.format == kWeightQ4K) return kQ4KBlock;
    if (matrix.format == kWeightQ5K) return kQ5KBlock;
    if (matrix.format == kWeightQ6K) return kQ6KSuper / kBlocksOfSuper;
    if (matrix.format == kWeightQ3K) return kQ3KSuper / kBlocksOfSuper;
    if (matrix.format == kWeightQ2K) return kQ2KSuper / kBlocksOfSuper;
    const int64_t codes = matrix.format == kWeightInt4 ? kQBlock / 2 : kQBlock;
    return kPanel * (codes + kQBlock / matrix.group * 2 + (matrix.minima ? kMinima * 2 : 0));
}

namespace {

// Rows of a superblock that are `stride` bytes apart into lanes [begin, end).
template <class Source>
void keep_superblock(const uint8_t* rows, int64_t stride, int begin, int end, uint8_t* out) {
    uint32_t words[kPanel][Source::kWords];
    for (int lane = begin; lane < end; ++lane) {
        const uint8_t* row = rows + (lane - begin) * stride;
        // What follows: so many rows at a time are more than a processor fetches ahead by itself.
        for (int at = 0; at < Source::kBytes; at += 64) __builtin_prefetch(row + Source::kBytes + at);
        Source::gather(row, words[lane]);
    }
    uint8_t* to = out + Source::kWordsAt;
    if (end - begin == kPanel) {
        transpose_panel(reinterpret_cast<const char*>(words), sizeof(words[0]), Source::kWords,
                        reinterpret_cast<char*>(to));
    } else {
        for (int lane = begin; lane < end; ++lane) {
            for (int i = 0; i < Source::kWords; ++i) {
                if (i != Source::kGap) std::memcpy(to + (i * kPanel + lane) * 4, &words[lane][i], 4);
            }
        }
    }
    for (int lane = begin; lane < end; ++lane) Source::keep(rows + (lane - begin) * stride, lane, out);
}

template <class Source>
void pack_part_panel(const void* args, int64_t task) {
    const PackPartArgs& a = *static_cast<const PackPartArgs*>(args);
    const int64_t panel = a.to.gated ? 2 * task + a.first_row : a.first_row / kPanel + task;
    // The first row of the source that lies in the panel, and its lane.
    const int64_t row = a.to.gated ? task * kPanel : std::max<int64_t>(panel * kPanel - a.first_row, 0);
    const int begin = a.to.gated ? 0 : static_cast<int>(a.first_row + row - panel * kPanel);
    const int end = static_cast<int>(std::min<int64_t>(begin + a.rows - row, kPanel));
    const int64_t blocks = (a.to.k + kQBlock - 1) / kQBlock, block_bytes = packed_block_bytes(a.to);
    uint8_t* out = static_cast<uint8_t*>(const_cast<void*>(a.to.data)) + panel * blocks * block_bytes;
    if constexpr (Source::kKept != kNotKept) {
        if (a.to.format == Source::kKept) {
            const int64_t super_bytes = kBlocksOfSuper * block_bytes;
            const uint8_t* source = a.source + row * a.stride;
            for (int64_t super = 0; super < blocks / kBlocksOfSuper; ++super, out += super_bytes) {
                keep_superblock<Source>(source + super * Source::kBytes, a.stride, begin, end, out);
            }
            return;
        }
    }
    PanelBlock gathered;
    for (int64_t block = 0; block < blocks; ++block) {
        for (int lane = begin; lane < end; ++lane) {
            read_row<Source>(a.to, a.source + (row + lane - begin) * a.stride, block, lane, gathered);
        }
        write_block(a.to, gathered, begin, end, out + block * block_bytes);
    }
}

// How far ahead scales alone are fetched, which lie apart.
constexpr int kSupersAhead = 16;

template <class Source>
void find_max_scale(const void* args, int64_t task) {
    const MaxScaleArgs& a = *static_cast<const MaxScaleArgs*>(args);
    float largest = 0;
    const auto meet = [&](float magnitude) {
        if (magnitude > largest && magnitude <= 0x1.fffffep127f) largest = magnitude;
    };
    for (int64_t row = task * kPanel; row < std::min((task + 1) * kPanel, a.rows); ++row) {
        if constexpr (Source::kKept != kNotKept) {
            const uint8_t* from = a.source + row * a.stride;
            for (int64_t k = 0; k < a.k; k += kSuperblock, from += Source::kBytes) {
                __builtin_prefetch(from + kSupersAhead * Source::kBytes + Source::kScalesAt);
                meet(Source::largest_scale(from));
            }
            continue;
        }
        for (int64_t block = 0; block * kQBlock < a.k; ++block) {
            float scales[kScales] = {}, minima[kMinima] = {};
            const int valid = static_cast<int>(std::min<int64_t>(a.k - block * kQBlock, kQBlock));
            Source::read_scales(a.source + row * a.stride, block, valid, scales, minima);
            for (const float scale : scales) meet(std::fabs(scale));
        }
    }
    a.largest[task] = largest;
}

// What is known of a source format.
struct Source {
    const char* name;
    Kernel pack, max_scale;
    int bits, group, elements, bytes;
    bool minima;
    int32_t kept;
};

template <class S>
constexpr Source source_of(const char* name, int group) {
    return {name,         pack_part_panel<S>, find_max_scale<S>, S::kBits, group,
            S::kElements, S::kBytes,          S::kHasMinima,     S::kKept};
}

constexpr Source kSources[] = {
    source_of<Floats<F32Element>>("F32", 32),
    source_of<Floats<F16Element>>("F16", 32),
    source_of<Floats<BF16Element>>("BF16", 32),
    source_of<Q4_0>("Q4_0", 32),
    source_of<Q4_1>("Q4_1", 32),
    source_of<Q5_0>("Q5_0", 32),
    source_of<Q5_1>("Q5_1", 32),
    source_of<Q8_0>("Q8_0", 32),
    source_of<Q4_K>("Q4_K", 32),
    source_of<Q5_K>("Q5_K", 32),
    source_of<Q6_K>("Q6_K", 16),
    source_of<Q3_K>("Q3_K", 16),
    source_of<Q2_K>("Q2_K", 16),
    source_of<Floats<F32Element, 4>>("F32 4", 32),
    source_of<Floats<F16Element, 4>>("F16 4", 32),
    source_of<Floats<BF16Element, 4>>("BF16 4", 32),
    source_of<Codes<4, false>>("CODES4", 32),
    source_of<Codes<4, true>>("CODES4 MINIMA", 32),
    source_of<Codes<8, false>>("CODES8", 32),
    source_of<Codes<8, true>>("CODES8 MINIMA", 32),
    source_of<Codes<8, false>>("CODES8 BY 16", 16),
};

// Checks that rows of k elements can be of the format and `stride` bytes apart.
const Source& checked_source(int32_t format, int64_t k, int64_t stride) {
    if (format < 0 || format >= static_cast<int32_t>(std::size(kSources))) {
        throw std::invalid_argument("there is no source format " + std::to_string(format) + ".");
    }
    const Source& source = kSources[format];
    if (k <= 0 || k % source.elements != 0 || stride < k / source.elements * source.bytes) {
        throw std::invalid_argument(std::string(source.name) + " rows of " + std::to_string(k) +
                                    " elements do not fit into " + std::to_string(stride) + " bytes.");
    }
    return source;
}

}  // namespace

std::vector<const char*> source_formats() {
    std::vector<const char*> names;
    for (const Source& source : kSources) names.push_back(source.name);
    return names;
}

int64_t packed_bytes(const Matrix& matrix) {
    const int64_t sides = matrix.gated ? 2 : 1;
    const int64_t panels = sides * ((matrix.n / sides + kPanel - 1) / kPanel);
    return panels * ((matrix.k + kQBlock - 1) / kQBlock) * packed_block_bytes(matrix);
}

Launch plan(PackPartArgs& args, const KernelTable&, int) {
    const Source& source = checked_source(args.source_format, args.to.k, args.stride);
    const int bits = args.to.format == kWeightInt4 ? 4 : args.to.format == kWeightInt8 ? 8 : 0;
    if (args.to.format > kWeightInt8 && args.to.format != source.kept) {
        throw std::invalid_argument(std::string(source.name) + " does not fit into the superblocks of another format.");
    }
    if (args.to.format != source.kept &&
        (bits < source.bits || args.to.group > source.group || (args.to.group != 16 && args.to.group != 32) ||
         (source.minima && !args.to.minima))) {
        throw std::invalid_argument(std::string(source.name) + " does not fit into " + std::to_string(bits) +
                                    " bits, groups of " + std::to_string(args.to.group) + " and " +
                                    (args.to.minima ? "minima." : "no minima."));
    }
    const int64_t outputs = args.to.gated ? args.to.n / 2 : args.to.n;
    const int64_t end = args.to.gated ? args.rows : args.first_row + args.rows;
    if (args.rows < 0 || args.first_row < 0 || (args.to.gated && args.first_row > 1) || end > outputs) {
        throw std::invalid_argument("rows " + std::to_string(args.first_row) + " to " + std::to_string(end) +
                                    " are not in a matrix of " + std::to_string(outputs) + ".");
    }
    const int64_t first = args.to.gated ? 0 : args.first_row / kPanel;
    const int64_t tasks = args.rows ? (end + kPanel - 1) / kPanel - first : 0;
    return {source.pack, &args, tasks, static_cast<double>(args.rows * args.to.k)};
}

Launch plan(MaxScaleArgs& args) {
    const Source& source = checked_source(args.source_format, args.k, args.stride);
    return {source.max_scale, &args, (args.rows + kPanel - 1) / kPanel, static_cast<double>(args.rows * args.k) / 4};
}

}  // namespace octavo
