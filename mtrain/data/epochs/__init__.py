"""From the data folder to batches: windows, stages, the plan of an epoch, the loader."""
