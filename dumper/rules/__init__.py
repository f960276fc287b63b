"""Rules: what is kept of which sites, when, and what a trigger watches, as texts and as values."""
