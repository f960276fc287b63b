"""Terms that every part shares: sites, dims, dtypes, errors, formatting. Standard library and numpy only."""
