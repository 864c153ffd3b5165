"""`mtrain translate`: the command, its output, its prompt, its attention maps."""
