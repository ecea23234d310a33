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
    uint32_t column;  // index among the columns of its batch
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

    // Unpacks the columns of weights that the batch's outliers meet. The batch begins with row `first`; `w` is a panel
    // of a matrix of format F. Columns are divided by the matrix's factor.
    template <class F, class With>
    void make_columns(const char* w, int64_t first, With with) {
        const int64_t batch = first / rows_.batch_rows;
        Line* to = columns_.data();
        const size_t end = batches_[static_cast<size_t>(batch) + 1];
        for (size_t i = batches_[static_cast<size_t>(batch)]; i < end; ++i, to += kPanel / kLineFloats) {
            Vec column[kVecsPerPanel];
            F::column(w, ks_[i], with, column);
            for (int v = 0; v < kVecsPerPanel; ++v) store(to->of + v * kLanes, column[v]);
        }
    }

    // Adds the products of a segment's outliers to the outputs y of the batch's `rows` rows, which lie `stride` apart.
    // Uses the columns of the last make_columns.
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
        int64_t x_stride, blocks, rows, batch_rows, segments;

        bool operator==(const Rows& other) const {
            return launch == other.launch && x == other.x && x_stride == other.x_stride && blocks == other.blocks &&
                   rows == other.rows && batch_rows == other.batch_rows && segments == other.segments;
        }
    };

    void collect_rows() {
        const auto [launch, x, x_stride, blocks, rows, batch_rows, segments] = rows_;
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
        const size_t most_lines = most_columns * (kPanel / kLineFloats);
        if (columns_.size() < most_lines) columns_.resize(most_lines);
    }

    Rows rows_{};
    std::vector<Outlier> outliers_;    // of all rows in order; grown, never shrunk
    std::vector<uint32_t> begins_;     // where each segment of each row begins in outliers_, and the end
    std::vector<int64_t> ks_;          // elements of k of the columns, batch by batch
    std::vector<size_t> batches_;      // where each batch begins in ks_, and the end
    std::vector<uint32_t> column_of_;  // by element of k, while a batch is listed: its column
    std::vector<Line> columns_;        // unpacked for one panel, divided by the matrix's factor
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
