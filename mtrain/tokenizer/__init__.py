"""Subword segmentation with SentencePiece: learning a vocabulary, text to ids and back."""
