"""Which training pairs are rejected. `filters` applies the rules of `data.filters`, and finds duplicates with
`duplicates`. `rejections` stores the result in the data folder.
"""
