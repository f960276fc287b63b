"""What is wrong, and where it began."""
