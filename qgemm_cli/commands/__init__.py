"""What each command does, a file for each. These import PyTorch; ``app.py`` imports them when a command runs."""
