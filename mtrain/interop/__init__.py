"""Import and export of models: Marian, Transformers, CTranslate2, Argos Translate and Bergamot."""
