"""Checkpoints: directories written aside and published whole, read on any layout, and Hugging Face weights."""
