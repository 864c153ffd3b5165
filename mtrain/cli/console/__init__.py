"""What all commands use: their options and help, the terminal, and where results go."""
