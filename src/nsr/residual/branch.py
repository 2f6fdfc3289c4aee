"""What every null-space branch has in common, whatever host it is attached to."""

from typing import Any

from torch import nn


class Branch(nn.Module):
    """A trained path from a residual ``Z = (I - U A) X`` back into the host network.

    The graph and the token branch derive from it. It holds no mathematics, only the two facts that let one
    :func:`nsr.disabled`, one :func:`nsr.save` and one :func:`nsr.load` serve every host:

    Attributes:
        enabled: While ``False`` the host skips the branch and behaves as if it were not there.
        config: What rebuilds this branch, as plain JSON values. Saved beside the weights and compared on loading.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.enabled = True
        self.config = config
