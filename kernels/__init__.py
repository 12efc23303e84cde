"""Tensor kernels: tensors in, tensors out, with a torch reference each."""
