"""Selection: the rules of one configuration, compiled to capture decisions for the sites of one rank."""
