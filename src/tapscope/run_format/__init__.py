"""The run format (version 2): reading, writing, verifying, repairing and compacting the directory of a run."""
