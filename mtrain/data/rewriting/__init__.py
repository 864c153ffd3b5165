"""Changes to the pairs of a window: augmentation, sampled segmentations, corrupted pairs."""
