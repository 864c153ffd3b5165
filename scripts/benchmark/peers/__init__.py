"""The other tools, each measured by a module that runs in their Python environment.

They get mtrain's token streams and the sizes of its model: vocabularies, width, layers, heads, feed-forward
width, dropout, label smoothing, tied embeddings, tokens per batch and, where the tool offers it, the norm
order. Activation function and position encoding are the tool's defaults.
"""
