"""The trajectory inspector: a widget that lists a step's trajectories and shows them one by one or side by side.

The browser first gets a compact index and asks for messages when they are opened, so that a step of thousands opens
at once. The drawing is in inspector.js and inspector_view.js; what it is sent is made in trajectory_view.py.
Best and worst trajectory are displayed beside it as static HTML, which a page without kernel or widgets still shows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from ..config import TrainConfig
from ..durable import replace_file
from ..errors import ConfigError
from ..tracking.history import History
from ..trajectories import Trajectory, TrajectoryGroup
from .plots import OKABE_ITO
from .trajectory_html import best_and_worst, trajectory_html
from .trajectory_query import Finder, Query
from .trajectory_source import MemorySource, Source, Standings
from .trajectory_view import MAX_CHARACTERS, index_values, to_jsonl, trajectory_values

log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], list[bytes]]
EXPORT_BYTES = 4 << 20
"""About so much of an export goes into one message: a larger one would hold up the others."""
PREVIEW_CHARACTERS, PREVIEW_MESSAGES = 2000, 40
COMPARED = 16
"""Trajectories of one group that are put side by side."""


def _asset(name: str) -> str:
    return files("artnb.notebook").joinpath(name).read_text(encoding="utf-8")


def stylesheet() -> str:
    """inspector.css with the colours of plots.py as variables."""
    colours = "".join(f"--artnb-c{i}:{colour};" for i, colour in enumerate(OKABE_ITO))
    return f".artnb-inspector{{{colours}}}\n{_asset('inspector.css')}"


def script() -> str:
    """The browser half as one ES module: anywidget takes a single file."""
    return f"{_asset('inspector_view.js')}\n{_asset('inspector.js')}"


class Inspector(anywidget.AnyWidget):
    """Trajectories of groups in memory, or of a step of a history. Shown by being a cell's last line.

    Either `groups`, or `history` with `step` and `split`. `config` and `max_row_tokens` (the longest row, in tokens,
    that could be trained) say how advantages and reasons are found; pass the step's own where it was not the default.

        inspector = model.inspect()
        inspector.find(reward=(None, 0.2), text="illegal move")  # numbers of trajectories
        inspector.selection()  # ticked in the browser; without ticks, those that pass its filters
    """

    _esm = script()
    _css = stylesheet()

    selected = traitlets.List(traitlets.Int(), help="Numbers of the ticked trajectories.").tag(sync=True)
    preview = traitlets.List(
        traitlets.Dict(), help="Best and worst trajectory: what is painted while, or if, no kernel answers."
    ).tag(sync=True)
    static_class = traitlets.Unicode(help="Of the static HTML, which is hidden while the widget is seen.").tag(
        sync=True
    )

    def __init__(
        self,
        groups: Iterable[TrajectoryGroup] | None = None,
        *,
        history: History | None = None,
        step: int | None = None,
        split: str | None = None,
        config: TrainConfig | None = None,
        max_row_tokens: int | None = None,
        title: str = "",
    ) -> None:
        if (groups is None) is (history is None):
            raise ConfigError("Inspector: give either groups or a history")
        if history is None and (step is not None or split is not None):
            raise ConfigError("Inspector: step and split choose from a history; groups in memory have neither")
        self._history = history
        self._title = title
        self._config = config or TrainConfig()
        self._max_row_tokens = max_row_tokens
        self._mutex = threading.Lock()
        self._query = Query()
        if history is not None:
            at, name = newest(history, step, split)
            self._load(history.stored(at, name), at, name)
        else:
            self._load(MemorySource(list(groups or [])), None, None)
        super().__init__()
        self.static_class = f"artnb-static-{self.model_id}"
        self.preview = self._preview()
        self.on_msg(self._received)

    # For cells -----------------------------------------------------------------------------------

    def find(self, **filters: Any) -> list[int]:
        """Numbers of the trajectories that pass, in order; the filters are `Query`'s fields.

        Raises ConfigError for an unknown filter. It changes nothing that is shown.
        """
        return self._finder.run(Query.parse(filters))

    def selection(self) -> list[Trajectory]:
        """The ticked trajectories as objects; without ticks those that pass the browser's filters, in its order."""
        return [self._source.trajectory(number) for number in self._chosen()]

    def trajectory(self, number: int) -> Trajectory:
        """Trajectory `number` of the list."""
        self._check(number)
        return self._source.trajectory(number)

    def save(self, path: Path | str) -> Path:
        """Write the selection as JSON lines; `artnb.notebook.trajectory_view.from_jsonl` reads them back exactly."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, (to_jsonl([self._placed(number)]) for number in self._chosen()))
        return target

    def __len__(self) -> int:
        return len(self._source.heads)

    def __repr__(self) -> str:
        where = f"step {self._step}, {self._split}" if self._step is not None else "in memory"
        return f"<Inspector of {len(self._source.heads)} trajectories in {len(self._source.groups)} groups, {where}>"

    def _ipython_display_(self, **_: Any) -> None:
        """The widget, then the static HTML as an output of its own.

        In one output a page without a kernel would show the widget alone, and that only where its scripts can be
        fetched: of several forms nbconvert takes the widget as soon as its state is saved with the notebook.
        """
        from IPython.display import display

        if self.comm is not None and (bundle := self._repr_mimebundle_()) is not None:  # else it was closed
            display(bundle[0], metadata=bundle[1], raw=True)  # type: ignore[no-untyped-call]
        page = f'<div class="{self.static_class}">\n{self.static_html()}\n</div>'
        display({"text/plain": repr(self), "text/html": page}, raw=True)  # type: ignore[no-untyped-call]

    def static_html(self) -> str:
        """Best and worst trajectory, escaped and cut."""
        return "".join(trajectory_html(t, title) for title, _, t in self._extremes())

    # What the browser asks -----------------------------------------------------------------------

    def answer(self, asked: dict[str, Any]) -> Iterator[Answer]:
        """The messages (and binary buffers) that answer one of the browser's, e.g. {"kind": "index", "ask": 1}.

        Every answer carries the `ask` of its question. What fails is answered with kind "error" and a sentence.
        """
        ask = asked.get("ask")
        try:
            kinds: dict[str, Callable[[dict[str, Any]], Iterator[Answer]]] = {
                "index": self._index, "open": self._open, "query": self._find, "standings": self._stand,
                "trajectory": self._one, "compare": self._compare, "export": self._export,
            }  # fmt: skip
            kind = asked.get("kind")
            if kind not in kinds:
                raise ConfigError(f"the inspector knows no message of kind {kind!r}")
            for content, buffers in kinds[kind](asked):
                yield {"kind": kind, **content, "ask": ask}, buffers
        except Exception as error:
            # The user looks at the browser, not at the kernel's log.
            log.exception("the inspector could not answer %r", asked.get("kind"))
            yield {"kind": "error", "message": f"{type(error).__name__}: {error}", "ask": ask}, []

    def _received(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if not isinstance(content, dict):
            return

        def work() -> None:
            for message, buffers in self.answer(content):
                self.send(message, buffers or None)

        if _is_slow(content):  # reads every trajectory's messages: not on the loop that rollouts and training share
            threading.Thread(target=work, name="artnb-inspector", daemon=True).start()
        else:
            work()

    def _index(self, asked: dict[str, Any]) -> Iterator[Answer]:
        saved = [] if self._history is None else [list(place) for place in self._history.saved()]
        where = {"step": self._step, "split": self._split, "title": self._title, "saved": saved}
        yield {**index_values(self._source), **where, "selected": list(self.selected)}, []

    def _open(self, asked: dict[str, Any]) -> Iterator[Answer]:
        """Another step or split of the same history."""
        if self._history is None:
            raise ConfigError("groups in memory have no steps")
        step, split = newest(self._history, asked.get("step"), asked.get("split"))
        self._load(self._history.stored(step, split), step, split)
        self._query = Query()
        self.selected = []
        self.preview = self._preview()
        yield from self._index(asked)

    def _find(self, asked: dict[str, Any]) -> Iterator[Answer]:
        query = Query.parse(asked["query"])
        finder = self._finder
        numbers = finder.run(query)
        with self._mutex:
            if finder is self._finder:  # no other step was opened meanwhile
                self._query = query
        yield {"numbers": numbers}, []

    def _stand(self, asked: dict[str, Any]) -> Iterator[Answer]:
        """Standings of some groups: what the list shows beside their trajectories."""
        for group in asked["groups"]:
            standings = self._standings.group(int(group))
            members = self._source.groups[int(group)].members
            values = [[n, s.trained, s.advantage, s.reason] for n, s in zip(members, standings, strict=True)]
            yield {"group": group, "standings": values}, []

    def _one(self, asked: dict[str, Any]) -> Iterator[Answer]:
        yield {"trajectory": self._values(int(asked["number"]), bool(asked.get("whole")))}, []

    def _compare(self, asked: dict[str, Any]) -> Iterator[Answer]:
        """The trajectories of a group, or those asked for by number."""
        numbers = asked.get("numbers") or self._source.groups[int(asked["group"])].members
        shown = [self._values(int(number), False) for number in numbers[:COMPARED]]
        yield {"trajectories": shown, "left_out": len(numbers) - len(shown)}, []

    def _export(self, asked: dict[str, Any]) -> Iterator[Answer]:
        numbers = [int(number) for number in asked.get("numbers") or self._chosen()]
        part, size = [], 0
        for number in numbers:
            part.append(to_jsonl([self._placed(number)]))
            size += len(part[-1])
            if size >= EXPORT_BYTES:
                yield {"done": False}, [b"".join(part)]
                part, size = [], 0
        name = "trajectories.jsonl" if self._step is None else f"{self._split}-{self._step:04d}-selection.jsonl"
        yield {"done": True, "name": name, "count": len(numbers)}, [b"".join(part)]

    # Inside --------------------------------------------------------------------------------------

    def _load(self, source: Source, step: int | None, split: str | None) -> None:
        self._step, self._split = step, split
        self._source = source
        self._standings = Standings(source, self._config, split=split, max_row_tokens=self._max_row_tokens)
        self._finder = Finder(source, self._standings)
        self._extreme: list[tuple[str, int]] | None = None

    def _values(self, number: int, whole: bool) -> dict[str, Any]:
        self._check(number)
        standing = self._standings.of(number)
        supervised = self._split == "sft"
        longest = None if whole else MAX_CHARACTERS
        values = trajectory_values(self._source.trajectory(number), standing, supervised=supervised, longest=longest)
        head = self._source.heads[number]
        return {**values, "number": number, "group": head.group, "index": head.index}

    def _preview(self) -> list[dict[str, Any]]:
        """Short enough to be saved with a notebook: texts without tokens."""
        found = []
        for title, number, trajectory in self._extremes():
            values = trajectory_values(trajectory, longest=PREVIEW_CHARACTERS, messages=PREVIEW_MESSAGES)
            values["logs"] = []
            for messages in values["histories"]:
                for message in messages:
                    message["tokens"] = None
            head = self._source.heads[number]
            found.append({**values, "title": title, "number": number, "group": head.group, "index": head.index})
        return found

    def _extremes(self) -> list[tuple[str, int, Trajectory]]:
        """(title, number, trajectory) of the best and the worst; their messages are read, no others."""
        if self._extreme is None:
            self._extreme = best_and_worst([head.reward for head in self._source.heads])
        return [(title, number, self._source.trajectory(number)) for title, number in self._extreme]

    def _chosen(self) -> Sequence[int]:
        for number in self.selected:
            self._check(number)
        return list(self.selected) or self._finder.run(self._query)

    def _placed(self, number: int) -> tuple[int, int, Trajectory]:
        self._check(number)
        head = self._source.heads[number]
        return head.group, head.index, self._source.trajectory(number)

    def _check(self, number: int) -> None:
        if not 0 <= number < len(self._source.heads):
            raise ConfigError(f"there is no trajectory {number}; there are {len(self._source.heads)}, from 0")


def newest(history: History, step: int | None, split: str | None) -> tuple[int, str]:
    """The step and split to show: the newest that fits, training rollouts before others.

    Raises ConfigError if nothing fits, with what there is.
    """
    saved = history.saved()
    fitting = [(at, name) for at, name in saved if step in (None, at) and split in (None, name)]
    if not fitting:
        known = (
            ", ".join(f"{name} {at}" for at, name in saved[-20:]) or "none yet; train a step or call model.log(groups)"
        )
        wanted = " ".join(
            [*([] if step is None else [f"of step {step}"]), *([] if split is None else [f"of split {split!r}"])]
        )
        raise ConfigError(f"no trajectories {wanted or 'to inspect'} in {history.folder}; there are: {known}")
    return max(fitting, key=lambda place: (place[0], place[1] == "train"))


def _is_slow(asked: dict[str, Any]) -> bool:
    query = asked.get("query") or {}
    return asked.get("kind") == "export" or bool(query.get("text")) or query.get("trained") is not None
