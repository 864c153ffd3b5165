"""Durations as people read them."""


def format_duration(seconds: float) -> str:
    """A duration in the units that matter: 3 ms, 0.42 s, 4.2 s, 42 s, 4 min 12 s, 1 h 23 min, 3 d 4 h."""
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.{1 if seconds >= 0.995 else 2}f} s"
    rounded = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rounded >= size:
            count, rest = divmod(round(seconds / part), size // part)
            return f"{count:,} {unit}" + f" {rest} {smaller}" * bool(rest)
    return f"{rounded} s"
