"""Semantic segmentation: three data sets and a generated one, decoded once, cropped on the device that trains."""
