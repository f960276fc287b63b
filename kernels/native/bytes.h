// One-byte elements: a histogram of the 256 codes determines all statistics exactly.
#pragma once

#include "multiset_hash.h"
#include "summary.h"

namespace ts {
namespace {

struct Ones {
    int64_t count;
    bool all;  // every byte is 0 or 1
};

TS_CLONES Ones count_ones(const uint8_t* bytes, int64_t n) {  // at most one block
    uint8_t high = 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) high = bytes[i] > high ? bytes[i] : high;
    for (int64_t i = 0; i < n; ++i) sum += bytes[i];
    return {sum, high <= 1};
}

struct Histogram {
    uint64_t counts[4][256] = {};  // four copies, so that adjacent equal values do not wait for each other's increment

    void add(const uint8_t* bytes, int64_t n) {
        const Ones ones = count_ones(bytes, n);
        if (ones.all) {  // masks: adjacent values are nearly always equal
            counts[0][0] += static_cast<uint64_t>(n - ones.count), counts[0][1] += static_cast<uint64_t>(ones.count);
            return;
        }
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const uint64_t eight = load<uint64_t>(bytes + i, 0);
            for (int part = 0; part < 8; ++part) ++counts[part & 3][(eight >> (8 * part)) & 0xFF];
        }
        for (; i < n; ++i) ++counts[0][bytes[i]];
    }
};

double byte_value(int dtype, int code) {
    if (const Table* table = table_of(dtype)) return table->values[code];
    return dtype == kInt8 ? static_cast<int8_t>(code) : dtype == kBool ? code != 0 : code;
}

void digest_histogram(int dtype, const Histogram& histogram, Summary* out) {
    const Table* table = table_of(dtype);
    for (int code = 0; code < 256; ++code) {
        uint64_t total = 0;
        for (const auto& lane : histogram.counts) total += lane[code];
        const int64_t n = static_cast<int64_t>(total);
        if (!n) continue;
        out->bag += total * bag_of_byte(code);
        const double value = byte_value(dtype, code), times = static_cast<double>(n);
        const uint64_t bits = bit_cast<uint64_t>(value), magnitude = bits & kMagnitude<Float64>;
        if (magnitude > Float64::kNonfinite) {
            out->nan += n;
        } else if (magnitude == Float64::kNonfinite) {
            (bits == magnitude ? out->posinf : out->neginf) += n;
        } else {
            out->finite += n;
            out->zeros += magnitude == 0 ? n : 0;
            out->subnormals += table && magnitude && (code & 0x7F) < table->min_normal ? n : 0;
            out->sum += value * times;
            out->sumsq += value * value * times;
            out->extend(value, value);
        }
    }
}

void summarize_bytes(const uint8_t* bytes, int dtype, uint8_t* target, Summary* out) {
    Histogram histogram;
    for (int64_t done = 0; done < out->count; done += block_of(1)) {
        const int64_t end = done + block_of(1) < out->count ? done + block_of(1) : out->count;
        hash_bytes(bytes + done, end - done, done, &out->hash);
        histogram.add(bytes + done, end - done);
        if (target) std::memcpy(target + done, bytes + done, static_cast<size_t>(end - done));
    }
    digest_histogram(dtype, histogram, out);
}

}  // namespace
}  // namespace ts
