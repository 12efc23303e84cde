"""A run as a page: what it logged and wrote down, read without torch. Arithmetic and words; drawing is plotly's."""
