"""The noise floor: how much of an error rounding explains, from dtypes, depth and operations, effect by effect."""
