"""A readable mixture-of-experts decoder, its LightningModules and its data."""
