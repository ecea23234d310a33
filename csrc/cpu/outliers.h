// What quantized rows keep apart (QBlock), listed once for all the panels that rows meet. Rows of a model often have
// their outliers in the same places, and share what is made of a column of weights. Included by int_dot.h only.
#pragma once

#include <vector>

#include "launch_number.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rows that share columns, whose outputs wait for them meanwhile: these fit a first-level cache.
constexpr int kOutlierRows = 64;
// As many as share opened blocks (k_quants.h).
constexpr int kOpenedRows = 96;

struct Outlier {
    float value;
    uint32_t column;  // of those that its batch meets
};

// The outliers of some rows, which are taken in batches.
class OutlierList {
  public:
    // Of `rows` rows in batches of `batch_rows`, and their blocks in `segments` equal parts. A thread lists the same
    // rows once in a launch, for all its tasks: what this returns is good until its next call.
    static OutlierList& of(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows, int64_t batch_rows,
                           int64_t segments) {
        static thread_local OutlierList list;
        const Rows wanted{launch_number(), x, blocks, rows, batch_rows, segments};
        if (!(list.rows_ == wanted)) {
            list.rows_ = wanted;
            list.collect(x_stride);
        }
        return list;
    }

    // For the batch that begins with row `first`: what its outliers meet of the panel at w of a matrix of format F,
    // over the matrix's factor.
    template <class F>
    void make_columns(const char* w, int64_t first, float inverse) {
        const int64_t batch = first / rows_.batch_rows;
        Line* to = columns_.data();
        const size_t end = batches_[static_cast<size_t>(batch) + 1];
        for (size_t i = batches_[static_cast<size_t>(batch)]; i < end; ++i, to += kPanel / kLineFloats) {
            Vec column[kVecsPerPanel];
            F::column(w, ks_[i], inverse, column);
            for (int v = 0; v < kVecsPerPanel; ++v) store(to->of + v * kLanes, column[v]);
        }
    }

    // Adds to the outputs y of that batch's `rows` rows, `stride` apart, what the outliers of a segment contribute.
    void add(int64_t first, int64_t rows, int64_t segment, float factor, float* y, int64_t stride) {
        const uint32_t* begin = begins_.data() + first * rows_.segments + segment;
        for (int64_t r = 0; r < rows; ++r, y += stride, begin += rows_.segments) {
            const Outlier* one = outliers_.data() + begin[0];
            const Outlier* end = outliers_.data() + begin[1];
            Vec sum[kVecsPerPanel];
            for (int v = 0; v < kVecsPerPanel; ++v) sum[v] = load(y + v * kLanes);
            for (; one < end; ++one) {
                const Vec x = set1(one->value * factor);
                const float* column = columns_.data()->of + one->column * kPanel;
                for (int v = 0; v < kVecsPerPanel; ++v) sum[v] = fma(x, load(column + v * kLanes), sum[v]);
            }
            for (int v = 0; v < kVecsPerPanel; ++v) store(y + v * kLanes, sum[v]);
        }
    }

  private:
    static constexpr int kLineFloats = 16;
    struct alignas(64) Line {
        float of[kLineFloats];
    };
    struct Rows {
        uint64_t launch;
        const QBlock* x;
        int64_t blocks, rows, batch_rows, segments;

        bool operator==(const Rows& other) const {
            return launch == other.launch && x == other.x && blocks == other.blocks && rows == other.rows &&
                   batch_rows == other.batch_rows && segments == other.segments;
        }
    };

    void collect(int64_t x_stride) {
        const auto [launch, x, blocks, rows, batch_rows, segments] = rows_;
        (void)launch;
        const int64_t segment_blocks = blocks / segments;
        constexpr uint32_t kNone = UINT32_MAX;
        size_t count = 0, most_columns = 0;
        begins_.clear();
        batches_.clear();
        ks_.clear();
        if (column_of_.size() < static_cast<size_t>(blocks * kQBlock)) column_of_.resize(blocks * kQBlock, kNone);
        for (int64_t first = 0; first < rows; first += batch_rows) {
            batches_.push_back(ks_.size());
            for (int64_t r = first; r < min_of(first + batch_rows, rows); ++r) {
                const size_t most = count + static_cast<size_t>(2 * kMaxOutliers * blocks);
                if (most > outliers_.size()) outliers_.resize(2 * most);
                for (int64_t b = 0; b < blocks; ++b) {
                    if (b % segment_blocks == 0) begins_.push_back(static_cast<uint32_t>(count));
                    const QBlock& block = x[r * x_stride + b];
                    for (int i = 0; i < 2 * kMaxOutliers; ++i) {
                        const float value = block.outlier[i / kMaxOutliers][i % kMaxOutliers];
                        if (value == 0.0f) continue;
                        const int64_t k = b * kQBlock + block.outlier_at[i / kMaxOutliers][i % kMaxOutliers];
                        uint32_t& column = column_of_[static_cast<size_t>(k)];
                        if (column == kNone) {
                            column = static_cast<uint32_t>(ks_.size() - batches_.back());
                            ks_.push_back(k);
                        }
                        outliers_[count++] = {value, column};
                    }
                }
            }
            for (size_t i = batches_.back(); i < ks_.size(); ++i) column_of_[static_cast<size_t>(ks_[i])] = kNone;
            if (ks_.size() - batches_.back() > most_columns) most_columns = ks_.size() - batches_.back();
        }
        batches_.push_back(ks_.size());
        begins_.push_back(static_cast<uint32_t>(count));
        if (columns_.size() < most_columns * (kPanel / kLineFloats)) columns_.resize(most_columns * 2);
    }

    Rows rows_{};
    std::vector<Outlier> outliers_;    // and room for more
    std::vector<uint32_t> begins_;     // of rows' segments, and the end
    std::vector<int64_t> ks_;          // the elements that batches have outliers at, batch by batch
    std::vector<size_t> batches_;      // where theirs begin, and the end
    std::vector<uint32_t> column_of_;  // of elements, while a batch is listed
    std::vector<Line> columns_;        // of a panel, over the factor of its matrix
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
