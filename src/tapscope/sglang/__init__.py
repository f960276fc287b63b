"""Reads directories that SGLang's dumper wrote, without torch and without executing pickles."""
