"""Selection: the rules of one configuration, compiled for the sites of one rank."""
