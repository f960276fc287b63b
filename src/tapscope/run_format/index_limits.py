"""Limits for writing a record index; in a module without numpy, which a recorder loads only to write an index."""

MIN_RECORDS = 50_000
"""Minimum number of records; fewer load as fast without an index."""
MAX_AT_CLOSE = 2_000_000
"""Maximum number of lines that a closing writer indexes; more would need too much memory on the host of a job."""
