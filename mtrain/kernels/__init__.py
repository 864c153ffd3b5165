"""Fast CPU operations as plain functions of tensors. Nothing here imports from the rest of mtrain."""
