"""Rules: parsing, validation and formatting of capture rules, triggers and injection rules."""
