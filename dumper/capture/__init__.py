"""Taking: one value of a site, from the rules to a record on its way."""
