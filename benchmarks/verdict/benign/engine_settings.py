"""The engine with another page size, one request at a time, or requests in a different order."""

PATCHES = "engine"
TARGET = [{"page_size": 4}, {"batch": "separate"}, {"order": "reversed"}, {"dtype": "bfloat16", "page_size": 8}]
