"""The dumper is not given the requests, which are in a different order on one side."""

BOTH = {"named": False}
TARGET = [{}, {"batch": "right"}, {"order": "reversed"}]
