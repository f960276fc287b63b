"""Options of a comparison: settings, map files, overrides of dims and meshes."""
