"""Import of Hugging Face MarianMT models, and export to Hugging Face and CTranslate2."""
