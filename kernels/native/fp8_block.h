// Comparison of FP8 values, 64 at a time, on CPUs with byte permutes and bfloat16 dot products (TS_CODES).
//
// Every value is converted to bfloat16 by table lookup. Products are accumulated in float32, two at a time. Differences
// are computed in float32 only for pairs whose codes differ; those pairs are compressed first, and are few if rounding
// is the cause.
//
// Included once, for 64-byte vectors, after block.h.

namespace ts {
namespace TS_VECTORS {

struct CodeBytes {  // low and high byte of the bfloat16 of each magnitude
    alignas(64) uint8_t low[128], high[128];

    explicit CodeBytes(const Table& table) {
        for (int code = 0; code < 128; ++code) {
            const uint32_t bits = bit_cast<uint32_t>(table.values[code]);
            low[code] = static_cast<uint8_t>(bits >> 16), high[code] = static_cast<uint8_t>(bits >> 24);
        }
    }
};

template <class F>
inline const CodeBytes kCodeBytes{F::kTable};

// 64 values as bfloat16. Their order is unspecified, but the same for both sides.
struct CodeValues {
    __m512i first, second;
};

class CodeReader {
  public:
    TS_CODES TS_INLINE explicit CodeReader(const CodeBytes& bytes) {
        for (int half = 0; half < 2; ++half) {
            low_[half] = _mm512_load_si512(bytes.low + 64 * half),
            high_[half] = _mm512_load_si512(bytes.high + 64 * half);
        }
    }

    TS_CODES TS_INLINE CodeValues operator()(__m512i codes) const {
        constexpr int kOrAnd = 0xF8;  // a | (b & c)
        const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
        const __m512i size = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
        const __m512i high = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8(-128), kOrAnd);
        return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    }

  private:
    __m512i low_[2], high_[2];
};

// Returns sum + products of adjacent bfloat16 values, two per lane.
TS_CODES TS_INLINE Floats add_products(Floats sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

TS_CODES TS_INLINE void add_codes(__m512i a, __m512i b, Products<float>* sums) {
    sums->base.recent = add_products(sums->base.recent, a, a);
    sums->target.recent = add_products(sums->target.recent, b, b);
    sums->dot.recent = add_products(sums->dot.recent, a, b);
}

// Adds the differences of two vectors: the values are interleaved and multiplied by (1, -1) in a dot product, so that
// each difference is rounded once.
TS_CODES TS_INLINE void add_differences(__m512i a, __m512i b, Distances<float>* distances) {
    const __m512i signs = _mm512_set1_epi32(static_cast<int32_t>(0xBF803F80));
    distances->add(add_products(Floats{}, _mm512_unpacklo_epi16(a, b), signs));
    distances->add(add_products(Floats{}, _mm512_unpackhi_epi16(a, b), signs));
}

// Loads 64 codes, or `count` codes padded with zeros.
TS_CODES TS_INLINE __m512i load_codes(const uint8_t* bytes, int64_t count) {
    if (count >= 64) return _mm512_loadu_si512(bytes);
    return _mm512_maskz_loadu_epi8(_bzhi_u64(~uint64_t(0), static_cast<unsigned>(count)), bytes);
}

// The pairs of a block whose codes differ, in order.
class DifferingCodes {
  public:
    TS_CODES TS_INLINE void add(int64_t start, __m512i a, __m512i b, int64_t* count) {
        const uint64_t differ = _mm512_cmpneq_epi8_mask(a, b);
        _mm512_storeu_si512(baseline_ + *count, _mm512_maskz_compress_epi8(differ, a));
        _mm512_storeu_si512(target_ + *count, _mm512_maskz_compress_epi8(differ, b));
        differ_[start / 64] = differ;
        *count += __builtin_popcountll(differ);
    }

    // Adds the distances of `count` pairs; returns how many pairs are equal numbers after all (0 and -0).
    TS_CODES TS_INLINE int64_t add_to(const CodeReader& read, int64_t count, Distances<float>* distances) const {
        int64_t zeros = 0;
        for (int64_t start = 0; start < count; start += kStretch) {
            for (int64_t i = start; i < count && i < start + kStretch; i += 64) {
                const __m512i a = load_codes(baseline_ + i, count - i), b = load_codes(target_ + i, count - i);
                const CodeValues x = read(a), y = read(b);
                add_differences(x.first, y.first, distances);
                add_differences(x.second, y.second, distances);
                zeros += __builtin_popcountll(_mm512_cmpeq_epi8_mask(_mm512_or_si512(a, b), _mm512_set1_epi8(-128)));
            }
            distances->end_stretch(start);
            if ((start + kStretch) % kBlock == 0) distances->carry();
        }
        return zeros;
    }

    // Returns the first element with the largest distance.
    template <class F>
    TS_CODES TS_INLINE int64_t place(const Distances<float>& distances, float most, int64_t count) const {
        if (most == 0) return 0;
        int64_t rank = place_of<F, F>({baseline_, target_, count, 0}, distances.first_at(most, count), most), group = 0;
        for (int64_t here; (here = __builtin_popcountll(differ_[group])) <= rank; ++group) rank -= here;
        return group * 64 + __builtin_ctzll(_pdep_u64(uint64_t(1) << rank, differ_[group]));
    }

  private:
    alignas(64) uint8_t baseline_[kPiece + 64], target_[kPiece + 64];
    uint64_t differ_[kPiece / 64];  // bit mask of the unequal elements
};

TS_INLINE bool is_finite(double value) {
    return (bit_cast<uint64_t>(value) & kMagnitude<Float64>) < Float64::kNonfinite;
}

// Returns false and leaves `row` unchanged if a value is not finite.
template <class F>
TS_CODES TS_INLINE bool code_block(const Sides& sides, Row* row) {
    const Sides s = sides;
    const CodeReader read(kCodeBytes<F>);
    Products<float> products;
    Distances<float> distances;
    DifferingCodes differing;
    int64_t count = 0;
    for (int64_t start = 0; start < s.count; start += kBlock) {
        const int64_t end = start + kBlock < s.count ? start + kBlock : s.count;
        for (int64_t i = start; i < end; i += 64) {
            const __m512i a = load_codes(s.baseline + i, end - i), b = load_codes(s.target + i, end - i);
            fetch_ahead(s, i, i + 64);
            const CodeValues x = read(a), y = read(b);
            add_codes(x.first, y.first, &products);
            add_codes(x.second, y.second, &products);
            differing.add(i, a, b, &count);
        }
        products.carry();
    }
    const double base = products.base.total(), target = products.target.total();
    if (!is_finite(base) || !is_finite(target)) return false;
    if (!F::kHasNegativeZero && !(are_finite<F>(s.baseline, s.count) && are_finite<F>(s.target, s.count))) return false;
    const int64_t unequal = count - differing.add_to(read, count, &distances);
    const float most = distances.largest();
    row->sum_abs += distances.sum_abs.total();
    row->sum_sq_diff += distances.diff.total();
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += products.dot.total();
    row->finite += s.count;
    row->equal += s.count - unequal;
    row->over += unequal;
    if (most > row->max_abs) row->max_abs = most, row->argmax = s.column + differing.place<F>(distances, most, count);
    return true;
}

}  // namespace TS_VECTORS
}  // namespace ts
