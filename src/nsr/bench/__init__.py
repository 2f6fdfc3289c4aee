"""What the library costs: every arm measured beside its peers, interleaved in one process."""
