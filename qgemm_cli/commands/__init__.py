"""The implementation of each command, in a file each. These import PyTorch; ``app.py`` imports them on demand."""
