"""Would training work on this machine, with what, and what to do where not."""
