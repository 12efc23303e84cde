"""The command line: fit, validate, test, predict and the demo."""
