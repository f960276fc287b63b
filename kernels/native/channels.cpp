// Per-channel sums over rows of two matrices, in double, and detection of a channel with its own scale; the numpy
// reference is in channels.py.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "decode.h"
#include "order_statistics.h"
#include "row_blocks.h"

namespace ts {
namespace {

constexpr int64_t kKinds = 5;      // kinds of sums, in the order of KINDS in channels.py
constexpr int64_t kColumns = 256;  // columns processed at a time, so that all sums of both halves stay in the L1 cache

TS_CLONES void widen(int dtype, const uint8_t* bytes, int64_t n, double* out) { decode_number(dtype, bytes, n, out); }

constexpr double kInfinity = __builtin_inf();
// The constants of channels.py.
constexpr double kSigma = 7, kQuartile = 20, kLasting = 12, kLeast = 3, kDeviate = 4.9;
constexpr float kTiny = 0x1p-126f;

// Adds one row to the sums; the kinds are `stride` elements apart.
TS_CLONES void add_row(const double* baseline, const double* target, int64_t n, double* sums, int64_t stride) {
    double* __restrict energy = sums, * __restrict fourth = sums + stride, * __restrict product = sums + 2 * stride;
    double* __restrict squared = sums + 3 * stride, * __restrict cubic = sums + 4 * stride;
    for (int64_t i = 0; i < n; ++i) {
        const double square = baseline[i] * baseline[i], change = baseline[i] * (target[i] - baseline[i]);
        energy[i] += square;
        fourth[i] += square * square;
        product[i] += change;
        squared[i] += change * change;
        cubic[i] += square * change;
    }
}

// Returns the element at `place` in ascending order, interpolated with `share` toward the next; reorders `values`.
double between(std::vector<double>& values, size_t place, double share) {
    const double low = select_element(values, place);
    if (share == 0 || place + 1 == values.size()) return low;
    const double high = *std::min_element(values.begin() + static_cast<int64_t>(place) + 1, values.end());
    return low == high ? low : low + (high - low) * share;
}

double median(std::vector<double>& values) {
    return between(values, (values.size() - 1) / 2, values.size() % 2 ? 0 : 0.5);
}

// Returns the limit for a gain as a multiple of its scatter over `rows` rows of equal size: _width in channels.py.
double width(double rows) {
    const double free = std::max(rows, kLeast) - 1, deviate = kDeviate * (8 * free + 3) / (8 * free + 1);
    const double student = std::sqrt(free * std::expm1(deviate * deviate / free)) / (1 - 1 / std::sqrt(free + 1));
    return student > kSigma ? student : kSigma;
}

// The five sums of every channel and their evaluation; one buffer serves all medians.
class Channels {
  public:
    Channels(const double* sums, int64_t width) : sums_(sums), width_(width), room_(static_cast<size_t>(width)) {}

    // As find_channel_reference in channels.py. Sets the noise to infinity if there is no channel; returns false if a
    // number is not finite.
    bool find(ChannelFound* out) {
        double all = 0;
        for (int64_t i = 0; i < 2 * kKinds * width_; ++i) all += sums_[i] * 0;  // 0, or NaN if a sum is not finite
        if (all != all) return false;
        std::vector<double> gain(room_), scatter(room_), effective(room_);
        const double middle = median_of([&](int64_t i) { return both(kEnergy, i); });
        *out = {0, 0, kInfinity};
        for (int64_t i = 0; i < width_; ++i) {
            const size_t at = static_cast<size_t>(i);
            const double energy = both(kEnergy, i), fourth = both(kFourth, i), size = energy > middle ? energy : middle;
            if (size == 0) return true;
            effective[at] = energy > 0 ? energy * energy / fourth : 0;
            gain[at] = both(kProduct, i) / size;
            const double fit = energy > 0 ? both(kProduct, i) / energy : 0;
            const double square = both(kSquared, i) - 2 * fit * both(kCubic, i) + fit * fit * fourth;
            scatter[at] = std::sqrt(square > 0 ? square : 0) / size;
            if (effective[at] != effective[at] || square != square) return false;
        }
        const double common = std::max(kQuartile * quartile(gain), kLasting * lasting());
        double most = -1;
        for (int64_t i = 0; i < width_; ++i) {
            const size_t at = static_cast<size_t>(i);
            const double least = std::max(std::max(kSigma * scatter[at], common), double(kTiny));
            if (std::fabs(gain[at]) / least <= most) continue;
            const bool is_known = effective[at] >= kLeast;
            const double noise = is_known ? std::max(width(effective[at]) * scatter[at], least) : kInfinity;
            const double here = std::fabs(gain[at]) / noise;
            if (here > most) most = here, *out = {i, gain[at], noise};
        }
        return true;
    }

  private:
    enum Kind { kEnergy, kFourth, kProduct, kSquared, kCubic };

    double one(int half, Kind kind, int64_t i) const { return sums_[(half * kKinds + kind) * width_ + i]; }
    double both(Kind kind, int64_t i) const { return one(0, kind, i) + one(1, kind, i); }

    template <class Value>
    double median_of(Value value) {
        for (int64_t i = 0; i < width_; ++i) room_[static_cast<size_t>(i)] = value(i);
        return median(room_);
    }

    double quartile(const std::vector<double>& gain) {
        for (size_t i = 0; i < gain.size(); ++i) room_[i] = std::fabs(gain[i]);
        const double place = 0.25 * static_cast<double>(width_ - 1), low = std::floor(place);
        return between(room_, static_cast<size_t>(low), place - low);
    }

    // Returns the typical persistent gain of a channel: the part that agrees in both halves of the rows.
    double lasting() {
        double middle[2];
        for (int half = 0; half < 2; ++half) middle[half] = median_of([&](int64_t i) { return one(half, kEnergy, i); });
        const auto gain = [&](int half, int64_t i) {
            const double energy = one(half, kEnergy, i), size = energy > middle[half] ? energy : middle[half];
            return size > 0 ? one(half, kProduct, i) / size : 0;
        };
        const double sum = median_of([&](int64_t i) { return std::fabs(gain(0, i) + gain(1, i)); });
        const double apart = median_of([&](int64_t i) { return std::fabs(gain(0, i) - gain(1, i)); });
        const double square = sum * sum - apart * apart;
        return 1.4826 * 0.5 * std::sqrt(square > 0 ? square : 0);
    }

    const double* sums_;
    int64_t width_;
    std::vector<double> room_;
};

}  // namespace

void add_channel_sums(const Strip& strip, double* sums, int64_t total) {
    // A copy of the sums of some columns: kinds at a distance of a power of two would map to the same cache set.
    constexpr int64_t kStride = kColumns + 8;
    alignas(64) double room[2][kColumns], here[2 * kKinds * kStride];
    const Rows &left = strip.sides.baseline, &right = strip.sides.target;
    const int64_t width = strip.sides.width;
    for (int64_t column = 0; column < width; column += kColumns) {
        const int64_t count = width - column < kColumns ? width - column : kColumns;
        const size_t nbytes = static_cast<size_t>(count) * sizeof(double);
        double* const first = sums + strip.column + column;
        for (int64_t kind = 0; kind < 2 * kKinds; ++kind)
            std::memcpy(here + kind * kStride, first + kind * total, nbytes);
        for (int64_t i = 0; i < strip.sides.rows; ++i) {
            widen(left.dtype, left.at(i) + column * kItemSize[left.dtype], count, room[0]);
            widen(right.dtype, right.at(i) + column * kItemSize[right.dtype], count, room[1]);
            add_row(room[0], room[1], count, here + (strip.row + i) % 2 * kKinds * kStride, kStride);
        }
        for (int64_t kind = 0; kind < 2 * kKinds; ++kind)
            std::memcpy(first + kind * total, here + kind * kStride, nbytes);
    }
}

bool find_channel(const double* sums, int64_t width, ChannelFound* out) { return Channels(sums, width).find(out); }

}  // namespace ts
