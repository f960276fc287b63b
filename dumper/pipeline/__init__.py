"""Pipeline: sends records to the recorder within memory bounds; also to memory and to a terminal."""
