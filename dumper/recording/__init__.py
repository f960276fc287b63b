"""Recording: one run of one rank: its models, its steps, the configuration in force."""
