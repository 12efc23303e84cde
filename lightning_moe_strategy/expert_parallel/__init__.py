"""Expert parallel: experts spread over the ranks of an ep group, tokens sent to them."""
