"""`mtrain plan`: what a run needs in FLOPs, memory, time and communication."""
