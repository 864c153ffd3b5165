"""Which pairs are rejected: the rules, the filters, duplicates."""
