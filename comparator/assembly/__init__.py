"""Assembly: merge the shards of one firing, recorded by several ranks, into one tensor."""
