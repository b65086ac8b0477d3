"""Is what a block printed what the page says?

Text must be equal, but for the width of spaces. A number with a decimal point may
differ by two units of the last digit that the page shows, as versions of JAX and
processors round differently. ``...`` in the page stands for anything.
"""

import re

_NUMBER = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")
_ANYTHING = re.compile(r"\.\.\.")
_TOKEN = re.compile(rf"{_ANYTHING.pattern}|{_NUMBER.pattern}|\s+")


def agree(said: str, printed: str) -> bool:
    """Whether a page that says ``said`` is right about ``printed``.

    Example:
        >>> agree("loss 0.25, ...", "loss 0.2612, 12 s")
        True
        >>> agree("loss 0.25", "loss 0.29")
        False
    """
    numbers: list[str] = []

    def pattern_of(token: re.Match[str]) -> str:
        if _ANYTHING.fullmatch(token[0]):
            return ".*"
        if token[0].isspace():
            return r"[ ]*\n[ \n]*" if "\n" in token[0] else "[ ]+"
        numbers.append(token[0])
        return rf"({_NUMBER.pattern}|-?\d+|nan|inf)"

    parts, end = [], 0
    said, printed = _tidy(said), _tidy(printed)
    for token in _TOKEN.finditer(said):
        parts += [re.escape(said[end : token.start()]), pattern_of(token)]
        end = token.end()
    match = re.fullmatch("".join(parts) + re.escape(said[end:]), printed, re.DOTALL)
    return match is not None and all(map(_is_close, numbers, match.groups()))


def _tidy(text: str) -> str:
    """Without the spaces that end a line, or that align numbers in brackets."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return re.sub(r"(?<=[\[(]) +", "", "\n".join(lines))


def _is_close(said: str, printed: str) -> bool:
    digits, _, exponent = said.partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals)
    return abs(float(said) - float(printed)) <= 2.01 * unit
