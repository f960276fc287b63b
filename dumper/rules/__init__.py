"""Rules: what is kept of which sites and when, and what a trigger watches; as text and as objects."""
