"""What two runs hold: series of records, their places on meshes, the token grids of their steps."""
