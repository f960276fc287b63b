"""Detectors: checks that judge a site by other evidence than its error, such as number formats, routing and
gradients."""
