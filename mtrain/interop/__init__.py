"""Import of MarianMT models from Hugging Face, and export to Hugging Face and CTranslate2."""
