// Prefetching of adapters' factors. They are small pieces far apart, which processors do not prefetch, so they are
// fetched explicitly: a few lines at a time between the base's products, or all at once if these cannot do it. Included
// by lora_b.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kLineBytes = 64;

// Calls f(row, rows, factors) for each run of rows among row .. end - 1 that have the same adapter.
template <class F>
inline void for_adapters(const LinearArgs& a, int64_t row, int64_t end, F f) {
    for (int64_t next; row < end; row = next) {
        const int32_t slot = a.slots[row];
        for (next = row + 1; next < end && a.slots[next] == slot;) ++next;
        if (slot >= 0 && a.factors[slot].panels != nullptr) f(row, next - row, a.factors[slot]);
    }
}

// Calls f(first byte, number of bytes) for the pieces of B that rows row .. end - 1 need for `panels` panels of outputs
// from `panel` on. Matrices that replace the base's are left out: they are long enough for the processor to prefetch.
template <class F>
inline void for_factors(const LinearArgs& a, int64_t row, int64_t end, int64_t panel, int64_t panels, F f) {
    const int64_t size = a.factor_dtype == kF32 ? 4 : 2;
    for_adapters(a, row, end, [&](int64_t, int64_t, const AdapterFactors& factors) {
        if (factors.replaces) return;
        for (int64_t i = panel; i < panel + panels; ++i) {
            const AdapterPanel& one = factors.panels[i];
            if (one.count > 0) f(static_cast<const char*>(factors.b) + one.offset * size, one.count * kPanel * size);
        }
    });
}

// Fetches all of these pieces now.
inline void fetch_factors(const LinearArgs& a, int64_t row, int64_t end, int64_t panel, int64_t panels) {
    for_factors(a, row, end, panel, panels, [](const char* from, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(from + at);
    });
}

// Cache lines of pieces of memory, fetched a few at a time, one piece after the other.
class CacheLines {
  public:
    void clear() { count_ = at_ = lines_ = 0; }

    // Adds a piece. If it begins where the last piece ends, it makes that one longer. Without room it is dropped.
    void add(const char* from, int64_t lines) {
        if (lines == 0) return;
        if (count_ > 0 && pieces_[count_ - 1].end == from) {
            pieces_[count_ - 1].end += lines * kLineBytes;
        } else if (count_ < kMostPieces) {
            pieces_[count_++] = {from, from + lines * kLineBytes};
        } else {
            return;
        }
        lines_ += lines;
    }

    // Lines that were added and not yet taken.
    int64_t num_lines() const { return lines_; }
    void take(int64_t lines) { lines_ -= lines; }

    // Fetches the next lines, if there are any, into the second-level cache: the first has no room beside what products
    // read.
    void fetch(int64_t lines) {
        for (int64_t i = 0; i < lines && at_ < count_; ++i) {
            Piece& piece = pieces_[at_];
            __builtin_prefetch(piece.begin, 0, 2);
            piece.begin += kLineBytes;
            if (piece.begin == piece.end) ++at_;
        }
    }

  private:
    static constexpr int64_t kMostPieces = 512;
    struct Piece {
        const char *begin, *end;
    };
    int64_t count_ = 0, at_ = 0, lines_ = 0;
    Piece pieces_[kMostPieces];
};

// The lines that a task of a product fetches while it computes the panels of an epilogue: the factors of the next
// epilogue, and the task's share of the factors that the next product of adapters reads, in the order in which that
// product's tasks take them.
class AdapterLines {
  public:
    // For a task that computes rows row_begin .. row_end - 1 by panels from `panel` on. The matrix has `panels` panels.
    AdapterLines(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel, int64_t panels)
        : a_(a), row_begin_(row_begin), row_end_(row_end), panels_(panels) {
        if (a.has_lora && a.next) seek(panel);
    }

    // Collects the lines to fetch while `count` panels from `panel` on meet all rows, in `steps` steps.
    void collect(int64_t panel, int64_t count, int64_t steps) {
        if (!a_.has_lora) return;
        pieces_.clear();
        const int64_t after = panel + count;
        for_factors(a_, row_begin_, row_end_, after, min_of(count, panels_ - after),
                    [&](const char* from, int64_t bytes) { pieces_.add(from, lines_in(bytes)); });
        if (a_.next) take_shares(place(after));
        each_ = (pieces_.num_lines() + steps - 1) / steps;
    }

    // Returns how many of cache_lines() each of the next `steps` steps fetches, with one call of `fetch`.
    int64_t take(int64_t steps) {
        if (!a_.has_lora) return 0;
        const int64_t left = pieces_.num_lines();
        const int64_t each = each_ * steps <= left ? each_ : left / steps;
        pieces_.take(each * steps);
        return each;
    }

    CacheLines& cache_lines() { return pieces_; }

  private:
    static constexpr int64_t kFirstPanels = 4;  // of a quantized gated epilogue

    static int64_t lines_in(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes; }

    // Returns the number of lines of the A that part `part` of the next product reads.
    int64_t lines_of(int64_t part) const {
        const ShrinkArgs& s = *a_.next;
        const int64_t step = s.dtype == kF32 ? 1 : 2;
        const int64_t panel_bytes = (s.k + step - 1) / step * kFactorPanel * 4;
        const AdapterFactors& f = s.factors[s.schedule->parts[part].slot];
        return f.replaces ? 0 : (f.rank + kFactorPanel - 1) / kFactorPanel * panel_bytes / kLineBytes;
    }

    // Returns how many lines are fetched before this task reaches `panel`. Tasks are in order of rows first.
    int64_t place(int64_t panel) const {
        const double rows = static_cast<double>(row_begin_) + static_cast<double>(row_end_ - row_begin_) *
                                                                  static_cast<double>(panel) /
                                                                  static_cast<double>(panels_);
        return static_cast<int64_t>(static_cast<double>(total_) * rows / static_cast<double>(a_.rows));
    }

    // Finds the part and the line where this task's share begins.
    void seek(int64_t panel) {
        for (int64_t i = 0; i < a_.next->schedule->num_parts; ++i) total_ += lines_of(i);
        at_ = line_ = place(panel);
        while (part_ < a_.next->schedule->num_parts && line_ >= lines_of(part_)) line_ -= lines_of(part_++);
    }

    // Adds B's first panels, which are read soon after A. Lines behind a small B are fetched in vain.
    void add_beginning(const AdapterFactors& f) {
        const int64_t size = a_.next->dtype == kF32 ? 4 : 2;
        const int64_t bytes = kFirstPanels * f.panels[0].count * kPanel * size;
        pieces_.add(static_cast<const char*>(f.b) + f.panels[0].offset * size, lines_in(bytes));
    }

    void take_shares(int64_t end) {
        const ShrinkArgs& s = *a_.next;
        while (at_ < end && part_ < s.schedule->num_parts) {
            const int64_t of_part = lines_of(part_);
            const int64_t lines = min_of(end - at_, of_part - line_);
            const char* from = static_cast<const char*>(s.factors[s.schedule->parts[part_].slot].a);
            pieces_.add(from + line_ * kLineBytes, lines);
            at_ += lines;
            line_ += lines;
            if (line_ == of_part) {
                if (of_part > 0) add_beginning(s.factors[s.schedule->parts[part_].slot]);
                ++part_;
                line_ = 0;
            }
        }
    }

    const LinearArgs& a_;
    const int64_t row_begin_, row_end_, panels_;
    int64_t each_ = 0;
    int64_t total_ = 0, at_ = 0;   // lines of all parts; lines collected so far, by earlier tasks too
    int64_t part_ = 0, line_ = 0;  // the part and the line where the list ends
    CacheLines pieces_;
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
