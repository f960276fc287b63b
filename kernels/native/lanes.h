// Per-lane accumulators of a fast block.
//
// Included once per vector length, after elements.h.

namespace ts {
namespace TS_VECTORS {

// Per-lane sum; a float32 sum is moved to double by carry().
template <class Real>
struct Sum {
    Doubles all = Doubles{};

    TS_TARGET TS_INLINE void add(Doubles values) { all += values; }
    TS_TARGET TS_INLINE void add_product(Doubles a, Doubles b) { all = fused(a, b, all); }
    TS_TARGET TS_INLINE void carry() {}
    TS_TARGET TS_INLINE double total() const { return folded<double>(all, Plus{}); }
};

template <>
struct Sum<float> {
    Floats recent = Floats{};
    Doubles before = Doubles{};

    TS_TARGET TS_INLINE void add(Floats values) { recent += values; }
    TS_TARGET TS_INLINE void add_product(Floats a, Floats b) { recent = fused(a, b, recent); }
    TS_TARGET TS_INLINE void carry() { before += doubled(recent), recent = Floats{}; }
    TS_TARGET TS_INLINE double total() const { return folded<double>(before + doubled(recent), Plus{}); }
};

// Per-lane distances between two sides, and the position of the largest.
template <class Real>
struct Distances {
    using V = Reals<Real>;
    using I = Wholes<Real>;
    Sum<Real> sum_abs, diff;
    V most = V{}, recent = V{};  // largest distances: of all stretches before this one, of this one
    I where = I{};               // start of the stretch with `most`

    TS_TARGET TS_INLINE V add(V difference) {
        const V distance = magnitude(difference);
        recent = larger(distance, recent);
        diff.add_product(difference, difference);
        sum_abs.add(distance);
        return distance;
    }

    TS_TARGET TS_INLINE void end_stretch(int64_t start) {
        const I better = recent > most;
        where = better ? I{} + static_cast<std::decay_t<decltype(where[0])>>(start) : where;
        most = better ? recent : most;
        recent = V{};
    }

    TS_TARGET TS_INLINE void carry() { sum_abs.carry(), diff.carry(); }

    TS_TARGET TS_INLINE Real largest() const { return folded<Real>(most, Larger{}); }

    // Returns the start of the first stretch with the distance, or `none`.
    TS_TARGET TS_INLINE int64_t first_at(Real distance, int64_t none) const {
        using Place = std::decay_t<decltype(where[0])>;
        const I starts = most == distance ? where : I{} + static_cast<Place>(none);
        return folded<Place>(starts, Smaller{});
    }
};

template <class Real>
struct Products {
    Sum<Real> base, target, dot;

    TS_TARGET TS_INLINE void add(Reals<Real> a, Reals<Real> b) {
        base.add_product(a, a);
        target.add_product(b, b);
        dot.add_product(a, b);
    }

    TS_TARGET TS_INLINE void carry() { base.carry(), target.carry(), dot.carry(); }
};

template <class Real, bool kTolerance>
struct Lanes {
    using V = Reals<Real>;
    Distances<Real> distances;
    Products<Real> products;
    Counter<Real> unequal, low, high;

    TS_TARGET TS_INLINE void add(V a, V b, const Tolerance& t) {
        products.add(a, b);
        const V distance = distances.add(a - b);
        unequal.add(distance);  // without flush-to-zero, only equal numbers have distance 0
        if constexpr (kTolerance) add_over(distance, magnitude(a), t);
    }

    // Counts elements over the tolerance; in float32 with both bounds, see Tolerance.
    TS_TARGET TS_INLINE void add_over(V distance, V size, const Tolerance& t) {
        if constexpr (sizeof(Real) == 4) {
            low.add_larger(distance, t.atol_low + t.rtol_low * size);
            high.add_larger(distance, t.atol_high + t.rtol_high * size);
        } else {
            low.add_larger(distance, t.atol + t.rtol * size);
        }
    }

    TS_TARGET TS_INLINE void carry() { distances.carry(), products.carry(); }
};

}  // namespace TS_VECTORS
}  // namespace ts
