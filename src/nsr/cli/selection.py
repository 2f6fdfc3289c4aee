"""How options name several things at once."""


def names(given: str) -> list[str]:
    """``"a,b"`` to ``["a", "b"]``, each once; ``""``, which some options take for all, to ``[]``.

    Raises:
        ValueError: There are commas and no name.
    """
    found = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if given.strip() and not found:
        raise ValueError(f"{given!r} names nothing; give one name or several by commas.")
    return found


def integers(option: str, given: str) -> list[int]:
    """``"0-2,5"`` to ``[0, 1, 2, 5]``.

    Raises:
        ValueError: It is something else, or nothing; names the option.
    """
    numbers: list[int] = []
    for part in names(given):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"{option} {given!r}: expected numbers by commas or a range, such as 0,1,2 or 0-9.")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(f"{option} {given!r} names nothing.")
    return list(dict.fromkeys(numbers))
