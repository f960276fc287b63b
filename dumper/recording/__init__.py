"""Recording: one run of one rank, with its models, its steps and the configuration in force."""
