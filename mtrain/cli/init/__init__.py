"""`mtrain init`: the command, and its questions."""
