"""From source ids to translations."""
