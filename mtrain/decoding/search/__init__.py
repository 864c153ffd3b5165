"""Search: the next tokens of a batch of sentences, and the best hypotheses."""
