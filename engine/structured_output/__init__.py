"""Constrained decoding with llguidance: JSON schemas, regular expressions, grammars and structural tags."""
