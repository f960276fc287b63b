"""Job: the rank of this process, the naming of its runs, framework plugins, and process-wide hooks."""
