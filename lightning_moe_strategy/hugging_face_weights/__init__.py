"""Weights of Hugging Face in and out: streamed into sharded models, into checkpoints and back into safetensors."""
