"""Constrained decoding: JSON schemas, regular expressions, grammars and structural tags, by llguidance."""
