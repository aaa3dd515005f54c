"""Text from records, made safe for what shows it: a record may be somebody else's, and its words are data.

A terminal obeys escape sequences and characters that turn the direction of writing, Markdown and spreadsheets obey
links, images and formulas. HTML is escaped by the templates, LaTeX by tabulate.
"""

import re

# As JSON may write them: control characters but tab and line feed, DEL, the C1 set, and marks of direction. An even
# number of backslashes before one are letters of their own.
_UNPRINTABLE = re.compile(
    rb"((?<!\\)(?:\\\\)*)"
    rb"(?:\\u(?:00[01][0-9a-fA-F]|007[fF]|00[89][0-9a-fA-F]|200[eEfF]|202[a-eA-E]|206[6-9])|\\[bfr])"
    rb"|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]"
)
_MARKS = (b"\\u", b"\\b", b"\\f", b"\\r", b"\x7f")
# `\u000a` and `\u0009` are other spellings of characters that stay.
_KEPT = re.compile(rb"\\u000[9aA]$")
_UNPRINTABLE_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Not brackets that no address can follow, as those of an interval, nor underscores, which mean nothing within a word.
_MARKED_UP = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")
# The last four are full-width (https://owasp.org/www-community/attacks/CSV_Injection).
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def printable_json(content: bytes) -> bytes:
    """Return JSON whose strings have a question mark for each character that a terminal would obey."""
    # Most records have no backslash at all, which is found out faster.
    if content.isascii() and not ((b"\\" in content or b"\x7f" in content) and any(mark in content for mark in _MARKS)):
        return content
    return _UNPRINTABLE.sub(lambda found: found[0] if _KEPT.search(found[0]) else (found[1] or b"") + b"?", content)


def printable_text(text: str) -> str:
    """Return text with a question mark for each character that a terminal would obey, but tab and line feed."""
    return _UNPRINTABLE_TEXT.sub("?", text)


def markdown_text(text: str) -> str:
    """Return text, on one line, that Markdown shows literally: no link, image, tag or emphasis."""
    return _MARKED_UP.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def csv_cell(value: object) -> object:
    """Return a cell's value; text that a spreadsheet would compute begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
