"""The other tools, each in a module that runs in their environment.

They get the token streams and the sizes of mtrain's model: vocabularies, width, layers, heads, feed-forward,
dropout, label smoothing, ties between embeddings, tokens in a batch; where a tool has the choice also the
place of its norms. Activation and positions are the tool's own.
"""
