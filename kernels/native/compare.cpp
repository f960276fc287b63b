// Two matrices compared row by row in one pass; the plain reference is in compare.py.
//
// Three ways, chosen per pair of dtypes: float32 sums within a block, checked afterwards and redone in double where
// float32 cannot be trusted (non-finite values, extreme magnitudes); double throughout; and exact integers.

#include "decode.h"
#include "lanes.h"

namespace ts {
namespace {

__extension__ typedef __int128 Wide;

// ---- float32 within the block

using FloatBlock = bool (*)(const Sides&, const Tolerance&, Row*);

#define TS_BLOCK(name, A, B)                                                      \
    TS_CLONES bool name(const Sides& sides, const Tolerance& t, Row* row) {       \
        if (t.any) return float_block<A, B, true>(sides, t, row);                 \
        return float_block<A, B, false>(sides, t, row);                           \
    }
TS_BLOCK(float32_block, Float32, Float32)
TS_BLOCK(float16_block, Float16, Float16)
TS_BLOCK(bfloat16_block, BFloat16, BFloat16)
TS_BLOCK(float32_bfloat16_block, Float32, BFloat16)
TS_BLOCK(bfloat16_float32_block, BFloat16, Float32)
#undef TS_BLOCK

// ---- double, everything masked

struct Item {  // one pair of float64 values, by its bits
    double a, b;  // 0 unless both are finite
    uint64_t distance;
    bool finite_a, finite_b, same_class;

    TS_INLINE Item(const Sides& s, int64_t i) {
        constexpr uint64_t kInfinity = Float64::kNonfinite;
        const uint64_t bits_a = load<uint64_t>(s.baseline, i), bits_b = load<uint64_t>(s.target, i);
        const uint64_t size_a = bits_a & kMagnitude<Float64>, size_b = bits_b & kMagnitude<Float64>;
        finite_a = size_a < kInfinity, finite_b = size_b < kInfinity;
        same_class = (bits_a == bits_b) | ((size_a > kInfinity) & (size_b > kInfinity));  // read where neither is finite
        const uint64_t keep = finite_a & finite_b ? ~uint64_t(0) : 0;
        a = bit_cast<double>(bits_a & keep), b = bit_cast<double>(bits_b & keep);
        distance = bit_cast<uint64_t>(a - b) & kMagnitude<Float64>;
    }
};

TS_CLONES void double_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    const Sides s = sides;
    const double atol = tolerance.atol, rtol = tolerance.rtol;
    double sum_abs = 0, diff = 0, base = 0, target = 0, dot = 0;
    int64_t most = 0, finite = 0, finite_a = 0, finite_b = 0, equal = 0, over = 0, agree = 0;
    for (int64_t i = 0; i < s.count; ++i) {
        const Item item(s, i);
        const bool both = item.finite_a & item.finite_b, neither = !item.finite_a & !item.finite_b;
        const double distance = bit_cast<double>(item.distance);
        const int64_t bits = static_cast<int64_t>(item.distance);
        most = bits > most ? bits : most;
        finite += both;
        finite_a += item.finite_a;
        finite_b += item.finite_b;
        equal += both & (item.a == item.b);
        agree += neither & item.same_class;
        over += distance > atol + rtol * __builtin_fabs(item.a);
        sum_abs += distance;
        diff += distance * distance;
        base += item.a * item.a;
        target += item.b * item.b;
        dot += item.a * item.b;
    }
    const int64_t mismatch = s.count - finite - agree;
    row->sum_abs += sum_abs;
    row->sum_sq_diff += diff;
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += dot;
    row->finite += finite;
    row->nonfinite_baseline += s.count - finite_a;
    row->nonfinite_target += s.count - finite_b;
    row->mismatch += mismatch;
    row->equal += equal + agree;
    row->over += over + mismatch;
    const double largest = bit_cast<double>(most);
    if (finite && largest > row->max_abs) {
        row->max_abs = largest;
        row->argmax = s.column + find_first(s.count, [&](int64_t i) {
            const Item item(s, i);
            return item.finite_a & item.finite_b & (static_cast<int64_t>(item.distance) == most);
        });
    }
}

// ---- integers, exactly: float64 holds no neighbours above 2^53

template <class A, class B>
void exact_block(const Sides& s, const Tolerance& t, Row* row) {
    for (int64_t i = 0; i < s.count; ++i) {
        const A left = load<A>(s.baseline, i);
        const B right = load<B>(s.target, i);
        const Wide difference = static_cast<Wide>(left) - static_cast<Wide>(right);
        const double distance = static_cast<double>(difference < 0 ? -difference : difference);
        const double a = static_cast<double>(left), b = static_cast<double>(right);
        if (distance > row->max_abs) row->max_abs = distance, row->argmax = s.column + i;
        row->equal += difference == 0;
        row->over += distance > t.atol + t.rtol * __builtin_fabs(a);
        row->sum_abs += distance;
        row->sum_sq_diff += distance * distance;
        row->sum_sq_baseline += a * a;
        row->sum_sq_target += b * b;
        row->dot += a * b;
    }
    row->finite += s.count;
}

using PlainBlock = void (*)(const Sides&, const Tolerance&, Row*);

// ---- dispatch

TS_CLONES void to_float(int dtype, const uint8_t* bytes, int64_t n, float* out) { decode_number(dtype, bytes, n, out); }
TS_CLONES void to_double(int dtype, const uint8_t* bytes, int64_t n, double* out) { decode_number(dtype, bytes, n, out); }

FloatBlock choose_float(int a, int b) {
    if (a == b && a == kBFloat16) return bfloat16_block;
    if (a == b && a == kFloat16) return float16_block;
    if (a == kFloat32 && b == kBFloat16) return float32_bfloat16_block;
    if (a == kBFloat16 && b == kFloat32) return bfloat16_float32_block;
    return float32_block;
}

PlainBlock choose_exact(int a, int b) {
    if (a == kUint64) return b == kUint64 ? exact_block<uint64_t, uint64_t> : exact_block<uint64_t, int64_t>;
    return b == kUint64 ? exact_block<int64_t, uint64_t> : exact_block<int64_t, int64_t>;
}

// How one pair of dtypes is compared, and the room to widen a block of either side.
class Comparison {
  public:
    Comparison(int a, int b, double atol, double rtol) : types_{a, b}, tolerance_(atol, rtol) {
        exact_ = is_integer(a) && is_integer(b) && (is_wide_integer(a) || is_wide_integer(b));
        float_ = fits_float(a) && fits_float(b) && tolerance_.fits_float;
        block_ = choose_float(a, b);
        direct_ = block_ != float32_block;
    }

    void block(const Sides& sides, Row* row) {
        if (exact_) return choose_exact(types_[0], types_[1])(whole(sides), tolerance_, row);
        if (float_ && block_(direct_ ? sides : floats(sides), tolerance_, row)) return;
        double_block(doubles(sides), tolerance_, row);
    }

    void row(const uint8_t* baseline, const uint8_t* target, int64_t width, Row* row) {
        const int64_t step_a = kItemSize[types_[0]], step_b = kItemSize[types_[1]];
        for (int64_t column = 0; column < width; column += kBlock) {
            const int64_t count = width - column < kBlock ? width - column : kBlock;
            const uint8_t *a = baseline + column * step_a, *b = target + column * step_b;
            block({a, b, count, column}, row);
        }
    }

  private:
    template <class Widen>
    Sides widened(const Sides& s, int kept, int also_kept, Widen widen) {
        Sides out = s;
        const uint8_t** sides[] = {&out.baseline, &out.target};
        for (int i = 0; i < 2; ++i) {
            if (types_[i] == kept || types_[i] == also_kept) continue;
            widen(types_[i], *sides[i], s.count, room_[i]);
            *sides[i] = reinterpret_cast<const uint8_t*>(room_[i]);
        }
        return out;
    }

    Sides floats(const Sides& s) {
        return widened(s, kFloat32, kFloat32, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            to_float(type, bytes, n, static_cast<float*>(out));
        });
    }

    Sides doubles(const Sides& s) {
        return widened(s, kFloat64, kFloat64, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            to_double(type, bytes, n, static_cast<double*>(out));
        });
    }

    Sides whole(const Sides& s) {
        return widened(s, kInt64, kUint64, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            decode_integer(type, bytes, n, static_cast<int64_t*>(out));
        });
    }

    int types_[2];
    Tolerance tolerance_;
    bool exact_, float_, direct_;
    FloatBlock block_;
    alignas(64) double room_[2][kBlock];
};

void store(const Row& row, int64_t index, int64_t rows, double* floats, int64_t* integers) {
    const double values[] = {row.argmax < 0 ? 0 : row.max_abs, row.sum_abs, row.sum_sq_diff,
                             row.sum_sq_baseline, row.sum_sq_target, row.dot};
    const int64_t counts[] = {row.argmax, row.equal, row.over, row.finite,
                              row.nonfinite_baseline, row.nonfinite_target, row.mismatch};
    for (int64_t i = 0; i < 6; ++i) floats[i * rows + index] = values[i];
    for (int64_t i = 0; i < 7; ++i) integers[i * rows + index] = counts[i];
}

}  // namespace
}  // namespace ts

// Row indices may be null: every row in turn. Strides are in bytes; results are [field][row].
TS_EXPORT void ts_compare_rows(const void* baseline, const void* target, int baseline_dtype, int target_dtype,
                               int64_t baseline_stride, int64_t target_stride, const int64_t* baseline_rows,
                               const int64_t* target_rows, int64_t rows, int64_t width, double atol, double rtol,
                               double* floats, int64_t* integers) {
    ts::Comparison comparison(baseline_dtype, target_dtype, atol, rtol);
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t a = baseline_rows ? baseline_rows[i] : i, b = target_rows ? target_rows[i] : i;
        ts::Row row;
        comparison.row(static_cast<const uint8_t*>(baseline) + a * baseline_stride,
                       static_cast<const uint8_t*>(target) + b * target_stride, width, &row);
        ts::store(row, i, rows, floats, integers);
    }
}
