// Row-by-row comparison of two matrices in one pass; the numpy reference is in compare.py.
//
// The fast path is chosen per pair of dtypes: sums in float32, in double, or of 8-bit integers. A block that it cannot
// handle reliably is redone in double. Two integer dtypes of which one has 64 bits are compared exactly.

#include "fast_blocks.h"
#include "exact_block.h"
#include "formats.h"
#include "row_results.h"

namespace ts {
namespace {

// ---- widening and exact comparison

TS_CLONES void to_float(int dtype, const uint8_t* bytes, int64_t n, float* out) {
    widen_to_float(dtype, bytes, n, out);
}

TS_CLONES void to_double(int dtype, const uint8_t* bytes, int64_t n, double* out) {
    decode_number(dtype, bytes, n, out);
}

// Returns whether every integer of a block is below kSmall in magnitude: float64 then subtracts exactly.
TS_CLONES bool are_small(int dtype, const uint8_t* bytes, int64_t n) {
    if (!is_wide_integer(dtype)) return true;
    uint64_t any = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t value = load<int64_t>(bytes, i);
        any |= static_cast<uint64_t>(dtype == kInt64 ? value ^ (value >> 63) : value);
    }
    return any < kSmall;
}

// Counts elements over the tolerance; both sides are float64.
TS_CLONES int64_t count_beyond(const Sides& s, const Tolerance& t) {
    const double atol = t.atol, rtol = t.rtol;
    int64_t over = 0;
    for (int64_t i = 0; i < s.count; ++i) {
        const double a = load<double>(s.baseline, i), b = load<double>(s.target, i);
        over += __builtin_fabs(a - b) > atol + rtol * __builtin_fabs(a);
    }
    return over;
}

using ExactBlock = void (*)(const Sides&, const Tolerance&, Row*);

ExactBlock choose_exact(int a, int b) {
    if (a == kUint64) return b == kUint64 ? exact_block<uint64_t, uint64_t> : exact_block<uint64_t, int64_t>;
    return b == kUint64 ? exact_block<int64_t, uint64_t> : exact_block<int64_t, int64_t>;
}

// ---- dispatch

// Comparison of one pair of dtypes, with buffers to widen part of either side. A tolerance affects only the count of
// elements over it: if the fast path cannot count these, they are counted afterwards.
class Comparison {
  public:
    Comparison(int a, int b, double atol, double rtol) : types_{a, b}, tolerance_(atol, rtol) {
        exact_ = is_integer(a) && is_integer(b) && (is_wide_integer(a) || is_wide_integer(b));
        const bool as_float = fits_float(a) && fits_float(b);
        if (choose(a, b, tolerance_.any && (tolerance_.fits_float || !as_float))) return;
        common_ = as_float ? kFloat32 : kFloat64, piece_ = kRoom;
        choose(common_, common_, tolerance_.any && (tolerance_.fits_float || !as_float));
    }

    void row(const uint8_t* baseline, const uint8_t* target, int64_t width, Row* row) {
        const int64_t step_a = kItemSize[types_[0]], step_b = kItemSize[types_[1]];
        for (int64_t column = 0; column < width; column += piece_) {
            const int64_t count = width - column < piece_ ? width - column : piece_;
            block({baseline + column * step_a, target + column * step_b, count, column}, row);
        }
    }

  private:
    static constexpr int64_t kRoom = 2048;  // elements widened at a time: both sides fit the L1 cache

    // Selects the fast path for two dtypes, with tolerance counts if `counts` and available. Returns false if there is
    // none.
    bool choose(int a, int b, bool counts) {
        block_ = counts ? fast_block_of(a, b, true) : nullptr;
        counts_after_ = tolerance_.any && !block_;
        if (!block_) block_ = fast_block_of(a, b, false);
        return block_ != nullptr;
    }

    void block(const Sides& s, Row* row) {
        if (exact_ && !(are_small(types_[0], s.baseline, s.count) && are_small(types_[1], s.target, s.count))) {
            const ExactBlock exact = choose_exact(types_[0], types_[1]);
            return in_parts(s, [&](const Sides& part) { exact(whole(part), tolerance_, row); });
        }
        const int64_t before = row->over;
        if (block_(common_ < 0 ? s : widened(s, common_), tolerance_, row)) {
            if (!counts_after_ || row->over == before)
                return;  // without a tolerance, the fast path counts unequal elements
            row->over = before;
            return in_parts(s,
                            [&](const Sides& part) { row->over += count_beyond(widened(part, kFloat64), tolerance_); });
        }
        in_parts(s, [&](const Sides& part) { careful_block(widened(part, kFloat64), tolerance_, row); });
    }

    // Calls `work` for parts that fit the buffers; short parts also make the search for the largest distance cheap.
    template <class Work>
    void in_parts(const Sides& s, Work work) {
        constexpr int64_t kPart = 512;
        const int64_t step_a = kItemSize[types_[0]], step_b = kItemSize[types_[1]];
        for (int64_t i = 0; i < s.count; i += kPart) {
            const int64_t count = s.count - i < kPart ? s.count - i : kPart;
            work(Sides{s.baseline + i * step_a, s.target + i * step_b, count, s.column + i});
        }
    }

    // Returns both sides widened to float32 or float64.
    Sides widened(const Sides& s, int type) {
        return in_room(s, [=](int from, const uint8_t* bytes, void* out) {
            if (from == type) return false;
            if (type == kFloat32) to_float(from, bytes, s.count, static_cast<float*>(out));
            if (type == kFloat64) to_double(from, bytes, s.count, static_cast<double*>(out));
            return true;
        });
    }

    Sides whole(const Sides& s) {
        return in_room(s, [=](int from, const uint8_t* bytes, void* out) {
            if (is_wide_integer(from)) return false;
            decode_integer(from, bytes, s.count, static_cast<int64_t*>(out));
            return true;
        });
    }

    // Returns the sides, each replaced by its buffer if `put` filled the buffer.
    template <class Put>
    Sides in_room(Sides s, Put put) {
        if (put(types_[0], s.baseline, room_[0])) s.baseline = reinterpret_cast<const uint8_t*>(room_[0]);
        if (put(types_[1], s.target, room_[1])) s.target = reinterpret_cast<const uint8_t*>(room_[1]);
        return s;
    }

    int types_[2], common_ = -1;  // common_: dtype to which both sides are widened; -1: read without conversion
    Tolerance tolerance_;
    bool exact_, counts_after_ = false;
    FastBlock block_ = nullptr;
    int64_t piece_ = kPiece;
    alignas(64) double room_[2][kRoom];
};

double number_at(int dtype, const uint8_t* row, int64_t column) {
    double value = 0;
    decode_number(dtype, row + column * kItemSize[dtype], 1, &value);
    return value;
}

// Adds n elements to `out`, or assigns them if `is_first`.
template <class Out>
TS_INLINE void put_or_add(int dtype, const uint8_t* bytes, int64_t n, bool is_first, Out* out) {
    const auto add = [&](auto format) {
        using F = decltype(format);
        if (is_first) {
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(F::value(load<typename F::Bits>(bytes, i)));
        } else {
            for (int64_t i = 0; i < n; ++i) out[i] += static_cast<Out>(F::value(load<typename F::Bits>(bytes, i)));
        }
    };
    if (dtype == kFloat64) return add(Float64());
    if (dtype == kFloat32) return add(Float32());
    if (dtype == kFloat16) return add(Float16());
    if (dtype == kBFloat16) return add(BFloat16());
    constexpr int64_t kRoom = 256;
    Out room[kRoom];
    const int64_t width = kItemSize[dtype];
    for (int64_t start = 0; start < n; start += kRoom) {
        const int64_t count = n - start < kRoom ? n - start : kRoom;
        if constexpr (std::is_same_v<Out, uint64_t>) {
            decode_integer(dtype, bytes + start * width, count, room);
        } else {
            decode_number(dtype, bytes + start * width, count, room);
        }
        for (int64_t i = 0; i < count; ++i) out[start + i] = is_first ? room[i] : out[start + i] + room[i];
    }
}

TS_CLONES void sum_to_double(int dtype, const uint8_t* bytes, int64_t n, bool is_first, double* out) {
    put_or_add(dtype, bytes, n, is_first, out);
}
TS_CLONES void sum_to_float(int dtype, const uint8_t* bytes, int64_t n, bool is_first, float* out) {
    put_or_add(dtype, bytes, n, is_first, out);
}
TS_CLONES void sum_to_integer(int dtype, const uint8_t* bytes, int64_t n, bool is_first, uint64_t* out) {
    put_or_add(dtype, bytes, n, is_first, out);  // wraps around, as in numpy
}

// Rows of one side; the sum of its summands if there are several.
class SideRow {
  public:
    SideRow(const Strip& strip, int side)
        : rows_(side ? strip.sides.target : strip.sides.baseline),
          more_(strip.more[side]),
          width_(strip.sides.width),
          sum_(strip.sum_dtype[side]) {
        if (sum_ >= 0) room_.resize(static_cast<size_t>(width_));
    }

    int dtype() const { return sum_ < 0 ? rows_.dtype : sum_; }

    const uint8_t* at(int64_t i) {
        if (sum_ < 0) return rows_.at(i);
        add(rows_, i, true);
        for (const Rows& rows : more_) add(rows, i, false);
        return reinterpret_cast<const uint8_t*>(room_.data());
    }

  private:
    void add(const Rows& rows, int64_t i, bool is_first) {
        void* out = room_.data();
        if (sum_ == kFloat64) sum_to_double(rows.dtype, rows.at(i), width_, is_first, static_cast<double*>(out));
        if (sum_ == kFloat32) sum_to_float(rows.dtype, rows.at(i), width_, is_first, static_cast<float*>(out));
        if (sum_ == kInt64) sum_to_integer(rows.dtype, rows.at(i), width_, is_first, static_cast<uint64_t*>(out));
    }

    const Rows& rows_;
    const std::vector<Rows>& more_;
    const int64_t width_;
    const int sum_;
    std::vector<double> room_;
};

}  // namespace

void compare_strip(const Strip& strip, int64_t number, bool is_first, double atol, double rtol, const RowResults& out) {
    SideRow left(strip, 0), right(strip, 1);
    const int64_t width = strip.sides.width;
    Comparison comparison(left.dtype(), right.dtype(), atol, rtol);
    Group group;
    for (int64_t first = 0; first < strip.sides.rows; first += Group::kRows) {
        const int64_t rest = strip.sides.rows - first, count = rest < Group::kRows ? rest : Group::kRows;
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t *a = left.at(first + i), *b = right.at(first + i);
            Row row;
            comparison.row(a, b, width, &row);
            group.put(i, row, width, row.argmax < 0 ? 0 : number_at(left.dtype(), a, row.argmax));
        }
        if (is_first) {
            group.write(out, strip.row + first, count, number);
        } else {
            group.add(out, strip.row + first, count, number, strip.column);
        }
    }
}

}  // namespace ts
