"""What a process may use, how it ends, and worker processes."""
