"""Validation: translations or classes, and their scores."""
