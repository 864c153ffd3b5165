"""Cross-entropy that skips padded labels."""

IGNORE = -100  # label of padding, the default `ignore_index` of torch.nn.functional.cross_entropy
