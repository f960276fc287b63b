"""Everything about one matched pair that can be known without looking at others."""
