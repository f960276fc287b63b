"""What the ranks recorded of one firing, put back together."""
