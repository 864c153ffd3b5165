"""An optimizer step: on one device, as CUDA graphs, with DDP, and with FSDP."""
