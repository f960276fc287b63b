"""Detectors: checks that judge a site by more than its error, such as formats, routing and gradients."""
