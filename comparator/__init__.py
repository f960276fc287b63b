"""Two runs in, the culprit out."""
