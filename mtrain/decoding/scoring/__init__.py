"""Scores of given pairs, and what is chosen by them."""
