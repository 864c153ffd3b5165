"""Scoring translations with sacreBLEU."""
