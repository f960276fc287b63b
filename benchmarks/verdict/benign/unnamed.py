"""Nobody tells the dumper which requests there are; they come in another order on one side."""

BOTH = {"named": False}
TARGET = [{}, {"batch": "right"}, {"order": "reversed"}]
