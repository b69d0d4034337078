"""The task: name the digit after the given one."""


def row(*, seed: int, index: int) -> dict[str, str]:
    """Return row number ``index`` of the data."""
    digit = (seed + index) % 10
    return {"prompt": str(digit), "target": str((digit + 1) % 10)}
