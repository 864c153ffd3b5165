"""Documents with markup: their text without it, and translations of the text with the markup put back."""
