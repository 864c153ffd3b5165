"""What happens before the first step: the run folder, the tokenizer, the data, the config."""
