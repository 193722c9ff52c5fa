"""What stands on the terminal: the prompts, the answers as they come, the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedattn.cache import InvariantError
from pagedattn.demo.run import Answer, Run
from pagedattn.model import Tokenizer
from pagedattn.viz.state import PoolState, State, capture
from pagedattn.viz.style import owner_colour
from pagedattn.viz.terminal import (
    draw_block_tables,
    draw_memory,
    draw_pool,
    draw_strip,
    joined,
    label,
)


def is_animated(console: Console) -> bool:
    """Whether lines on this console can be drawn again: a terminal, and not a file or a pipe."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def busy(console: Console, doing: str) -> Iterator[None]:
    """Say what is being done: with a spinner on a terminal, as a line elsewhere."""
    if is_animated(console):
        with console.status(Text(doing)):
            yield
    else:
        console.print(Text(f"{doing} …"))
        yield


def show_prompts(console: Console, answers: list[Answer]) -> None:
    """Each prompt after its letter."""
    for i, answer in enumerate(answers):
        size = f"{len(answer.prompt_ids)} tokens"
        console.print(_after_label(i, answer, answer.prompt, size))
    console.print()


def show_answers(console: Console, run: Run) -> None:
    """Run, and show the answers: in panels while they grow on a terminal, elsewhere each as it
    ends."""
    if is_animated(console):
        with Live(console=console, get_renderable=lambda: _panels(run), refresh_per_second=12):
            for _ in run.tokens():
                pass
        return
    console.print("The answers, each when it ends:")
    for token in run.tokens():
        if token.finish_reason:
            answer = run.answers[token.index]
            console.print(_after_label(token.index, answer, answer.text.strip(), _size(answer)))


def show_speed(console: Console, run: Run) -> None:
    """Tokens read and written, and tokens a second."""
    read, written = run.num_prompt_tokens, run.num_written
    start, first, last = run.seconds[0], run.seconds[1], run.seconds[-1]
    line = f"\n{read} prompt tokens read in {first - start:.1f} s"
    later = written - len(run.answers)  # the first of each answer comes out of its prompt
    if later and last > first:
        rate = later / (last - first)
        line += f"; {written} tokens written together, {rate:.0f} tokens/s"
    console.print(line)


def show_pool(console: Console, run: Run) -> None:
    """Who lies where in the cache, after the step in which it held the most tokens."""
    state = run.fullest
    if state is None:
        return
    alive = _owners(state)
    ended = [a.label for a in run.answers if a.label not in alive]
    moment = f"after step {run.fullest_step} of {run.num_steps}, when it is fullest"
    if ended:
        moment += f"; {joined(ended)} ended before and gave {_its(ended)} memory back"
    what = "pool of blocks" if isinstance(state, PoolState) else "arena of slots"
    console.print(_heading(f"The {what} {moment}:"))
    console.print(draw_pool(state))


def show_memory(console: Console, run: Run) -> None:
    """The cache in that moment: its pool, the block tables, the memory in numbers."""
    state, config = run.fullest, run.cache.config
    if state is None:
        return
    show_pool(console, run)
    console.print()
    console.print(draw_block_tables(state))
    console.print()
    console.print(draw_memory(state.usage, config, len(_owners(state))))


def show_invariants(console: Console, run: Run) -> bool:
    """What ``check_invariants`` says, of every step and of the end; whether all is well."""
    broken = run.broken
    if broken is None:
        try:
            run.cache.check_invariants()
        except InvariantError as error:
            broken = f"after the end: {error}", capture(run.cache)
    if broken is not None:
        show_failure(console, f"check_invariants, {broken[0]}", broken[1])
        return False
    usage = run.cache.usage()
    console.print(
        f"\ncheck_invariants: all is well after each of {run.num_steps} steps, and at the end.\n"
        f"Then {usage.free} of {usage.total} slots are free."
    )
    return True


def show_changes(
    console: Console, tokenizer: Tokenizer, answers: list[Answer], healthy: list[list[int]]
) -> bool:
    """Where each answer first differs from the healthy one; whether any does. An answer that never
    came to its end counts as far as it came."""
    same = []
    for i, (answer, wanted) in enumerate(zip(answers, healthy, strict=True)):
        pairs = zip(answer.token_ids, wanted, strict=False)
        common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if common is None and (len(answer.token_ids) == len(wanted) or not answer.finish_reason):
            same.append(answer.label)
            continue
        if common is None:
            common = min(len(answer.token_ids), len(wanted))
        console.print(Text(f"answer {answer.label} changed after {common} tokens", "bold red"))
        for words, ids in (("with the bug", answer.token_ids), ("without it", wanted)):
            kept = printable(tokenizer.decode(ids[:common]))
            rest = printable(tokenizer.decode(ids[common:]))
            line = Text.assemble(f"  {words}: ", kept, (rest, f"bold {owner_colour(i)}"))
            console.print(line)
    if same:
        console.print(f"as without the bug: {joined(same)}")
    return len(same) < len(answers)


def show_failure(console: Console, what: str, state: State | None) -> None:
    """What went wrong, and the pool as it was."""
    console.print(Text(f"\n{what}", style="bold red"))
    if state is not None:
        console.print(draw_pool(state))


def printable(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _panels(run: Run) -> RenderableType:
    panels = [
        Panel(
            Text(printable(answer.text).strip()),
            title=Text.assemble(label(answer.label, i), (f" {_excerpt(answer.prompt)}", "default")),
            title_align="left",
            subtitle=Text(_size(answer), style="default"),
            subtitle_align="right",
            border_style=owner_colour(i),
        )
        for i, answer in enumerate(run.answers)
    ]
    if run.last is None:
        return Group(*panels, Text("reading the prompts …", style="dim"))
    strip = draw_strip(run.last, run.cache.config.block_size)
    return Group(*panels, Text.assemble("the cache, a letter a block: ", strip))


def _after_label(i: int, answer: Answer, text: str, size: str) -> Table:
    """The answer's letter, then the text in a column of its own."""
    line = Table.grid(padding=(0, 1))
    line.add_row(label(answer.label, i), Text.assemble(printable(text), (f"  ({size})", "dim")))
    return line


def _size(answer: Answer) -> str:
    words = {None: "", "stop": ", done", "length": ", cut here"}[answer.finish_reason]
    return f"{len(answer.token_ids)} tokens{words}"


def _excerpt(prompt: str) -> str:
    line = " ".join(printable(prompt).split())
    return line if len(line) <= 50 else f"{line[:49]}…"


def _heading(words: str) -> Text:
    return Text(f"\n{words}\n", style="bold")


def _owners(state: State) -> list[str]:
    if isinstance(state, PoolState):
        return [owner.name for owner, _ in state.tables]
    return [owner.name for owner, _, _ in state.slabs]


def _its(names: list[str]) -> str:
    return "its" if len(names) == 1 else "their"
