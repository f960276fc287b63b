"""What the user asks for: options, map files, overrides."""
