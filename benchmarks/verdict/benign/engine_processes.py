"""transformers against the engine's two ranks as real processes."""

TARGET = {"framework": "engine", "tp": 2, "processes": True}
