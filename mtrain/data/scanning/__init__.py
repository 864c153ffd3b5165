"""The first pass over the raw text: counts, samples, hashes, and what `mtrain check` finds.

`scanner` makes the pass. It scans each block with `block_scan`, in several processes if the corpora are
large, and draws with `samples` the text for the tokenizer and the pairs for validation. A check of the data
looks for sides that are misaligned, exchanged or in other languages (`sides`) and for validation pairs in
training (`leaks`), and collects the findings (`check`).
"""
