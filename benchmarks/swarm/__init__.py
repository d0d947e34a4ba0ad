"""Make random combinations of options, run them, and judge them by properties."""
