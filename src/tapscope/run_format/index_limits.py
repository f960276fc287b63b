"""Sizes of runs for which a record index is written; without numpy, which a recorder loads only to write one."""

MIN_RECORDS = 50_000
"""Fewer records are read as fast without."""
MAX_AT_CLOSE = 2_000_000
"""More lines are not indexed when their writer closes, because that would take too much memory on the host of a job."""
