"""Recording: the state of one open run on one rank: models, steps and active configuration."""
