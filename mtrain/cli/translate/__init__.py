"""`mtrain translate`: the command, its output, its prompt."""
