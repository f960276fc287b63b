// Two matrices compared row by row in one pass; the plain reference is in compare.py.
//
// Three ways, chosen per pair of dtypes: float32 sums within a block, checked afterwards and redone in double where
// float32 cannot be trusted (non-finite values, extreme magnitudes); double throughout; and exact integers.

#include "careful.h"
#include "group.h"
#include "widen.h"

#ifdef TS_WIDE
#define TS_VECTOR 64
#define TS_VECTORS vectors64
#define TS_TARGET TS_WIDE
#include "vectors.h"
#include "lanes.h"
#undef TS_VECTOR
#undef TS_VECTORS
#undef TS_TARGET
#define TS_VECTOR 32
#define TS_VECTORS vectors32
#define TS_TARGET TS_AVX2
#include "vectors.h"
#include "lanes.h"
#undef TS_VECTOR
#undef TS_VECTORS
#undef TS_TARGET
#endif
#define TS_VECTOR 16
#define TS_VECTORS vectors16
#define TS_TARGET
#include "vectors.h"
#include "lanes.h"

namespace ts {
namespace {

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
        for (int64_t column = 0; column < width; column += kPiece) {
            const int64_t count = width - column < kPiece ? width - column : kPiece;
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
    alignas(64) double room_[2][kPiece];
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
    Group group;
    for (int64_t first = 0; first < strip.sides.rows; first += Group::kRows) {
        const int64_t rest = strip.sides.rows - first, count = rest < Group::kRows ? rest : Group::kRows;
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t *a = left.at(first + i), *b = right.at(first + i);
            Row row;
            comparison.row(a, b, width, &row);
            group.put(i, row, width, row.argmax < 0 ? 0 : number_at(left.dtype, a, row.argmax));
        }
        if (is_first) {
            group.write(out, strip.row + first, count, number);
        } else {
            group.add(out, strip.row + first, count, number, strip.column);
        }
    }
}

}  // namespace ts
