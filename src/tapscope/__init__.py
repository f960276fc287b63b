"""See inside a running model, and find the first tensor where two runs part."""
