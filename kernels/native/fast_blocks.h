// What compares a block of a row fast, for the rest of a comparison; compiled apart, because that takes long.
#pragma once

#include "rows.h"

namespace ts {

// False, with the row untouched, where the block must be done in double.
using FastBlock = bool (*)(const Sides&, const Tolerance&, Row*);

// What reads both sides, of these dtypes, as they lie; null where they must be widened first.
FastBlock fast_block_of(int a, int b, bool any_tolerance);

}  // namespace ts
