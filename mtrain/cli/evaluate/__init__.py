"""`mtrain evaluate`: the command, its checks, the systems that it compares, its results."""
