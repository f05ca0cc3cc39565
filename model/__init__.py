"""The mathematics of the transformer, as if one device held everything; knows nothing of processes or data."""
