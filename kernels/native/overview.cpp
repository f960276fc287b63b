// The rows of a comparison as one: their sums, and how the errors of the rows are distributed. The plain reference is in
// overview.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "overview.h"

namespace ts {
namespace {

constexpr double kInfinity = __builtin_inf(), kNan = __builtin_nan("");
constexpr double kSmallRow = 0.25;                         // SMALL_ROW in overview.py
constexpr double kQuantiles[] = {0.5, 0.9, 0.98, 1.0};     // QUANTILES

// As RowMeasures has them: [field][row].
enum Float { kMaxAbs, kSumAbs, kDiff, kBaseline, kTarget, kDot, kFloats };
enum Integer { kArgmax, kEqual, kOver, kFinite, kNonfiniteBaseline, kNonfiniteTarget, kMismatch, kWidth, kIntegers };

struct Overview {  // in the order of _LAYOUT
    double sums[kFloats] = {};  // the largest in place of a sum of kMaxAbs
    double quantiles[4] = {}, element = 0, gain = 0, gain_sd = 0, peak = 0;
    int64_t counts[kIntegers] = {};  // the column of the largest distance in place of kArgmax
    int64_t row = -1;                // of the largest distance
    int64_t worst = 0;               // the row whose error is largest
    int64_t unequal = 0;             // rows
};

static_assert(sizeof(Overview) == kOverviewBytes, "the size is told apart in overview.h");

double ratio(double part, double whole) { return whole > 0 ? part / whole : part > 0 ? kInfinity : 0; }

bool any_nan(const std::vector<double>& values) {
    return std::any_of(values.begin(), values.end(), [](double x) { return x != x; });
}

double median(std::vector<double> values) {
    if (any_nan(values)) return kNan;
    const size_t low = (values.size() - 1) / 2, high = values.size() / 2;
    std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(low), values.end());
    const double lower = values[low];
    const double upper = high == low ? lower : *std::min_element(values.begin() + static_cast<int64_t>(high), values.end());
    return lower == upper ? lower : lower + (upper - lower) / 2;
}

void quantiles_of(std::vector<double> values, double* out) {
    const bool unknown = any_nan(values);
    if (!unknown) std::sort(values.begin(), values.end());
    const double last = static_cast<double>(values.size() - 1);
    for (int i = 0; i < 4; ++i) out[i] = unknown ? kNan : values[static_cast<size_t>(std::ceil(kQuantiles[i] * last))];
}

void add_up(const double* floats, const int64_t* integers, int64_t rows, Overview* all) {
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t column = integers[kArgmax * rows + i];
        if (column >= 0 && (all->row < 0 || floats[kMaxAbs * rows + i] > all->sums[kMaxAbs])) {
            all->row = i, all->sums[kMaxAbs] = floats[kMaxAbs * rows + i], all->counts[kArgmax] = column;
        }
        all->unequal += integers[kEqual * rows + i] < integers[kWidth * rows + i];
    }
    for (int field = kSumAbs; field < kFloats; ++field) {
        for (int64_t i = 0; i < rows; ++i) all->sums[field] += floats[field * rows + i];
    }
    for (int field = kEqual; field < kIntegers; ++field) {
        for (int64_t i = 0; i < rows; ++i) all->counts[field] += integers[field * rows + i];
    }
}

// Each row's error, and of which row it is the largest; a mismatch of non-finite values is larger than any.
void add_errors(const double* floats, const int64_t* mismatch, int64_t rows, double* errors, Overview* all) {
    const double *diff = floats + kDiff * rows, *base = floats + kBaseline * rows;
    std::vector<double> sizes(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) sizes[static_cast<size_t>(i)] = std::sqrt(base[i]);
    const double least = kSmallRow * median(sizes);
    double most = -1;
    for (int64_t i = 0; i < rows; ++i) {
        const double size = sizes[static_cast<size_t>(i)];
        errors[i] = ratio(std::sqrt(diff[i]), size < least || least != least ? least : size);
        const double rank = mismatch[i] > 0 ? kInfinity : errors[i];
        if (most == most && (rank > most || rank != rank)) most = rank, all->worst = i;
    }
}

void add_spread(const double* floats, const int64_t* widths, const double* at_worst, int64_t rows, const double* errors,
                Overview* all) {
    const double *base = floats + kBaseline * rows, *most = floats + kMaxAbs * rows, *dot = floats + kDot * rows;
    std::vector<double> rms(static_cast<size_t>(rows)), elements(rms), gains(rms);
    double mean = 0;
    for (int64_t i = 0; i < rows; ++i) {
        double& here = rms[static_cast<size_t>(i)];
        here = std::sqrt(base[i] / static_cast<double>(widths[i] > 1 ? widths[i] : 1));
        mean += here / static_cast<double>(rows);
    }
    const double middle = median(rms), small = kSmallRow * (middle == 0 ? mean : middle);
    for (int64_t i = 0; i < rows; ++i) {
        const size_t at = static_cast<size_t>(i);
        double size = rms[at] < small || small != small ? small : rms[at];
        const double element = std::fabs(at_worst[i]);
        size = element > size || element != element ? element : size;
        elements[at] = ratio(most[i], size);
        gains[at] = base[i] > 0 ? dot[i] / base[i] - 1 : 0;
    }
    quantiles_of(std::vector<double>(errors, errors + rows), all->quantiles);
    all->element = median(elements);
    all->gain = median(gains);
    all->peak = any_nan(elements) ? kNan : *std::max_element(elements.begin(), elements.end());
    for (double& gain : gains) gain = std::fabs(gain - all->gain);
    all->gain_sd = 1.4826 * median(gains);
}

}  // namespace
}  // namespace ts

// The spread stays 0 where no row differs.
void ts_overview(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows, double* errors,
                 void* result) {
    using namespace ts;
    Overview all;
    add_up(floats, integers, rows, &all);
    add_errors(floats, integers + kMismatch * rows, rows, errors, &all);
    if (all.sums[kDiff] != 0) add_spread(floats, integers + kWidth * rows, at_worst, rows, errors, &all);
    std::memcpy(result, &all, sizeof all);
}
