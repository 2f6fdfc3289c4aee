"""Durations and rates as a person would say them."""


def duration(seconds: float) -> str:
    """A length of time.

    >>> duration(47.6), duration(750), duration(6387)
    ('48 s', '12 min 30 s', '1 h 46 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def pace(per_second: float) -> str:
    """How fast epochs go by, or how long one takes where that is over a second.

    >>> pace(12.34), pace(0.4), pace(0.047), pace(0)
    ('12.3 epochs/s', '2.5 s an epoch', '21 s an epoch', 'no epoch yet')
    """
    if per_second >= 1:
        return f"{per_second:.1f} epochs/s"
    if per_second == 0:
        return "no epoch yet"
    seconds = 1 / per_second
    return f"{seconds:.1f} s an epoch" if seconds < 10 else f"{duration(seconds)} an epoch"
