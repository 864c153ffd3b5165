"""Models in the format of Marian, which the Bergamot engine reads."""
