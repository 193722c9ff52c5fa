"""What is a formula in a text, and what becomes of it."""

import html
import re
from collections.abc import Callable

import pytest

from pagedattn.book.mathml import mathml

Render = Callable[[str], str]
Problems = Callable[[str], list[str]]


def words(mathematics: str) -> str:
    """The characters that a browser would draw."""
    return html.unescape(re.sub(r"<[^>]*>", "", mathematics))


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a $x$ b", "a x b"),
        ("($x$), $y$-th", "(x), y-th"),
        ("$x$ costs \\$5", "x costs \\$5"),
        ("$a\n+b$", "a+b"),
        ("> $a\n> +b$", "> a+b"),
        ("[see $x$](#y)", "[see x](#y)"),
        ("| $x$ | $y$ |", "| x | y |"),
    ],
)
def test_dollars_enclose_a_formula(render: Render, text: str, drawn: str) -> None:
    result = render(text)
    assert "<math" in result
    assert words(result) == drawn


@pytest.mark.parametrize(
    "text",
    [
        "between $5 and $10",
        "from $5-$10",
        "$ x $",
        "$x $",
        "US$5 or A$x",
        "one $ alone",
        "\\$x$",
        "`$x$` and ``a ` $y$``",
        "```\n$x$\n```",
        "~~~text\n$$x$$\n~~~",
        "- item\n\n  ```python\n  $x$\n  ```",
        "> ````\n> ```\n> $x$\n> ````",
        "<!-- $x$ -->",
        "$a\n\nb$",
        "`[a](missing.md)` `{{#include x}}`",
    ],
)
def test_what_is_no_formula_stays(render: Render, text: str) -> None:
    assert render(text) == text


def test_display_formula_is_one_line_in_its_paragraph(render: Render) -> None:
    result = render("before\n\n$$\n\\begin{cases} a & b \\\\\n c & d \\end{cases}\n$$\n\nafter\n")
    lines = result.split("\n")
    assert (lines[0], lines[4]) == ("before", "after")
    assert lines[2].startswith("<math") and 'display="block"' in lines[2]
    assert words(lines[2]) == "{abcd"


def test_formula_survives_markdown() -> None:
    result = mathml(r"a*b*c_{i}_{}[j] < \text{num\_blocks}".replace("_{}", ""))
    assert not re.search(r"[*_\[\]`|~$!\\]", re.sub(r"<[^>]*>|&#\d+;", "", result))
    assert words(result) == "a*b*ci[j]<num_blocks"
    assert "\n" not in mathml("a\n+ b")


@pytest.mark.parametrize(
    ("latex", "why"),
    [
        (r"\frac{a}{b", "unbalanced braces"),
        ("a}{b", "unbalanced braces"),
        (r"\lciel x", r"unknown command \\lciel"),
        (r"\begin{aligned} a \end{aligned}", "unknown environment 'aligned'"),
        ("a & b", "'&' stands outside"),
        ("a^b^c", "double superscripts"),
        (r"\left( x", "missing right"),
        ("", "no available tokens"),
    ],
)
def test_bad_latex_is_refused(latex: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mathml(latex)


def test_bad_formula_names_file_line_and_formula(problems: Problems) -> None:
    (problem,) = problems("# 01\n\ntext $x$ and\n$\\foo y$\n")
    assert problem == ("chapters/01/README.md:4: formula '\\\\foo y': unknown command \\foo")
    (problem,) = problems("$$ x\n\n$y$")
    assert problem.startswith("chapters/01/README.md:1: '$$' opens a formula")


def test_all_problems_are_listed(problems: Problems) -> None:
    found = problems("$\\foo$\n\n[a](b.md)\n\n{{#include x.py}}\n\n$\\bar{$\n")
    assert [int(problem.split(":")[1]) for problem in found] == [1, 3, 5, 7]
