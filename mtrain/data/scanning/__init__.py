"""The first pass over the raw text: counts, samples, hashes, and what `mtrain check` finds.

`scanner` makes the pass, block by block, in several processes if the corpora are large. It draws with
`samples` the text for the tokenizer and the pairs for validation. A check of the data looks at each block
(`block_check`), also for sides that are misaligned, exchanged or in other languages (`sides`) and for
validation pairs in training (`leaks`), and collects the findings (`check`).
"""
