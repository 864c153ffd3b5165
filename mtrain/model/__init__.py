"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017), from scratch.

Letters in shapes: B sentences, K beams, N = B*K rows, S source and T target length, H heads, D head width,
E model width, V vocabulary. Masks are boolean and say True where attention may look.

What each decoded position runs through calls modules by their `forward`: a module's own call looks for hooks
first, of which there are none, and that takes as long as a short operation.
"""
