"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017), from scratch.

Letters in shapes: B sentences, K beams, N = B*K rows, S source and T target length, H heads, D head width,
E model width, V vocabulary. Masks are boolean and say True where attention may look.

Where decoding takes one position through a layer, some modules are called by their `forward`, and hooks on
them are not: to look for hooks takes as long as a short operation.
"""
