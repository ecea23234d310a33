// Adapters' second product: shrunk rows (lora_a.h) meet B, and the result is added to a product's outputs while these
// are in their buffer. Included by epilogue.h only.
#pragma once

#include "lora_factors.h"
#ifdef OCTAVO_AMX
#include "amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// A buffer of products: `rows` rows from row `row` on, `width` outputs from output `col` of the packed matrix on. Rows
// of y lie `stride` floats apart.
struct Products {
    float* y;
    int64_t stride, row, rows, col, width;
};

// Shrunk rows that meet the same factors at once.
constexpr int kExpandRows = kTileRows * kTileVecs / 2;

// Computes y[r] += s[r] B^T for R rows and V vectors of outputs, on top of the product's sums, step by step in order.
template <class E, int R, int V>
inline void expand_tile(const typename E::T* const* s, const typename E::T* b, int64_t steps, float* y,
                        int64_t stride) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = load(y + r * stride + v * kLanes);
    }
    for (int64_t j = 0; j < steps; ++j, b += kPanel * E::kStep) {
        typename E::Lanes wv[V];
        for (int v = 0; v < V; ++v) wv[v] = E::load_lanes(b + v * kLanes * E::kStep);
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes xv = E::broadcast(s[r] + j * E::kStep);
            for (int v = 0; v < V; ++v) acc[r][v] = E::madd(acc[r][v], xv, wv[v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(y + r * stride + v * kLanes, acc[r][v]);
    }
}

// Calls f(first output, number of vectors, panel, its factors) for those outputs of the products that an adapter adds
// to, one or two vectors at a time.
template <class E, class F>
inline void for_pieces(const Products& p, const AdapterFactors& factors, F f) {
    using T = typename E::T;
    for (int64_t i = 0; i < p.width;) {
        const int64_t col = p.col + i;
        const bool one = min_of(p.width - i, kPanel - col % kPanel) < 2 * kLanes;
        const AdapterPanel& panel = factors.panels[col / kPanel];
        if (panel.count > 0) {
            const T* b = static_cast<const T*>(factors.b) + panel.offset + col % kPanel * E::kStep;
            if (one) {
                f(i, Constant<1>{}, panel, b);
            } else {
                f(i, Constant<2>{}, panel, b);
            }
        }
        i += one ? kLanes : 2 * kLanes;
    }
}

// Returns the shrunk row of row r of the products.
template <class T>
inline const T* shrunk_row(const LinearArgs& a, const Products& p, int64_t r) {
    return static_cast<const T*>(a.shrunk) + (p.row + r) * a.shrunk_stride;
}

// Adds the products with an adapter's B to rows row .. row + rows - 1, which have the same adapter: by vectors.
template <class E>
class Expand {
  public:
    explicit Expand(const Products&) {}

    void add(const LinearArgs& a, const Products& p, int64_t row, int64_t rows, const AdapterFactors& f) {
        using T = typename E::T;
        const T* s[kExpandRows];
        const int64_t tiles = (rows + kExpandRows - 1) / kExpandRows;
        for_pieces<E>(p, f, [&](int64_t i, auto vecs, const AdapterPanel& panel, const T* b) {
            constexpr int kVecs = decltype(vecs)::kValue;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t begin = row + rows * t / tiles, end = row + rows * (t + 1) / tiles;
                for (int64_t r = begin; r < end; ++r) s[r - begin] = shrunk_row<T>(a, p, r) + panel.first;
                with_constant<kExpandRows>(end - begin, [&](auto count) {
                    constexpr int kRows = decltype(count)::kValue;
                    expand_tile<E, kRows, kVecs>(s, b, panel.count / E::kStep, p.y + begin * p.stride + i, p.stride);
                });
            }
        });
    }
};

#ifdef OCTAVO_AMX
// Adds one step to tiles 0 and 1, of kVecs vectors of outputs: elements of the shrunk rows (tile kS) by B's (tiles kB
// and kB + 1).
template <int kVecs, int kS, int kB>
inline void expand_step(const uint16_t* s, int64_t s_stride, const uint16_t* b) {
    constexpr int64_t kPairStride = kPanel * 4;
    tile_load<kS>(s, s_stride);
    tile_load<kB>(b, kPairStride);
    tile_dot_bf16<0, kS, kB>();
    if constexpr (kVecs > 1) {
        tile_load<kB + 1>(b + 2 * kLanes, kPairStride);
        tile_dot_bf16<1, kS, kB + 1>();
    }
}

// Computes to = y + s B^T for as many rows as the tiles have. The last `count` elements that do not fill whole tiles
// take tiles 3, 6 and 7, which are configured for fewer elements.
template <int kVecs>
inline void expand_tiles(const uint16_t* s, int64_t s_stride, const uint16_t* b, int64_t count, const float* y,
                         int64_t y_stride, float* to, int64_t to_stride) {
    tile_load<0>(y, y_stride);
    if constexpr (kVecs > 1) tile_load<1>(y + kLanes, y_stride);
    for (; count >= kTileK; count -= kTileK, s += kTileK, b += kTileK * kPanel) {
        expand_step<kVecs, 2, 4>(s, s_stride, b);
    }
    if (count > 0) expand_step<kVecs, 3, 6>(s, s_stride, b);
    tile_store<0>(to, to_stride);
    if constexpr (kVecs > 1) tile_store<1>(to + kLanes, to_stride);
}

// The same by tiles, even for a single row: tiles have an order of sums of their own. All tiles of these products have
// the same height, because configuring another height takes as long as two tiles. If fewer rows have an adapter, their
// neighbours are computed as well and left out.
template <>
class Expand<BF16> {
  public:
    explicit Expand(const Products& p) : height_(static_cast<int>(min_of<int64_t>(kTileMaxRows, p.rows))) {}
    ~Expand() {
        if (rest_ >= 0) tile_release();
    }
    Expand(const Expand&) = delete;
    Expand& operator=(const Expand&) = delete;

    void add(const LinearArgs& a, const Products& p, int64_t row, int64_t rows, const AdapterFactors& f) {
        for_pieces<BF16>(p, f, [&](int64_t i, auto vecs, const AdapterPanel& panel, const uint16_t* b) {
            constexpr int kVecs = decltype(vecs)::kValue;
            configure(panel.count % kTileK);
            const auto tiles = [&](int64_t first, float* to, int64_t stride) {
                expand_tiles<kVecs>(shrunk_row<uint16_t>(a, p, first) + panel.first, a.shrunk_stride * 2, b,
                                    panel.count, p.y + first * p.stride + i, p.stride * 4, to, stride * 4);
            };
            int64_t r = row;
            for (; r + height_ <= row + rows; r += height_) tiles(r, p.y + r * p.stride + i, p.stride);
            if (r == row + rows) return;
            alignas(64) float y[kTileMaxRows * kPanel];
            const int64_t first = min_of(r, p.rows - height_);
            tiles(first, y, kPanel);
            for (; r < row + rows; ++r) {
                for (int v = 0; v < kVecs; ++v) {
                    store(p.y + r * p.stride + i + v * kLanes, load(y + (r - first) * kPanel + v * kLanes));
                }
            }
        });
    }

  private:
    void configure(int rest) {
        if (rest == rest_) return;
        TileShapes shapes;
        for (int t = 0; t <= 2; ++t) shapes.set(t, height_, kTileMaxBytes);
        for (int t = 4; t <= 5; ++t) shapes.set(t, kTileMaxRows, kTileMaxBytes);
        if (rest > 0) {
            shapes.set(3, height_, rest * 2);
            for (int t = 6; t <= 7; ++t) shapes.set(t, rest / 2, kTileMaxBytes);
        }
        tile_configure(shapes);
        rest_ = rest;
    }

    const int height_;
    int rest_ = -1;  // elements of tiles 3, 6 and 7 as configured; -1: no tile is
};
#endif

// Adds what the rows' adapters contribute. A row's bits do not depend on its neighbours.
template <class E>
void expand_products(const LinearArgs& a, const Products& p) {
    Expand<E> expand(p);
    for_adapters(a, p.row, p.row + p.rows, [&](int64_t from, int64_t rows, const AdapterFactors& f) {
        const int64_t row = from - p.row;
        for (int64_t r = row; r < row + rows && f.replaces; ++r) {
            memset(p.y + r * p.stride, 0, static_cast<size_t>(p.width) * sizeof(float));
        }
        expand.add(a, p, row, rows, f);
        for (int64_t r = row; r < row + rows && (f.scales || f.bias); ++r) {
            for (int64_t i = 0; i < p.width; i += kLanes) {
                float* at = p.y + r * p.stride + i;
                Vec sum = load(at);
                if (f.scales) sum = mul(sum, load(f.scales + p.col + i));
                if (f.bias) sum = add(sum, load(f.bias + p.col + i));
                store(at, sum);
            }
        }
    });
}

void expand(const LinearArgs& a, const Products& p) {
    with_element(a.factor_dtype, [&](auto element) { expand_products<decltype(element)>(a, p); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
