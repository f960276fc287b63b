"""Records: per-port state, snapshots of tensors, and records in flight to the recorder."""
