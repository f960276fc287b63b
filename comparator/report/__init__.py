"""Reports: a comparison rendered as text and as JSON lines."""
