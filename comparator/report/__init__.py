"""Reports: a comparison as text and as JSON lines."""
