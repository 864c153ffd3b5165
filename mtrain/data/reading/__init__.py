"""Raw files: what a config names, how files are cut into blocks of pairs, and how blocks are parsed."""
