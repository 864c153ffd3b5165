"""The sections of a config, each in a module of its own."""
