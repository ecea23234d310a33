// What quantized rows keep apart (QBlock), listed once for all the panels that rows meet, in the order of k: rows of a
// model often have their outliers in the same places, and share what is made of a column of weights. Included by
// linear_int.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

struct Outlier {
    float value;
    int32_t row, k;  // the row within its batch
};

// Rows whose outputs wait for each other's outliers: they fit a first-level cache.
constexpr int kOutlierRows = 48;
// As many as share opened blocks (int_formats.h).
constexpr int kOpenedRows = 96;

// The outliers of some rows, batch by batch. Some tenth of all groups has one.
class OutlierList {
  public:
    // Of `rows` rows in batches of `batch_rows`. False if they are too many; a single row never is.
    bool collect(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows, int64_t batch_rows) {
        const int64_t batches = (rows + batch_rows - 1) / batch_rows;
        if (batches > kMaxBatches) return false;
        int count = 0;
        for (int64_t batch = 0; batch < batches; ++batch) {
            begins_[batch] = count;
            const int64_t first = batch * batch_rows;
            const int some = static_cast<int>(rows - first < batch_rows ? rows - first : batch_rows);
            for (int64_t b = 0; b < blocks; ++b) {
                const QBlock* block = x + first * x_stride + b;
                for (int half = 0; half < 2; ++half) {
                    if (count + some > kCapacity) return false;
                    const int begin = count;
                    for (int r = 0; r < some; ++r) {
                        const QBlock& one = block[r * x_stride];
                        if (one.outlier[half] == 0.0f) continue;
                        insert(begin, count++,
                               {one.outlier[half], r, static_cast<int32_t>(b * kQBlock + one.outlier_at[half])});
                    }
                }
            }
        }
        begins_[batches] = count;
        return true;
    }

    const Outlier* begin(int64_t batch) const { return outliers_ + begins_[batch]; }
    const Outlier* end(int64_t batch) const { return outliers_ + begins_[batch + 1]; }

  private:
    // Keeps outliers `begin` to `end`, of one group, in the order of k.
    void insert(int begin, int end, Outlier one) {
        for (; end > begin && outliers_[end - 1].k > one.k; --end) outliers_[end] = outliers_[end - 1];
        outliers_[end] = one;
    }

    static constexpr int kCapacity = 4096;
    static constexpr int kMaxBatches = 64;
    static_assert(kMaxIntK / (kQBlock / 2) <= kCapacity, "a row may have an outlier in each group");
    Outlier outliers_[kCapacity];
    int begins_[kMaxBatches + 1];
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
