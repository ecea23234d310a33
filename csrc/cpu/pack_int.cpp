#include "pack_int.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "gguf_pack_sources.h"
#include "pack.h"
#include "pack_words.h"

namespace octavo {

namespace {

// 32 outputs by 64 elements, before they are laid out: a code a byte.
struct PanelBlock {
    alignas(64) uint8_t codes[kPanel][kQBlock];
    uint16_t scales[kScales][kPanel];
    uint16_t minima[kPanel][kMinima];
};

// Reads one row of a block into lane `lane`. Rounds its scales and minima, and shifts its codes to the zero of the
// matrix.
template <class Source>
void read_row(const Matrix& to, const uint8_t* row, int64_t block, int lane, PanelBlock& out) {
    const int valid = static_cast<int>(std::min<int64_t>(to.k - block * kQBlock, kQBlock));
    const int zero = to.format == kWeightInt8 ? 128 : 8;
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
        int shift = Source::kZero;  // the source's zero; codes get `zero` instead
        float minimum = 0;
        if (Source::kHasMinima) {
            if (to.format != kWeightInt8 || Source::kBits == 8) {
                shift = zero;
            } else {
                // Codes of eight bits have room to be shifted so that hardly any minimum remains to be rounded.
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

// Writes the scales of `lanes` outputs of a group, from lane `begin` on. Returns the place of the next group's.
uint8_t* write_scales(const Matrix& to, const uint16_t* halves, int begin, size_t lanes, uint8_t* out) {
    if (to.format != kWeightPowers) {
        std::memcpy(out + 2 * begin, halves, 2 * lanes);
        return out + 2 * kPanel;
    }
    for (size_t i = 0; i < lanes; ++i) {
        out[static_cast<size_t>(begin) + i] = static_cast<uint8_t>(bits_of(half_to_float(halves[i])) >> 23);
    }
    return out + kPanel;
}

// Lays lanes [begin, end) out as int_layouts.h draws them. Other lanes keep what they have.
void write_block(const Matrix& to, const PanelBlock& block, int begin, int end, uint8_t* out) {
    for (int step = 0; step < kQBlock / 4; ++step) {
        if (to.format != kWeightInt8 && step % 2) continue;
        for (int lane = begin; lane < end; ++lane) {
            const uint8_t* codes = block.codes[lane] + 4 * step;
            uint32_t word = load<uint32_t>(codes);
            // Low halves are elements 4 * step to 4 * step + 3, high halves the four that follow.
            if (to.format != kWeightInt8) word |= load<uint32_t>(codes + 4) << 4;
            std::memcpy(out + 4 * lane, &word, 4);
        }
        out += 4 * kPanel;
    }
    const size_t lanes = static_cast<size_t>(end - begin);
    for (int group = 0; group < kQBlock / to.group; ++group) {
        out = write_scales(to, block.scales[group * to.group / 16] + begin, begin, lanes, out);
    }
    if (to.minima) std::memcpy(out + 4 * begin, block.minima[begin], 4 * lanes);
}

}  // namespace

int64_t packed_block_bytes(const Matrix& matrix) {
    if (matrix.format == kWeightQ4K) return kQ4KBlock;
    if (matrix.format == kWeightQ5K) return kQ5KBlock;
    if (matrix.format == kWeightQ6K) return kQ6KSuper / kBlocksPerSuperblock;
    if (matrix.format == kWeightQ3K) return kQ3KSuper / kBlocksPerSuperblock;
    if (matrix.format == kWeightQ2K) return kQ2KSuper / kBlocksPerSuperblock;
    if (matrix.format == kWeightIQ4XS || matrix.format == kWeightPowers) return kTableAndBytesBlock;
    const int64_t codes = matrix.format == kWeightInt8 ? kQBlock : kQBlock / 2;
    return kPanel * (codes + kQBlock / matrix.group * 2 + (matrix.minima ? kMinima * 2 : 0));
}

namespace {

// Packs a superblock's rows, which are `stride` bytes apart, into lanes [begin, end) of a layout that keeps
// superblocks.
template <class Source>
void keep_superblock(const uint8_t* rows, int64_t stride, int begin, int end, uint8_t* out) {
    uint32_t words[kPanel][Source::kWords];
    for (int lane = begin; lane < end; ++lane) {
        const uint8_t* row = rows + (lane - begin) * stride;
        // Fetches the next superblock: a processor does not fetch so many rows at a time by itself.
        for (int at = 0; at < Source::kBytes; at += 64) __builtin_prefetch(row + Source::kBytes + at);
        Source::gather(row, words[lane]);
    }
    constexpr int kPartWords = Source::kWords / Source::kParts;
    for (int part = 0; part < Source::kParts; ++part) {
        uint8_t* to = out + Source::kWordsAt + part * Source::kPartBytes;
        const int first = part * kPartWords;
        if (end - begin == kPanel) {
            transpose_panel(reinterpret_cast<const char*>(words[0] + first), sizeof(words[0]), kPartWords,
                            reinterpret_cast<char*>(to));
            continue;
        }
        for (int lane = begin; lane < end; ++lane) {
            for (int i = 0; i < kPartWords; ++i) {
                if (i != Source::kGap) std::memcpy(to + (i * kPanel + lane) * 4, &words[lane][first + i], 4);
            }
        }
    }
    for (int lane = begin; lane < end; ++lane) Source::keep(rows + (lane - begin) * stride, lane, out);
}

// A part's share of a panel, the i-th of the panels that it has outputs in: its rows from `row` on are lanes [begin,
// end).
struct PanelShare {
    int64_t row;
    int begin, end;
    uint8_t* out;

    PanelShare(const Matrix& to, int64_t first_row, int64_t rows, int64_t i) {
        const int64_t panel = to.gated ? 2 * i + first_row : first_row / kPanel + i;
        row = to.gated ? i * kPanel : std::max<int64_t>(panel * kPanel - first_row, 0);
        begin = to.gated ? 0 : static_cast<int>(first_row + row - panel * kPanel);
        end = static_cast<int>(std::min<int64_t>(begin + rows - row, kPanel));
        const int64_t blocks = (to.k + kQBlock - 1) / kQBlock;
        out = static_cast<uint8_t*>(const_cast<void*>(to.data)) + panel * blocks * packed_block_bytes(to);
    }
};

template <class Source>
void pack_part_panel(const void* args, int64_t task) {
    const PackPartArgs& a = *static_cast<const PackPartArgs*>(args);
    auto [row, begin, end, out] = PanelShare(a.to, a.first_row, a.rows, task);
    const int64_t blocks = (a.to.k + kQBlock - 1) / kQBlock, block_bytes = packed_block_bytes(a.to);
    if constexpr (Source::kKept != kNotKept) {
        if (a.to.format == Source::kKept) {
            const int64_t super_bytes = kBlocksPerSuperblock * block_bytes;
            const uint8_t* source = a.source + row * a.stride;
            for (int64_t super = 0; super < blocks / kBlocksPerSuperblock; ++super, out += super_bytes) {
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

// Writes a block of one panel's share. `words` [word][pitch] and the two groups of 32 elements have the share's outputs
// from `first` on.
template <int kBits>
void write_words(const PackWordsArgs& a, int64_t valid, const uint32_t* words, int64_t pitch, const LaneGroup* groups,
                 int first, const PanelShare& share, uint8_t* out) {
    const int lanes = share.end - share.begin;
    const size_t bytes = static_cast<size_t>(lanes) * 4;
    out += 4 * share.begin;
    for (int i = 0; i < kWordsOfBlock<kBits>; ++i, out += 4 * kPanel) {
        const int half = i * kPerWord<kBits> / 32;
        uint32_t codes[kPanel];
        if (i * kPerWord<kBits> >= valid) {
            // Missing elements of 32 are codes of 0. If all 32 are missing, they are codes that stand for 0.
            std::fill_n(codes, kPanel, 32 * half < valid ? 0 : kBits == 8 ? 0x80808080 : 0x88888888);
        } else {
            const uint32_t *from = words + i * pitch + first, *shifts = groups[half].shifts + first;
            for (int lane = 0; lane < lanes; ++lane) {
                codes[lane] = kBits == 8 ? from[lane] : by_halves(from[lane]) + (kBits < 4 ? shifts[lane] : 0);
            }
        }
        std::memcpy(out, codes, bytes);
    }
    out -= 4 * share.begin;
    for (int element = 0; element < kQBlock; element += a.to.group) {
        out = write_scales(a.to, groups[element / 32].scales + first, share.begin, static_cast<size_t>(lanes), out);
    }
    out += 4 * share.begin;
    for (int lane = 0; a.to.minima && lane < lanes; ++lane, out += 4) {
        for (int half = 0; half < 2; ++half) std::memcpy(out + 2 * half, groups[half].minima + first + lane, 2);
    }
}

template <int kBits>
void pack_words_panels(const void* args, int64_t task) {
    const PackWordsArgs& a = *static_cast<const PackWordsArgs*>(args);
    const int64_t begin = task * a.together, end = std::min(begin + a.together, a.num_panels);
    const PanelShare last(a.to, a.first_row, a.rows, end - 1);
    const int64_t row = PanelShare(a.to, a.first_row, a.rows, begin).row;
    const int count = static_cast<int>(last.row + last.end - last.begin - row);
    const int64_t blocks = (a.to.k + kQBlock - 1) / kQBlock, block_bytes = packed_block_bytes(a.to);
    const int64_t pitch = a.together * kPanel, block_words = kWordsOfBlock<kBits> * pitch;
    std::vector<uint32_t> words(static_cast<size_t>(block_words)), all;
    if (a.order) {
        // With an order elements are taken from all words of the panel.
        all.resize(static_cast<size_t>(blocks * block_words));
        for (int64_t block = 0; block < blocks; ++block) {
            read_words<kBits>(a, block, row, count, pitch, all.data() + block * block_words);
        }
    }
    LaneGroup groups[2];
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t k = block * kQBlock, valid = std::min<int64_t>(a.to.k - k, kQBlock);
        if (a.order) {
            take_words<kBits>(all.data(), a.order + k, valid, pitch, words.data());
        } else {
            read_words<kBits>(a, block, row, count, pitch, words.data());
        }
        for (int half = 0; half < 2; ++half) {
            if (32 * half < valid) {
                groups[half].read(a, (k + 32 * half) / a.group, row, count);
            } else {
                groups[half] = LaneGroup();
            }
        }
        for (int64_t panel = begin; panel < end; ++panel) {
            const PanelShare share(a.to, a.first_row, a.rows, panel);
            const int first = static_cast<int>(share.row - row);
            write_words<kBits>(a, valid, words.data(), pitch, groups, first, share, share.out + block * block_bytes);
        }
    }
}

// How many superblocks ahead scales are fetched if nothing else is read.
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

// A source format: its kernels, and what they need to know.
struct Source {
    const char* name;
    Kernel pack, max_scale;
    int bits, group, elements, bytes;
    bool minima, table;
    int32_t kept;
};

template <class S>
constexpr Source source_of(const char* name, int group) {
    return {name,         pack_part_panel<S>, find_max_scale<S>, S::kBits,     group,
            S::kElements, S::kBytes,          S::kHasMinima,     S::kHasTable, S::kKept};
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
    source_of<IQ4_NL>("IQ4_NL", 32),
    source_of<IQ4_XS>("IQ4_XS", 32),
    source_of<MXFP4>("MXFP4", 32),
    source_of<NVFP4>("NVFP4", 16),
    source_of<Floats<F32Element, 4>>("F32 4", 32),
    source_of<Floats<F16Element, 4>>("F16 4", 32),
    source_of<Floats<BF16Element, 4>>("BF16 4", 32),
    source_of<Codes<4, false>>("CODES4", 32),
    source_of<Codes<4, true>>("CODES4 MINIMA", 32),
    source_of<Codes<8, false>>("CODES8", 32),
    source_of<Codes<8, true>>("CODES8 MINIMA", 32),
    source_of<Codes<8, false>>("CODES8 BY 16", 16),
    source_of<Codes<4, false, true>>("CODES4 TABLE", 32),
    source_of<Codes<4, false, true>>("CODES4 TABLE BY 16", 16),
};

// Returns the source format. Throws std::invalid_argument unless rows of k elements in it can lie `stride` bytes apart.
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

// Returns how many panels a part has outputs in. Throws std::invalid_argument unless they are in the matrix.
int64_t panels_of_part(const Matrix& to, int64_t first_row, int64_t rows) {
    const int64_t outputs = to.gated ? to.n / 2 : to.n;
    const int64_t end = to.gated ? rows : first_row + rows;
    if (rows < 0 || first_row < 0 || (to.gated && first_row > 1) || end > outputs) {
        throw std::invalid_argument("rows " + std::to_string(first_row) + " to " + std::to_string(end) +
                                    " are not in a matrix of " + std::to_string(outputs) + ".");
    }
    return rows ? (end + kPanel - 1) / kPanel - (to.gated ? 0 : first_row / kPanel) : 0;
}

}  // namespace

std::vector<const char*> source_formats() {
    std::vector<const char*> names;
    for (const Source& source : kSources) names.push_back(source.name);
    return names;
}

namespace {

// Returns the bits of a code of a matrix that keeps no superblocks, 0 for others.
int bits_of_codes(const Matrix& matrix) {
    return matrix.format == kWeightInt8 ? 8 : is_integer(matrix.format) && !keeps_superblocks(matrix.format) ? 4 : 0;
}

}  // namespace

int64_t packed_bytes(const Matrix& matrix) {
    const int64_t sides = matrix.gated ? 2 : 1;
    const int64_t panels = sides * ((matrix.n / sides + kPanel - 1) / kPanel);
    return panels * ((matrix.k + kQBlock - 1) / kQBlock) * packed_block_bytes(matrix);
}

Launch plan(PackPartArgs& args, const KernelTable&, int) {
    const Source& source = checked_source(args.source_format, args.to.k, args.stride);
    const int bits = bits_of_codes(args.to);
    if (keeps_superblocks(args.to.format) && args.to.format != source.kept) {
        throw std::invalid_argument(std::string(source.name) + " does not fit into the superblocks of another format.");
    }
    if (args.to.format != source.kept &&
        (bits < source.bits || args.to.group > source.group || (args.to.group != 16 && args.to.group != 32) ||
         (source.minima && !args.to.minima) || source.table != has_table(args.to))) {
        throw std::invalid_argument(std::string(source.name) + " does not fit into " + std::to_string(bits) +
                                    " bits, groups of " + std::to_string(args.to.group) + ", " +
                                    (has_table(args.to) ? "a table" : "no table") + " and " +
                                    (args.to.minima ? "minima." : "no minima."));
    }
    const int64_t tasks = panels_of_part(args.to, args.first_row, args.rows);
    return {source.pack, &args, tasks, static_cast<double>(args.rows * args.to.k)};
}

Launch plan(PackWordsArgs& args, const KernelTable&, int) {
    const int bits = bits_of_codes(args.to);
    const bool is_known = args.bits == 2 || args.bits == 3 || args.bits == 4 || args.bits == 8;
    if (!is_known || std::max(args.bits, 4) != bits || (args.by_outputs && args.bits != 4) ||
        (args.minima && !args.to.minima) || (args.bits < 4) != (args.shifts != nullptr) || args.group <= 0 ||
        args.group % 32 != 0) {
        throw std::invalid_argument("words of " + std::to_string(args.bits) + " bits in groups of " +
                                    std::to_string(args.group) + " do not fit into " + std::to_string(bits) +
                                    " bits and " + (args.to.minima ? "minima." : "no minima."));
    }
    args.num_panels = panels_of_part(args.to, args.first_row, args.rows);
    // An order needs all words of its panels; words of several panels would not fit in a core's cache.
    args.together = args.order ? 1 : kTogether;
    const Kernel kernel = args.bits == 2   ? pack_words_panels<2>
                          : args.bits == 3 ? pack_words_panels<3>
                          : args.bits == 4 ? pack_words_panels<4>
                                           : pack_words_panels<8>;
    const int64_t tasks = (args.num_panels + args.together - 1) / args.together;
    return {kernel, &args, tasks, static_cast<double>(args.rows * args.to.k) / 2};
}

Launch plan(MaxScaleArgs& args) {
    const Source& source = checked_source(args.source_format, args.k, args.stride);
    return {source.max_scale, &args, (args.rows + kPanel - 1) / kPanel, static_cast<double>(args.rows * args.k) / 4};
}

}  // namespace octavo
