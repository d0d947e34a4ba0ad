"""The commands and their arguments."""
