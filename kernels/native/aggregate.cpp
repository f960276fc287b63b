// Aggregation of row measures: sums over rows, and the distribution of row errors. The numpy references are in
// aggregate.py and deviation.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "aggregate.h"
#include "order_statistics.h"
#include "row_blocks.h"

namespace ts {
namespace {

constexpr double kInfinity = __builtin_inf(), kNan = __builtin_nan("");
constexpr double kSmallRow = 0.25;                      // SMALL_ROW in aggregate.py
constexpr int64_t kNarrow = 8;                          // MIN_ROW_ELEMENTS
constexpr double kQuantiles[] = {0.5, 0.9, 0.98, 1.0};  // QUANTILES

// Fields of RowMeasures: [field][row].
enum Float { kMaxAbs, kSumAbs, kDiff, kBaseline, kTarget, kDot, kFloats };
enum Integer { kArgmax, kEqual, kOver, kFinite, kNonfiniteBaseline, kNonfiniteTarget, kMismatch, kWidth, kIntegers };

// A range of adjacent rows; the pointers start at its first row, and the fields of a row are `stride` elements apart.
struct Section {
    const double* floats;
    const int64_t* integers;
    const double* at_worst;
    int64_t rows, stride;

    const double* operator[](Float field) const { return floats + field * stride; }
    const int64_t* operator[](Integer field) const { return integers + field * stride; }
};

struct Overview {               // in the order of _LAYOUT in aggregate.py
    double sums[kFloats] = {};  // kMaxAbs: the maximum instead of a sum
    double quantiles[4] = {}, element = 0, gain = 0, gain_sd = 0, peak = 0;
    int64_t counts[kIntegers] = {};  // kArgmax: the column of the largest distance
    int64_t row = -1;                // row of the largest distance
    int64_t worst = 0;               // row with the largest error
    int64_t unequal = 0;             // number of unequal rows
};

static_assert(sizeof(Overview) == kOverviewBytes, "the size is told apart in aggregate.h");

double ratio(double part, double whole) { return whole > 0 ? part / whole : part > 0 ? kInfinity : 0; }

bool any_nan(const std::vector<double>& values) {
    return std::any_of(values.begin(), values.end(), [](double x) { return x != x; });
}

// Returns the median without the `skipped` smallest values; values must not be NaN. Reorders `values` instead of
// copying, because there may be millions of rows.
double middle_of(std::vector<double>& values, size_t skipped) {
    const size_t low = (values.size() + skipped - 1) / 2, high = (values.size() + skipped) / 2;
    const double lower = select_element(values, low);
    const double upper =
        high == low ? lower : *std::min_element(values.begin() + static_cast<int64_t>(high), values.end());
    return lower == upper ? lower : lower + (upper - lower) / 2;
}

// Returns the median, or NaN if a value is NaN. Reorders `values`.
double median(std::vector<double>& values) { return any_nan(values) ? kNan : middle_of(values, 0); }

// Returns the quantile, rounded up to an element. Values must not be NaN; reorders them.
double quantile(std::vector<double>& values, double share) {
    return select_element(values, static_cast<size_t>(std::ceil(share * static_cast<double>(values.size() - 1))));
}

// Returns the quantile, interpolated as in numpy; see `between` in deviation.py. Values must not be NaN; reorders them.
double between(std::vector<double>& values, double share) {
    const double place = share * static_cast<double>(values.size() - 1);
    const size_t low = static_cast<size_t>(place);
    const double lower = select_element(values, low), rest = place - static_cast<double>(low);
    if (rest == 0) return lower;
    const double upper = *std::min_element(values.begin() + static_cast<int64_t>(low) + 1, values.end());
    return lower == upper ? lower : lower + (upper - lower) * rest;
}

void quantiles_of(std::vector<double>& values, double* out) {
    const bool unknown = any_nan(values);
    for (int i = 0; i < 4; ++i) out[i] = unknown ? kNan : quantile(values, kQuantiles[i]);
}

void add_up(const Section& some, Overview* all) {
    for (int64_t i = 0; i < some.rows; ++i) {
        const int64_t column = some[kArgmax][i];
        if (column >= 0 && (all->row < 0 || some[kMaxAbs][i] > all->sums[kMaxAbs])) {
            all->row = i, all->sums[kMaxAbs] = some[kMaxAbs][i], all->counts[kArgmax] = column;
        }
        all->unequal += some[kEqual][i] < some[kWidth][i];
    }
    for (int field = kSumAbs; field < kFloats; ++field) {
        for (int64_t i = 0; i < some.rows; ++i) all->sums[field] += some[Float(field)][i];
    }
    for (int field = kEqual; field < kIntegers; ++field) {
        for (int64_t i = 0; i < some.rows; ++i) all->counts[field] += some[Integer(field)][i];
    }
}

// Returns the lower bound on row sizes, see least_size in aggregate.py. Reorders `sizes`, in which zeros sort first.
double least_size(const Section& some, std::vector<double>& sizes) {
    if (any_nan(sizes)) return kNan;
    const auto zeros = static_cast<size_t>(std::count(sizes.begin(), sizes.end(), 0.0));
    if (zeros == sizes.size()) return 0;
    const double least = kSmallRow * middle_of(sizes, zeros);
    const bool is_narrow = *std::max_element(some[kWidth], some[kWidth] + some.rows) <= kNarrow;
    return is_narrow ? std::max(least, middle_of(sizes, 0)) : least;
}

// Computes the error of each row and the row with the largest one; a mismatch of non-finite values ranks above any
// error.
void add_errors(const Section& some, double* errors, std::vector<double>& values, Overview* all) {
    for (int64_t i = 0; i < some.rows; ++i) values[static_cast<size_t>(i)] = std::sqrt(some[kBaseline][i]);
    const double least = least_size(some, values);
    double most = -1;
    for (int64_t i = 0; i < some.rows; ++i) {
        const double size = std::sqrt(some[kBaseline][i]);
        errors[i] = ratio(std::sqrt(some[kDiff][i]), size < least || least != least ? least : size);
        const double rank = some[kMismatch][i] > 0 ? kInfinity : errors[i];
        if (most == most && (rank > most || rank != rank)) most = rank, all->worst = i;
    }
}

double rms_of(const Section& some, int64_t row) {
    const int64_t width = some[kWidth][row];
    return std::sqrt(some[kBaseline][row] / static_cast<double>(width > 1 ? width : 1));
}

double gain_of(const Section& some, int64_t row) {
    return some[kBaseline][row] > 0 ? some[kDot][row] / some[kBaseline][row] - 1 : 0;
}

void add_elements(const Section& some, std::vector<double>& values, Overview* all) {
    for (int64_t i = 0; i < some.rows; ++i) values[static_cast<size_t>(i)] = rms_of(some, i);
    const double small = least_size(some, values);
    for (int64_t i = 0; i < some.rows; ++i) {
        const double rms = rms_of(some, i), element = std::fabs(some.at_worst[i]);
        double size = rms < small || small != small ? small : rms;
        size = element > size || element != element ? element : size;
        values[static_cast<size_t>(i)] = ratio(some[kMaxAbs][i], size);
    }
    all->element = median(values);
    all->peak = any_nan(values) ? kNan : *std::max_element(values.begin(), values.end());
}

void add_gains(const Section& some, std::vector<double>& values, Overview* all) {
    for (int64_t i = 0; i < some.rows; ++i) values[static_cast<size_t>(i)] = gain_of(some, i);
    all->gain = median(values);
    for (double& gain : values) gain = std::fabs(gain - all->gain);
    all->gain_sd = 1.4826 * median(values);
}

// Per-thread buffers, kept for the next tensor: page faults on fresh memory would cost more than comparing a small
// tensor.
struct DeviationRoom {
    std::vector<double> floats, at_worst, errors, values;
    std::vector<int64_t> integers, strip;

    void resize(int64_t rows) {
        const auto size = static_cast<size_t>(rows);
        for (auto* each : {&at_worst, &errors, &values}) each->resize(size);
        floats.resize(kFloats * size), integers.resize(kIntegers * size), strip.resize(size);
    }
};

}  // namespace

Deviation deviation_of(const std::vector<Strip>& strips, int64_t rows, double share) {
    static thread_local DeviationRoom room;
    Deviation found;
    if (rows == 0) return found;
    room.resize(rows);
    const RowResults out{room.floats.data(), room.integers.data(), room.at_worst.data(), room.strip.data(), rows};
    for (size_t i = 0; i < strips.size(); ++i) {
        const bool is_first = i == 0 || strips[i].row != strips[i - 1].row;
        compare_strip(strips[i], static_cast<int64_t>(i), is_first, 0, 0, out);
    }
    const Section some{out.floats, out.integers, out.at_worst, rows, rows};
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t width = some[kWidth][i];
        found.elements += width, found.width = std::max(found.width, width);
        found.unequal += width - some[kEqual][i], found.mismatched += some[kMismatch][i];
    }
    Overview all;
    add_errors(some, room.errors.data(), room.values, &all);
    room.values = room.errors;
    const bool is_known = !any_nan(room.values);
    found.worst = is_known ? *std::max_element(room.values.begin(), room.values.end()) : kNan;
    found.typical = !is_known ? kNan : share < 0 ? quantile(room.values, 0.5) : between(room.values, share);
    for (int64_t i = 0; i < rows; ++i) {
        if (share >= 0 && !(room.errors[static_cast<size_t>(i)] <= found.typical)) continue;
        found.power += some[kBaseline][i], found.dot += some[Float::kDot][i];
    }
    return found;
}

}  // namespace ts

// Quantiles, element, gain, gain_sd and peak are left at 0 in a section without differences.
void ts_overviews(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows,
                  const int64_t* bounds, int64_t sections, double* errors, void* results) {
    using namespace ts;
    std::vector<double> values;  // scratch, one number per row; grows to the largest section
    for (int64_t i = 0; i < sections; ++i) {
        const int64_t first = bounds[i];
        const Section some{floats + first, integers + first, at_worst + first, bounds[i + 1] - first, rows};
        Overview all;
        if (some.rows > 0) {
            values.resize(static_cast<size_t>(some.rows));
            add_up(some, &all);
            add_errors(some, errors + first, values, &all);
            if (all.sums[kDiff] != 0) {
                add_elements(some, values, &all);
                add_gains(some, values, &all);
                values.assign(errors + first, errors + first + some.rows);
                quantiles_of(values, all.quantiles);
            }
        }
        std::memcpy(static_cast<uint8_t*>(results) + i * kOverviewBytes, &all, sizeof all);
    }
}
