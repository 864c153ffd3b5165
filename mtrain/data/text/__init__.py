"""What a text is: its hash, its sizes, its writing systems, its language."""
