"""Is a module, under a layout, what it is in one process? Asked of its own steps, on CPU ranks of this machine."""
