"""What `scripts/torture.py` does to mtrain, a module for each kind of fault."""
