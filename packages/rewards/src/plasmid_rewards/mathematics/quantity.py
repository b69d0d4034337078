r"""A mathematical answer split into expression, unit, percent sign and number base."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

SPACING = re.compile(r"(?<!\\)\\(?:[,;: >]|q?quad(?![a-zA-Z])|$)|~|\s")
"""Horizontal spacing. Two backslashes before a space end a row of a matrix instead."""
NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!\s*")
STYLE = re.compile(r"\\(?:displaystyle|textstyle)(?![a-zA-Z])|\\left\s*\.|\\right\s*\.|^\s*\\approx(?![a-zA-Z])")
FRACTION = re.compile(r"\\([dtc]?frac|[dt]?binom)\s*(\d)\s*(\d)")
MIXED = re.compile(r"(?<![\w.,/^}])(\d+) +(\d+) ?/ ?(\d+)(?![\d.,/!^])")
GROUPS = re.compile(r"(?<![\d.,_^] )(?<![\d.,_^])\d{1,3}(?: \d{3})+(?! ?\d)")
APART = re.compile(r"(?<![_^])\d [\d.]")
WRAPPER = r"\\(?:text(?:bf|it|rm|normal|up)?|math(?:rm|bf|it|sf)|mbox|operatorname)"
WORDS = re.compile(rf"{WRAPPER}\s*{{([^{{}}]*)}}")
PERCENT = re.compile(rf"(?:\\?%|(?:{WRAPPER}\s*{{ *)?\b(?:percent(?:age)?|pct)\b *\}}?)$", re.IGNORECASE)
POWER = r"(?: ?(?:\^ ?\{? ?([23]) ?\}?|([\u00b2\u00b3])))?"
TEXT_UNIT = re.compile(rf"{WRAPPER}\s*{{([^{{}}]*)}}{POWER}$")
INVERSE = r" ?\^ ?\{? ?-([1-3]) ?\}? ?"
RATE = re.compile(
    rf"({WRAPPER}\s*{{ ?(?:[cmk]?m|[mk]?g|m?l|rad)) ?(s|min|h)(?:{INVERSE}\}}| ?\}}{INVERSE})"  # as in \text{m s}^{-1}
)
BARE_WORDS = re.compile(r"(?<=[\d})]) ([a-z]{3,}(?: [a-z]{3,})*)$")
NO_UNIT = re.compile(
    r"\d|(?<![a-zA-Z])(?:and|or|nor|not|no|infinity|half|thirds?|quarters?|dozens?|hundreds?|thousands?|[mbtr]+illions?)"
    r"(?![a-zA-Z])",
    re.IGNORECASE,
)
"""Words after a number that modify it, negate it, or introduce another number."""
DEGREES = re.compile(rf"(?: ?\^ ?\{{? ?\\circ ?\}}?| ?\\degree|\u00b0) ?(?:{WRAPPER}\s*{{ *)?([CF])? *\}}?$")
BARE_UNIT = re.compile(
    rf"(?<=[\d}}) ])((?:square |cubic |sq\.? |cu\.? )?[a-zA-Z]{{2,}}(?: ?/ ?[a-zA-Z]+| per [a-z]+)?){POWER}$"
)
LETTER_UNIT = re.compile(rf"(?<=[\d}}) ])([msghl]){POWER}$")
CURRENCY = re.compile(r"^(?:\\?\$|\u20ac|\u00a3|\\(?:euro|pounds)(?![a-zA-Z]))|(?:\u20ac|\u00a3)$")
BASE = re.compile(r"^([0-9A-Fa-f]+) ?_ ?(?:\{ ?(\d+) ?\}|(\d+))$")
CURRENCIES = {"$": "dollar", "\\$": "dollar", "\u20ac": "euro", "\\euro": "euro", "\u00a3": "gbp", "\\pounds": "gbp"}
SINGULAR = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "gallon": "gal",
    "degree": "deg",
    "radian": "rad",
    "dollar": "usd",
    "cent": "",
    "euro": "eur",
}
UNITS = {name: unit for unit, names in SINGULAR.items() for name in (unit, *names.split())}
SPEEDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer with everything outside its expression split off."""

    expression: str
    """LaTeX, with single spaces."""
    unit: str | None = None
    """Canonical name of a known unit, such as ``cm^2`` or ``mi/h``; None if there is none or it is unknown."""
    is_percent: bool = False
    base: str | None = None
    """Subscript of a number such as ``204_5``."""

    @property
    def is_readable(self) -> bool:
        """Return False for separated digits that form no number, as in ``4 2``: parsers read a sum or a product in
        them."""
        return not APART.search(self.expression)


@lru_cache(maxsize=4096)
def read_quantity(text: str) -> Quantity:
    """Split an answer in LaTeX into its parts."""
    text, unit = normalize_latex(text), None
    if currency := CURRENCY.search(text):
        rest = CURRENCY.sub("", text, count=1).strip()
        text, unit = (rest, CURRENCIES[currency[0]]) if rest else (text, None)
    if percent := PERCENT.search(text):
        rest = text[: percent.start()].strip()
        return Quantity(rest, unit, is_percent=True) if rest else Quantity(text, unit)
    if base := BASE.match(text):
        return Quantity(base[1], unit, base=base[2] or base[3])
    rest, found = _cut_unit(text)
    return Quantity(rest, unit or found)


def normalize_latex(text: str) -> str:
    r"""Normalize spaces, ``$``, digit groups and mixed numbers: ``1 1/2`` becomes ``1\frac{1}{2}``."""
    text = STYLE.sub("", NEGATIVE_SPACE.sub("", text).replace("{,}", ","))
    text = " ".join(SPACING.sub(" ", text).split())
    text = re.sub(r"(?<!\\)\$$", "", re.sub(r"^\$(?=.*\$)", "", text)).strip().removesuffix(".").strip()
    text = RATE.sub(r"\1/\2^\3\4}", text).replace("^1}", "}").replace(r"\varnothing", r"\emptyset")
    text = FRACTION.sub(r"\\\1{\2}{\3}", text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return GROUPS.sub(lambda match: match[0].replace(" ", ""), text)


def strip_letter_unit(quantity: Quantity, unit: str | None) -> Quantity:
    """Remove ``m`` from ``5 m`` if the other side shows that it means meters and not a variable."""
    match = LETTER_UNIT.search(quantity.expression)
    if match is None or quantity.unit is not None or unit != _unit(match[1], match[2] or match[3]):
        return quantity
    return replace(quantity, expression=quantity.expression[: match.start()].strip(), unit=unit)


def compare_words(target: str, answer: str) -> bool | None:
    r"""Return whether two answers are the same words, ignoring case; None if they are not words.

    Without ``\text`` and capital letters, ``xy`` is a product, which equals ``yx``.
    """
    texts = [normalize_latex(text) for text in (target, answer)]
    unwrapped = [WORDS.sub(r"\1", text) for text in texts]
    letters = [re.sub(r"[ .'\-]", "", text) for text in unwrapped]
    if not all(re.fullmatch(r"[A-Za-z]{2,}", text) for text in letters):
        return None
    if unwrapped == texts and letters == [text.lower() for text in letters]:
        return None
    return letters[0].lower() == letters[1].lower()


def _cut_unit(text: str) -> tuple[str, str | None]:
    if degrees := DEGREES.search(text):
        names = {"C": "celsius", "F": "fahrenheit", None: "degree"}
        rest = text[: degrees.start()].strip()
        return (rest, names[degrees[1]]) if rest else (text, None)
    if match := TEXT_UNIT.search(text):
        rest, unit = text[: match.start()].strip(), _unit(match[1], match[2] or match[3])
        return (rest, unit) if rest and (unit is not None or NO_UNIT.search(match[1]) is None) else (text, None)
    if match := BARE_UNIT.search(text):
        unit = _unit(match[1], match[2] or match[3])
        rest = text[: match.start()].strip()
        if unit is not None and rest:
            return rest, unit
    if (match := BARE_WORDS.search(text)) and NO_UNIT.search(match[1]) is None:
        return text[: match.start()], None
    return text, None


def _unit(name: str, power: str | None) -> str | None:
    """Return the canonical name of a unit; None if it is unknown."""
    name = name.strip().lower().rstrip(".").replace(" per ", "/")
    if power is None and (prefixed := re.match(r"(?:(square|sq\.?)|(?:cubic|cu\.?)) (?=.)", name)):
        name, power = name[prefixed.end() :], "2" if prefixed[1] else "3"
    inside = re.fullmatch(rf"(.*?){POWER}", name)
    if inside is not None and power is None:
        name, power = inside[1], inside[2] or inside[3]
    power = {"\u00b2": "2", "\u00b3": "3"}.get(power or "", power)
    parts = [_remove_plural(part.strip()) for part in SPEEDS.get(name, name).split("/")]
    if any(part is None for part in parts):
        return None
    return "/".join(str(part) for part in parts) + (f"^{power}" if power else "")


def _remove_plural(name: str) -> str | None:
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))
