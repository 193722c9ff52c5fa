"""Formulas in LaTeX become MathML, which browsers draw by themselves."""

import html
import re
import xml.etree.ElementTree as ET

from latex2mathml.commands import MATRICES
from latex2mathml.converter import convert_to_element

ENVIRONMENTS = frozenset(name.lstrip("\\") for name in MATRICES)
_ACTIVE_IN_MARKDOWN = re.compile(r"[\\`*_\[\]~|$!]")


def mathml(latex: str, *, display: bool = False) -> str:
    """One line of MathML that Markdown carries through unchanged.

    Raises ValueError when the formula is not understood. The converter itself lets much pass
    (unknown commands, unbalanced braces), so what it would print as raw LaTeX is refused here.
    """
    _refuse_unbalanced_braces(latex)
    for name in re.findall(r"\\begin\{([^}]*)\}", latex):
        if name not in ENVIRONMENTS:
            raise ValueError(f"unknown environment {name!r}; use split, cases, array or a matrix")
    try:
        root = convert_to_element(latex, display="block" if display else "inline")
    except Exception as error:  # the converter's errors share no base class
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).removesuffix(" Error")
        raise ValueError(words.lower()) from error
    for element in root.iter():
        if element.text:
            element.text = _plain(element.text)
    text = ET.tostring(root, encoding="us-ascii").decode()
    return re.sub(r"(?<=>)[^<]+", lambda found: _escaped(found[0]), text)


def _refuse_unbalanced_braces(latex: str) -> None:
    depth = 0
    for brace in re.findall(r"[{}]", re.sub(r"\\.", "", latex, flags=re.S)):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        raise ValueError("unbalanced braces")


def _plain(text: str) -> str:
    """An element's text with entities resolved, or ValueError where raw LaTeX is left in it."""
    if text == "&":
        raise ValueError("'&' stands outside an environment")
    plain = re.sub(r"\\([_%#&$ ])", r"\1", html.unescape(text))
    if "\\" in plain and plain != "\\":
        raise ValueError(f"unknown command {plain.strip()}")
    return plain


def _escaped(text: str) -> str:
    return _ACTIVE_IN_MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", text)
