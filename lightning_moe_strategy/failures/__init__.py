"""One rank that fails ends all, and is the one that is heard."""
