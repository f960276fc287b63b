"""Reports: one comparison as text for people and as JSON lines for programs."""
