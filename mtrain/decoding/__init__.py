"""Translation with trained models: greedy search, beam search, sampling and scoring."""
