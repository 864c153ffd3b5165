"""Which training pairs the filters reject. `filters` applies the rules of `data.filters`, and finds
duplicates with `duplicates`. `rejections` stores the result in the data folder.

Pairs with a blank side are rejected, too. Pairs that are held out or too long (`data.max_length`) are dropped
later, by `mtrain.data.preparing.encode_shards`.
"""
