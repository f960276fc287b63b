"""Reader for directories written by SGLang's dumper; needs no torch and never executes pickles."""
