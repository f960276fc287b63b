// Buffered row results on their way to the result arrays.
#pragma once

#include "rows.h"
#include "row_blocks.h"

namespace ts {

// Results of a few adjacent rows, written together. Written row by row, the 16 arrays, whose distance may be a power of
// two, would evict each other from the cache.
class Group {
  public:
    static constexpr int64_t kRows = 16;

    void put(int64_t i, const Row& row, int64_t width, double at_worst) {
        const double reals[] = {row.argmax < 0 ? 0 : row.max_abs,
                                row.sum_abs,
                                row.sum_sq_diff,
                                row.sum_sq_baseline,
                                row.sum_sq_target,
                                row.dot};
        const int64_t wholes[] = {row.argmax,           row.equal,    row.over, row.finite, row.nonfinite_baseline,
                                  row.nonfinite_target, row.mismatch, width};
        for (int field = 0; field < kReals; ++field) reals_[field][i] = reals[field];
        for (int field = 0; field < kWholes; ++field) wholes_[field][i] = wholes[field];
        at_worst_[i] = at_worst;
    }

    // Initializes the results of `count` rows from row `first` on.
    void write(const RowResults& out, int64_t first, int64_t count, int64_t strip) const {
        const size_t size = static_cast<size_t>(count) * 8;
        for (int field = 0; field < kReals; ++field) std::memcpy(&real(out, field, first), reals_[field], size);
        for (int field = 0; field < kWholes; ++field) std::memcpy(&whole(out, field, first), wholes_[field], size);
        std::memcpy(out.at_worst + first, at_worst_, size);
        for (int64_t i = 0; i < count; ++i) out.strip[first + i] = strip;
    }

    // Merges further columns, of which the first is `column`, into the results of `count` rows from row `first` on.
    void add(const RowResults& out, int64_t first, int64_t count, int64_t strip, int64_t column) const {
        for (int field = 1; field < kReals; ++field) {
            for (int64_t i = 0; i < count; ++i) real(out, field, first + i) += reals_[field][i];
        }
        for (int field = 1; field < kWholes; ++field) {
            for (int64_t i = 0; i < count; ++i) whole(out, field, first + i) += wholes_[field][i];
        }
        for (int64_t i = 0; i < count; ++i) {
            double& most = real(out, 0, first + i);
            int64_t& place = whole(out, 0, first + i);
            if (wholes_[0][i] < 0 || (place >= 0 && reals_[0][i] <= most)) continue;
            most = reals_[0][i], place = column + wholes_[0][i];
            out.at_worst[first + i] = at_worst_[i], out.strip[first + i] = strip;
        }
    }

  private:
    static constexpr int kReals = 6, kWholes = 8;

    static double& real(const RowResults& out, int field, int64_t row) { return out.floats[field * out.rows + row]; }
    static int64_t& whole(const RowResults& out, int field, int64_t row) {
        return out.integers[field * out.rows + row];
    }

    double reals_[kReals][kRows], at_worst_[kRows];
    int64_t wholes_[kWholes][kRows];
};

}  // namespace ts
