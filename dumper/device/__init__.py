"""Device: copies values from an accelerator to the host while the model continues."""
