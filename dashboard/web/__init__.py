"""Web page: runs, tensors, comparisons and live runs in a browser, rendered from the view model."""
