"""Fast paths behind the operators and branches; each has a plain PyTorch twin that is its reference."""
