"""The second pass over the raw text: pairs are encoded into the shards of the data folder."""
