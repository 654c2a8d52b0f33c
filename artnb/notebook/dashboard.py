"""The live dashboard: a widget that shows a run while it happens, and afterwards from the history on disk.

It listens to artnb.events, keeps each run as plain data (run_view.py, phases.py) and sends what changed at most four
times a second; dashboard.js draws. Beside the widget it displays a static picture (static.py), which a saved notebook
still shows, and which the widget hides while it lives. Trains nothing and owns no file.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets

from ..config import check_choice, check_number
from ..errors import ConfigError
from ..events import EVENTS, Event
from ..tracking.history import History
from .charts import charts
from .courier import Courier
from .phases import Phases
from .run_view import RunView
from .static import curve_html, static_html

if TYPE_CHECKING:
    from ..model import Model

logger = logging.getLogger("artnb")

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
STATIC_FIRST_S = 30.0
STATIC_SHARE = 200.0
"""While a cell runs, the static picture is made again when so many times its own cost has passed: 0.5 % of the time."""
_OPEN: weakref.WeakValueDictionary[str, Dashboard] = weakref.WeakValueDictionary()
"""The dashboards of this process by the run they show: a cell that is run again gets the one that is there."""


@dataclass
class _Run:
    """One run that is shown. `name`: "project/name" as events say it, None for a folder."""

    view: RunView
    source: Callable[[], History]
    name: str | None
    folder: Path | None = None  # what was loaded; another one, or None, is loaded anew
    summary: dict[str, Any] = field(default_factory=dict)


class Dashboard(anywidget.AnyWidget):
    """Made by `model.dashboard()`. `close()` ends it and leaves the static picture.

    Its traits are what JavaScript gets: `past` and `recent` hold each run's metrics in two parts, so that a new step
    sends a few kilobytes however long the run is.
    """

    _esm: ClassVar[str] = "\n".join((HERE / name).read_text("utf-8") for name in ("chart.js", "dashboard.js"))
    _css: ClassVar[Path] = HERE / "dashboard.css"

    runs: Any = traitlets.List().tag(sync=True)  # [{"name": ..., "summary": ...}]
    head = traitlets.Dict().tag(sync=True)  # phases.Phases.head
    past = traitlets.Dict().tag(sync=True)  # index of the run → run_view.Block
    recent = traitlets.Dict().tag(sync=True)
    charts: Any = traitlets.List().tag(sync=True)
    metric = traitlets.Unicode("").tag(sync=True)  # what the selectable chart shows
    theme = traitlets.Unicode("auto").tag(sync=True)
    static_class = traitlets.Unicode("").tag(sync=True)

    def __init__(self, model: Model) -> None:
        self._lock = threading.RLock()
        self._runs: list[_Run] = []
        self._phases = Phases()
        self._closed = False
        self._display: str | None = None  # display id of the static picture, once displayed
        self._static_stale = False
        self._static_cost = 0.0
        self._static_due = 0.0
        super().__init__()
        self.static_class = f"artnb-static-{self.model_id}"
        self._courier = Courier(self._flush)
        self._model = model
        self._leave = _listen(EVENTS.subscribe, self, "_on_event")
        weakref.finalize(self, self._leave)
        self._unhook: Callable[[], None] = lambda: None

    def configure(
        self,
        model: Model,
        *,
        compare: Sequence[Model | Path | str] = (),
        metrics: Sequence[str] = (),
        solved: str | None = None,
        steps: int | None = None,
        theme: str = "auto",
    ) -> Dashboard:
        """What to show; see `Model.dashboard`. Reads the history anew. Returns itself."""
        check_choice("dashboard", "theme", theme, ("auto", "light", "dark"))
        if steps is not None:
            check_number("dashboard", "steps", steps, low=1, whole=True)
        for option, value in (("compare", compare), ("metrics", metrics)):
            if isinstance(value, str | Path):
                raise ConfigError(f"dashboard: {option} is a list, e.g. {option}=[{str(value)!r}]")
        runs = [_of_model(model), *(_of_any(item) for item in compare)]
        with self._lock:
            self._model = model
            self._runs = runs
            self._phases.planned_steps = steps
            self.charts = charts(solved, metrics)
            self.theme = theme
        self._courier.rebind()
        self._courier.now()
        return self

    def refresh(self) -> None:
        """Read the history again, e.g. when another process writes it."""
        with self._lock:
            for run in self._runs:
                run.folder = None
        self._courier.now()

    def close(self) -> None:
        """Stop listening, and leave the static picture with the newest state. Repeatable."""
        if self._closed:
            return
        self._leave()
        self._courier.cancel()
        self._courier.now()
        self._static_stale = True
        self._update_static(final=True)
        self._unhook()
        self._closed = True
        super().close()
        self.__dict__.pop("_repr_mimebundle_", None)  # ipywidgets takes it away; the picture can still be shown

    # What comes in ---------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """In any thread, many times a second: only takes note, unless it is time to send."""
        with self._lock:
            if event.kind == "progress":
                self._phases.progress(event.data, event.time)
            else:
                run = next((run for run in self._runs if run.name == event.model), None)
                if run is None:
                    return
                self._note(run, event)
        self._courier.poke()

    def _note(self, run: _Run, event: Event) -> None:
        step = int(event.data["step"])
        if event.kind == "step":
            if run is self._runs[0]:
                self._phases.step(step, event.time)
            if (last := run.view.last_step) is not None and step <= last:
                run.folder = None  # the run went back to an earlier checkpoint: later steps are gone from the disk, too
        run.view.add(step, event.data["split"], event.data["metrics"])
        self._static_stale = True

    # What goes out ---------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._closed or not self._runs:
            return
        with self._lock:
            changed = self._changed()
            with self.hold_sync():
                for name, value in changed.items():
                    setattr(self, name, value)
        if self._static_stale and time.monotonic() >= self._static_due:
            self._update_static(final=False)

    def _changed(self) -> dict[str, Any]:
        past, recent, counted = dict(self.past), dict(self.recent), False
        for index, run in enumerate(self._runs):
            history = run.source()
            if run.folder != history.folder:
                run.view.load(history)
                run.folder = history.folder
            old, new = run.view.changes()
            if old is not None:
                past[str(index)] = old
            if new is not None:
                recent[str(index)] = new
            if old is not None or new is not None:
                run.summary = run.view.summary()
                counted = True
        keep = {str(index) for index in range(len(self._runs))}
        changed: dict[str, Any] = {"head": self._phases.head(time.time(), self._runs[0].view.last_step)}
        if counted or len(self.runs) != len(self._runs):
            changed["past"] = {k: v for k, v in past.items() if k in keep}
            changed["recent"] = {k: v for k, v in recent.items() if k in keep}
            changed["runs"] = [{"name": run.view.name, "summary": run.summary} for run in self._runs]
        return changed

    # The static picture ----------------------------------------------------------------------------

    def static(self, *, examples: bool = True) -> str:
        """The run as HTML without scripts: the curve and, with `examples`, best and worst trajectory."""
        history = self._runs[0].source()
        title = f"{self._runs[0].view.name}: reward per step"
        return static_html(history, title=title) if examples else curve_html(history, title=title)

    def _bundle(self, *, examples: bool = True) -> dict[str, str]:
        return {
            "text/plain": repr(self),
            "text/html": f'<div class="{self.static_class}">\n{self.static(examples=examples)}\n</div>',
        }

    def _update_static(self, *, final: bool) -> None:
        """Replace the static picture where it was displayed. In the middle of a cell the curve alone, for speed."""
        if self._display is None or _shell() is None:
            return
        from IPython.display import display

        started = time.monotonic()
        bundle = self._bundle(examples=final)
        display(bundle, raw=True, display_id=self._display, update=True)  # type: ignore[no-untyped-call]
        now = time.monotonic()
        self._static_due = now + STATIC_SHARE * (now - started)
        self._static_stale = not final  # the trajectories follow when the cell ends

    def _cell_ended(self, *_: Any) -> None:
        """The end of a cell is when its outputs are kept; what is sent later some programs never see."""
        if self._closed:
            return
        self._courier.now()
        if self._static_stale:
            self._update_static(final=True)

    def _ipython_display_(self, **_: Any) -> None:
        """The widget, then the static picture as an output of its own that can be replaced without a flicker."""
        from IPython.display import display

        self._courier.rebind()
        view = self._repr_mimebundle_()
        if WIDGET in view:
            view["text/plain"] = f"The dashboard of {self._runs[0].view.name}, live while its kernel runs; as saved:"
            del view["text/html"]
            display(view, raw=True)  # type: ignore[no-untyped-call]
        again, self._display = self._display is not None, self._display or self.model_id
        display(self._bundle(), raw=True, display_id=self._display)  # type: ignore[no-untyped-call]
        self._static_due = time.monotonic() + STATIC_FIRST_S
        shell = _shell()
        if shell is not None and not again:
            self._unhook = _listen(lambda call: _register(shell, "post_run_cell", call), self, "_cell_ended")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]  # IPython takes both forms
        bundle: dict[str, Any] = dict(self._bundle())
        if not self._closed:
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return bundle

    def __repr__(self) -> str:
        if not self._runs:
            return "<dashboard>"
        run, others = self._runs[0].view, len(self._runs) - 1
        beside = f" and {others} more" if others else ""
        return f"<dashboard of {run.name}{beside}: {len(run.rows)} steps>"


def open_dashboard(model: Model, **options: Any) -> Dashboard:
    """The dashboard of the model's run: the one that is open already, or a new one."""
    key = _key(model)
    board = _OPEN.get(key)
    if board is None or board._closed:
        board = Dashboard(model)
        try:
            board.configure(model, **options)
        except BaseException:
            board.close()
            raise
        _OPEN[key] = board
        return board
    return board.configure(model, **options)


def _key(model: Model) -> str:
    return f"{model.project}/{model.name}"


def _of_model(model: Model) -> _Run:
    return _Run(RunView(_key(model)), model._history, _key(model))


def _of_any(item: Model | Path | str) -> _Run:
    if not isinstance(item, str | Path):
        if not hasattr(item, "_history"):
            raise ConfigError(f"dashboard: compare takes models and their folders, not a {type(item).__name__}")
        return _of_model(item)
    history = History(item)
    if not history.metrics_file.is_file():
        raise ConfigError(f"dashboard: {item} holds no history of a model; expected {history.metrics_file}")
    return _Run(RunView(history.folder.name), lambda: history, None)


def _listen(
    subscribe: Callable[[Callable[..., None]], Callable[[], None]], owner: Any, method: str
) -> Callable[[], None]:
    """Subscribe `owner.method` without keeping `owner` alive."""
    ref = weakref.ref(owner)

    def call(*args: Any) -> None:
        if (there := ref()) is not None:
            getattr(there, method)(*args)

    return subscribe(call)


def _shell() -> Any:
    """IPython's shell if this is one, without loading IPython."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def _register(shell: Any, event: str, call: Callable[..., None]) -> Callable[[], None]:
    shell.events.register(event, call)

    def unregister() -> None:
        if call in shell.events.callbacks[event]:
            shell.events.unregister(event, call)

    return unregister
