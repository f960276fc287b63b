"""The engine with other pages, one request at a time, or the requests in another order."""

PATCHES = "engine"
TARGET = [{"page_size": 4}, {"batch": "separate"}, {"order": "reversed"}, {"dtype": "bfloat16", "page_size": 8}]
