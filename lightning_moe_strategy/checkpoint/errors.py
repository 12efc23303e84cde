"""What is said of a checkpoint that cannot be written or read."""


class CheckpointError(RuntimeError):
    """Names the checkpoint, what is wrong with it and what to do; nothing was changed."""
