"""Token merging: matching rules, the null-space branch, and a timm ViT that merges."""
