"""Graph aggregation: the null-space branch for any PyTorch Geometric model."""
