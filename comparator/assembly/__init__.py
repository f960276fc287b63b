"""Assembly: the shards that several ranks recorded of one firing, merged into one tensor."""
