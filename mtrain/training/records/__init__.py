"""What a run writes while it trains: metrics, checkpoints."""
