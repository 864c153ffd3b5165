"""Crash-safe files and folders: atomic writes, manifests, locks, resumable output."""
