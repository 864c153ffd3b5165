"""A run folder, read: its progress, its records, its results."""
