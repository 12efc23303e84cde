"""Know before a GPU is rented: does it fit, does eFSDP hide, what breaks first. Arithmetic alone, without torch."""
