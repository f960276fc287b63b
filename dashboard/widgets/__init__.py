"""One module per widget; widgets draw, screens decide."""
