"""Reports: a comparison or a tensor as one HTML file, as Markdown for a pull request, and as JUnit XML."""
