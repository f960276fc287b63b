"""How far apart values are that meet, read once and in place."""
