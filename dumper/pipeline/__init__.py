"""Pipeline: pass records to the recorder within memory bounds, to memory, or to a terminal."""
