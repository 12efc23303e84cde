"""Lightning callbacks of the strategy."""
