"""The first pass over the raw text: counts, samples, hashes, and what `mtrain check` finds."""
