"""Optimizers that need more than a rank's own shards, and a rule for those of others."""
