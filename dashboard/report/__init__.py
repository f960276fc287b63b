"""Reports of comparisons, tensors and benchmarks: self-contained HTML, Markdown for pull requests, JUnit XML."""
