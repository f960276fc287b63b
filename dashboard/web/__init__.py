"""The web page: runs, tensors, comparisons and live runs in a browser, over the view model."""
