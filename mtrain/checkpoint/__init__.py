"""Training checkpoints and model folders: safetensors and JSON, never pickle."""
