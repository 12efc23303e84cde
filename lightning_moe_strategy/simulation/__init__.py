"""What a simulated (or real) step is watched with: memory, communication, arithmetic."""
