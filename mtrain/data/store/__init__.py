"""The data folder: shards of encoded pairs, and what is known about them."""
