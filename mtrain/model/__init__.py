"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017), from scratch.

Letters in shapes: B sentences, K beams, N = B*K rows, S source and T target length, H heads, D head width,
E model width, V vocabulary. Masks are boolean and say True where attention may look.

What each decoded position runs through calls modules by their `forward`, so hooks on those are not called: to
look for them takes as long as a short operation.
"""
