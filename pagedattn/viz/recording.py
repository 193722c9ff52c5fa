"""A run, frame by frame: snapshots of a cache that can be drawn, or played with a slider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedattn.cache import KVCache
from pagedattn.viz.pool import draw_pool
from pagedattn.viz.state import State, capture
from pagedattn.viz.style import Picture, png


@dataclass(frozen=True)
class Frame:
    """The state of a cache at one moment, and what had just happened."""

    state: State
    caption: str


class Recording:
    """Snapshots of one cache, in order. Later changes of the cache leave them as they are.

    A sequence keeps its colour through the whole recording; so do free blocks that can still be
    found, and those that are found are marked.
    """

    def __init__(self, cache: KVCache) -> None:
        capture(cache)
        self.cache = cache
        self.frames: list[Frame] = []

    def snapshot(self, caption: str) -> None:
        """Keep what the cache holds now."""
        before = self.frames[-1].state if self.frames else None
        self.frames.append(Frame(capture(self.cache, before), caption))

    def draw(self, i: int) -> Picture:
        """Frame ``i``, counted from 0. Raises ValueError if there is no such frame."""
        if not 0 <= i < len(self.frames):
            raise ValueError(f"frame {i} of a recording with {len(self.frames)} frames")
        return draw_pool(self.frames[i].state, self.frames[i].caption)

    def play(self) -> Player:
        """The frames with a slider, as the result of a notebook cell. ValueError without a
        frame."""
        if not self.frames:
            raise ValueError("the recording is empty; take a snapshot first")
        return Player(self)


class Player:
    """A slider over the frames of a recording.

    Where no kernel runs, on a code host for instance, the first frame shows in its place.
    """

    def __init__(self, recording: Recording) -> None:
        from ipywidgets import Image, IntSlider, Layout, VBox  # type: ignore[import-untyped]

        self._pictures = [recording.draw(i) for i in range(len(recording.frames))]
        self._first = png(self._pictures[0])
        self.slider = IntSlider(0, 0, len(self._pictures) - 1, description="step")
        self.image = Image(value=self._first, format="png", layout=Layout(max_width="691px"))
        self.widget = VBox([self.slider, self.image])
        self.slider.observe(self._show, names="value")

    def _show(self, change: Any) -> None:
        self.image.value = png(self._pictures[change["new"]])

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {**self.widget._repr_mimebundle_(**kwargs), "image/png": self._first}
        return data, {"image/png": self._pictures[0].size_on_page()}
