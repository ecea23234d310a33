// The outliers that quantized rows keep as floats (QBlock): a list, made once for all panels that the rows meet, and
// their products with columns of weights. Rows of a model often have outliers at the same elements; they share the
// unpacked column. Included by int_product.h only.
#pragma once

#include <vector>

#include "launch_number.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rows of a batch, which share columns. The outputs of this many rows fit in the first-level cache.
constexpr int kOutlierRows = 64;
// Rows of a batch that shares unpacked blocks (superblock_layouts.h).
constexpr int kUnpackedRows = 96;

struct Outlier {
    float value;
    uint32_t row;     // index among the rows of its batch
    uint32_t column;  // index among the columns of its batch and segment
};

// The outliers of some rows, batch by batch.
class OutlierList {
  public:
    // Returns the thread's list, for one task at a time.
    static OutlierList& of_thread() {
        static thread_local OutlierList list;
        return list;
    }

    // Collects the outliers of `rows` rows of `blocks` blocks, in batches of `batch_rows` rows and `segments` equal
    // parts of the blocks. Does nothing if they are those collected last in this launch, for an earlier task.
    void collect(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows, int64_t batch_rows,
                 int64_t segments) {
        const Rows wanted{launch_number(), x, x_stride, blocks, rows, batch_rows, segments};
        if (rows_ == wanted) return;
        rows_ = wanted;
        collect_rows();
    }

    // Adds the products of a segment's outliers and the panel `w`, of a matrix of format F, to the outputs y of the
    // batch that begins with row `first`. Rows of y lie `stride` apart. Columns are divided by the matrix's factor. The
    // panel should have been multiplied before, so that columns are in a cache.
    template <class F, class UnpackArgs>
    void add(const char* w, UnpackArgs unpack, int64_t first, int64_t segment, float factor, float* y, int64_t stride) {
        const Begin* begin = begins_.data() + first / rows_.batch_rows * rows_.segments + segment;
        Line* column = columns_.data();
        for (size_t i = begin[0].column; i < begin[1].column; ++i, column += kPanel / kLineFloats) {
            Vec made[kVecsPerPanel];
            F::column(w, ks_[i], unpack, made);
            for (int v = 0; v < kVecsPerPanel; ++v) store(column->of + v * kLanes, made[v]);
        }
        const Outlier* one = outliers_.data() + begin[0].outlier;
        const Outlier* end = outliers_.data() + begin[1].outlier;
        while (one < end) {
            float* to = y + one->row * stride;
            Vec sum[kVecsPerPanel];
            for (int v = 0; v < kVecsPerPanel; ++v) sum[v] = load(to + v * kLanes);
            const uint32_t row = one->row;
            do {
                const Vec x = set1(one->value * factor);
                const float* weights = columns_.data()->of + one->column * kPanel;
                for (int v = 0; v < kVecsPerPanel; ++v) sum[v] = fma(x, load(weights + v * kLanes), sum[v]);
            } while (++one < end && one->row == row);
            for (int v = 0; v < kVecsPerPanel; ++v) store(to + v * kLanes, sum[v]);
        }
    }

  private:
    static constexpr int kLineFloats = 16;
    struct alignas(64) Line {
        float of[kLineFloats];
    };
    struct Begin {
        size_t outlier, column;
    };
    struct Rows {
        uint64_t launch;
        const QBlock* x;
        int64_t x_stride, blocks, rows, batch_rows, segments;

        bool operator==(const Rows& other) const {
            return launch == other.launch && x == other.x && x_stride == other.x_stride && blocks == other.blocks &&
                   rows == other.rows && batch_rows == other.batch_rows && segments == other.segments;
        }
    };

    // Lists outliers by batch, segment, row and block.
    void collect_rows() {
        const auto [launch, x, x_stride, blocks, rows, batch_rows, segments] = rows_;
        (void)launch;
        const int64_t segment_blocks = blocks / segments;
        constexpr uint32_t kNone = UINT32_MAX;
        size_t count = 0;
        begins_.clear();
        ks_.clear();
        if (column_of_.size() < static_cast<size_t>(blocks * kQBlock)) column_of_.resize(blocks * kQBlock, kNone);
        for (int64_t first = 0; first < rows; first += batch_rows) {
            const size_t first_column = ks_.size();
            const int64_t end = min_of(first + batch_rows, rows);
            for (int64_t segment = 0; segment < blocks; segment += segment_blocks) {
                begins_.push_back({count, ks_.size()});
                for (int64_t r = first; r < end; ++r) {
                    const size_t most = count + static_cast<size_t>(2 * kMaxOutliers * segment_blocks);
                    if (most > outliers_.size()) outliers_.resize(2 * most);
                    for (int64_t b = segment; b < segment + segment_blocks; ++b) {
                        const QBlock& block = x[r * x_stride + b];
                        if (!has_outliers(block)) continue;
                        for (int i = 0; i < 2 * kMaxOutliers; ++i) {
                            const float value = block.outlier[i / kMaxOutliers][i % kMaxOutliers];
                            if (value == 0.0f) continue;
                            const int64_t k = b * kQBlock + block.outlier_at[i / kMaxOutliers][i % kMaxOutliers];
                            uint32_t& column = column_of_[static_cast<size_t>(k)];
                            if (column == kNone) {
                                column = static_cast<uint32_t>(ks_.size() - begins_.back().column);
                                ks_.push_back(k);
                            }
                            outliers_[count++] = {value, static_cast<uint32_t>(r - first), column};
                        }
                    }
                }
            }
            for (size_t i = first_column; i < ks_.size(); ++i) column_of_[static_cast<size_t>(ks_[i])] = kNone;
        }
        begins_.push_back({count, ks_.size()});
        size_t most_columns = 0;
        for (size_t i = 1; i < begins_.size(); ++i) {
            most_columns = max_of(most_columns, begins_[i].column - begins_[i - 1].column);
        }
        const size_t most_lines = most_columns * (kPanel / kLineFloats);
        if (columns_.size() < most_lines) columns_.resize(most_lines);
    }

    static bool has_outliers(const QBlock& block) {
        uint32_t bits[2 * kMaxOutliers], all = 0;
        memcpy(bits, block.outlier, sizeof(bits));
        for (const uint32_t value : bits) all |= value;
        return all != 0;
    }

    Rows rows_{};
    std::vector<Outlier> outliers_;    // of all rows; grown, never shrunk
    std::vector<int64_t> ks_;          // elements of k of the columns, batch by batch
    std::vector<Begin> begins_;        // where each segment of each batch begins in outliers_ and ks_, and the end
    std::vector<uint32_t> column_of_;  // by element of k, while a batch is listed: its column
    std::vector<Line> columns_;        // unpacked for one panel and segment, divided by the matrix's factor
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
