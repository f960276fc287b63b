"""Device: values that are copied from an accelerator while the model goes on."""
