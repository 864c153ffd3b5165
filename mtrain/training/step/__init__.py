"""An optimizer step on one device, with DDP, and with FSDP."""
