"""Other programs' models: in from Hugging Face's Marian, out to it and to CTranslate2."""
