"""The processes of one command ("ranks"), which torchrun starts on any number of machines."""
