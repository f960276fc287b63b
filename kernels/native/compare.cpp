// Two matrices compared row by row in one pass; the plain reference is in compare.py.
//
// Three ways, chosen per pair of dtypes: float32 sums within a block, checked afterwards and redone in double where
// float32 cannot be trusted (non-finite values, extreme magnitudes); double throughout; and exact integers.

#include "rows.h"
#include "strips.h"
#include "widen.h"

#ifdef TS_WIDE
#define TS_VECTOR 64
#define TS_VECTORS vectors64
#include "lanes.h"
#undef TS_VECTOR
#undef TS_VECTORS
#define TS_VECTOR 32
#define TS_VECTORS vectors32
#include "lanes.h"
#undef TS_VECTOR
#undef TS_VECTORS
#endif
#define TS_VECTOR 16
#define TS_VECTORS vectors16
#include "lanes.h"

namespace ts {
namespace {

__extension__ typedef __int128 Wide;

// ---- float32 within the block

using FloatBlock = bool (*)(const Sides&, const Tolerance&, Row*);

// A target is written out rather than cloned, because a clone is made too late to keep such wide vectors in registers.
#ifdef TS_WIDE
template <class A, class B, bool kTolerance>
TS_WIDE bool wide_float_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors64::float_block<A, B, kTolerance>(sides, t, row);
}

template <class A, class B, bool kTolerance>
TS_AVX2 bool avx2_float_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors32::float_block<A, B, kTolerance>(sides, t, row);
}
#endif

template <class A, class B, bool kTolerance>
bool plain_float_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors16::float_block<A, B, kTolerance>(sides, t, row);
}

template <class A, class B, bool kTolerance>
FloatBlock for_this_processor() {
#ifdef TS_WIDE
    if (kWide) return wide_float_block<A, B, kTolerance>;
    if (kAvx2) return avx2_float_block<A, B, kTolerance>;
#endif
    return plain_float_block<A, B, kTolerance>;
}

template <class A, class B>
FloatBlock float_block_of(bool any_tolerance) {
    return any_tolerance ? for_this_processor<A, B, true>() : for_this_processor<A, B, false>();
}

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

// Whether 52 bits hold every value of a block of integers: then float64 subtracts them exactly.
TS_CLONES bool are_small(int dtype, const uint8_t* bytes, int64_t n) {
    if (!is_wide_integer(dtype)) return true;
    uint64_t any = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t value = load<int64_t>(bytes, i);
        any |= static_cast<uint64_t>(dtype == kInt64 ? value ^ (value >> 63) : value);
    }
    return any < uint64_t(1) << 52;
}

TS_CLONES void to_double(int dtype, const uint8_t* bytes, int64_t n, double* out) { decode_number(dtype, bytes, n, out); }

FloatBlock choose_float(int a, int b, bool any_tolerance) {
    if (a == kBFloat16 && b == kBFloat16) return float_block_of<BFloat16, BFloat16>(any_tolerance);
    if (a == kFloat16 && b == kFloat16) return float_block_of<Float16, Float16>(any_tolerance);
    if (a == kFloat32 && b == kFloat16) return float_block_of<Float32, Float16>(any_tolerance);
    if (a == kFloat16 && b == kFloat32) return float_block_of<Float16, Float32>(any_tolerance);
    if (a == kFloat32 && b == kBFloat16) return float_block_of<Float32, BFloat16>(any_tolerance);
    if (a == kBFloat16 && b == kFloat32) return float_block_of<BFloat16, Float32>(any_tolerance);
    return float_block_of<Float32, Float32>(any_tolerance);
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
        const int read_a = is_byte(a) ? kBFloat16 : a, read_b = is_byte(b) ? kBFloat16 : b;
        block_ = choose_float(read_a, read_b, tolerance_.any);
        as_floats_ = block_ == choose_float(kFloat32, kFloat32, tolerance_.any);
    }

    void block(const Sides& sides, Row* row) {
        if (exact_ && !(are_small(types_[0], sides.baseline, sides.count) && are_small(types_[1], sides.target, sides.count))) {
            return choose_exact(types_[0], types_[1])(whole(sides), tolerance_, row);
        }
        if (float_ && block_(as_floats_ ? floats(sides) : halves(sides), tolerance_, row)) return;
        const Sides s = doubles(sides);
        for (int64_t start = 0; start < s.count; start += kPart) {
            const int64_t count = s.count - start < kPart ? s.count - start : kPart;
            double_block({s.baseline + start * 8, s.target + start * 8, count, s.column + start}, tolerance_, row);
        }
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
    static constexpr int64_t kPart = 512;  // of a block in double: the place of its largest distance is looked for

    template <class Kept, class Widen>
    Sides widened(const Sides& s, Kept kept, Widen widen) {
        Sides out = s;
        const uint8_t** sides[] = {&out.baseline, &out.target};
        for (int i = 0; i < 2; ++i) {
            if (kept(types_[i])) continue;
            widen(types_[i], *sides[i], s.count, room_[i]);
            *sides[i] = reinterpret_cast<const uint8_t*>(room_[i]);
        }
        return out;
    }

    Sides halves(const Sides& s) {
        const auto kept = [](int type) { return !is_byte(type); };
        return widened(s, kept, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            bytes_to_bfloat16(type, bytes, n, static_cast<uint16_t*>(out));
        });
    }

    Sides floats(const Sides& s) {
        const auto kept = [](int type) { return type == kFloat32; };
        return widened(s, kept, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            to_float(type, bytes, n, static_cast<float*>(out));
        });
    }

    Sides doubles(const Sides& s) {
        const auto kept = [](int type) { return type == kFloat64; };
        return widened(s, kept, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            to_double(type, bytes, n, static_cast<double*>(out));
        });
    }

    Sides whole(const Sides& s) {
        return widened(s, is_wide_integer, [](int type, const uint8_t* bytes, int64_t n, void* out) {
            decode_integer(type, bytes, n, static_cast<int64_t*>(out));
        });
    }

    int types_[2];
    Tolerance tolerance_;
    bool exact_, float_, as_floats_;
    FloatBlock block_;
    alignas(64) double room_[2][kBlock];
};

// Where the results of a comparison lie, [field][row] each.
class Results {
  public:
    explicit Results(const ts::RowResults& out) : out_(out) {}

    // The first columns of a row.
    void put(int64_t index, const Row& row, int64_t width, double at_worst, int64_t strip) const {
        const double values[] = {row.argmax < 0 ? 0 : row.max_abs, row.sum_abs, row.sum_sq_diff,
                                 row.sum_sq_baseline, row.sum_sq_target, row.dot};
        const int64_t counts[] = {row.argmax, row.equal, row.over, row.finite,
                                  row.nonfinite_baseline, row.nonfinite_target, row.mismatch, width};
        for (int i = 0; i < 6; ++i) real(i, index) = values[i];
        for (int i = 0; i < 8; ++i) whole(i, index) = counts[i];
        out_.at_worst[index] = at_worst, out_.strip[index] = strip;
    }

    // Columns to the right of those that are there, of which the first is `column`.
    void add(int64_t index, const Row& row, int64_t width, int64_t column, double at_worst, int64_t strip) const {
        const double sums[] = {row.sum_abs, row.sum_sq_diff, row.sum_sq_baseline, row.sum_sq_target, row.dot};
        const int64_t counts[] = {row.equal, row.over, row.finite,
                                  row.nonfinite_baseline, row.nonfinite_target, row.mismatch, width};
        for (int i = 0; i < 5; ++i) real(i + 1, index) += sums[i];
        for (int i = 0; i < 7; ++i) whole(i + 1, index) += counts[i];
        if (row.argmax < 0 || (whole(0, index) >= 0 && row.max_abs <= real(0, index))) return;
        real(0, index) = row.max_abs, whole(0, index) = column + row.argmax;
        out_.at_worst[index] = at_worst, out_.strip[index] = strip;
    }

  private:
    double& real(int field, int64_t index) const { return out_.floats[field * out_.rows + index]; }
    int64_t& whole(int field, int64_t index) const { return out_.integers[field * out_.rows + index]; }

    ts::RowResults out_;
};

double number_at(int dtype, const uint8_t* row, int64_t column) {
    double value = 0;
    decode_number(dtype, row + column * kItemSize[dtype], 1, &value);
    return value;
}

}  // namespace

void compare_strip(const Strip& strip, int64_t number, bool is_first, double atol, double rtol, const RowResults& out) {
    const Rows &left = strip.sides.baseline, &right = strip.sides.target;
    const int64_t width = strip.sides.width;
    Comparison comparison(left.dtype, right.dtype, atol, rtol);
    const Results results(out);
    for (int64_t i = 0; i < strip.sides.rows; ++i) {
        const uint8_t *a = left.at(i), *b = right.at(i);
        Row row;
        comparison.row(a, b, width, &row);
        const double at_worst = row.argmax < 0 ? 0 : number_at(left.dtype, a, row.argmax);
        if (is_first) {
            results.put(strip.row + i, row, width, at_worst, number);
        } else {
            results.add(strip.row + i, row, width, strip.column, at_worst, number);
        }
    }
}

}  // namespace ts
