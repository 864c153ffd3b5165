"""Files and folders that survive crashes: atomic writes, manifests, locks, resumable output."""
