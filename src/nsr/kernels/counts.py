"""The arithmetic of launches. Triton's functions of these names are made for kernels and cost 5 µs a call outside."""


def cdiv(count: int, size: int) -> int:
    """How many blocks of a size hold so many.

    Example:
        >>> cdiv(9, 4), cdiv(8, 4), cdiv(0, 4)
        (3, 2, 0)
    """
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not below a number.

    Example:
        >>> next_power_of_2(9), next_power_of_2(8), next_power_of_2(0)
        (16, 8, 1)
    """
    return 1 << max(0, count - 1).bit_length()
