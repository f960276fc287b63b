"""The noise floor: the part of an error that rounding explains, from dtypes, depth and operations, effect by effect."""
