"""How much of an error rounding explains: the noise floor of every site."""
