// Order statistics of doubles without NaN: the k-th smallest element, as std::nth_element but without a branch per
// element, which would be unpredictable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ts {

// Moves the elements of [first, last) for which `is_left` holds to the front; returns their end.
template <class Test>
inline double* partition_without_branches(double* first, double* last, Test is_left) {
    double* store = first;
    for (double* at = first; at < last; ++at) {
        const double value = *at;
        *at = *store;
        *store = value;
        store += is_left(value);
    }
    return store;
}

// Returns the element at index `place` in ascending order. Reorders `values`: no element after `place` is smaller.
inline double select_element(std::vector<double>& values, size_t place) {
    constexpr int64_t kFew = 32;
    constexpr int kRounds = 48;  // 10 million random values take 30; std::nth_element bounds the rest
    double *first = values.data(), *last = first + values.size(), *const wanted = first + place;
    for (int round = 0; last - first > kFew && round < kRounds; ++round) {
        const double low = *first, middle = first[(last - first) / 2], high = last[-1];
        const double pivot = std::max(std::min(low, middle), std::min(std::max(low, middle), high));
        double* const bound = partition_without_branches(first, last, [=](double x) { return x < pivot; });
        if (wanted < bound) {
            last = bound;
            continue;
        }
        first = partition_without_branches(bound, last, [=](double x) { return x == pivot; });
        if (wanted < first) return pivot;
    }
    std::nth_element(first, wanted, last);
    return *wanted;
}

}  // namespace ts
