"""One line of progress, in a terminal, a notebook, or a log file.

A thin layer over tqdm that never stops the work it reports on: without a usable widget it is text, without a usable
stream it is silent. Starts no thread; a worker thread may call `update`, and the event loop in which the bar was made
then draws it (Colab shows no widget change that another thread makes). It shows numbers; it does not compute them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

from ..events import EVENTS, Phase

logger = logging.getLogger("artnb")

PIPE_INTERVAL_S = 10.0
"""Seconds between two lines where the output is a file or a pipe: every refresh stays in the log."""
SCREEN_INTERVAL_S = 0.1


class Progress:
    """A progress bar. `desc=None` makes it silent; `total=None` counts without an end.

        with Progress(len(items), "evaluate", unit="item") as progress:
            for item in items:
                progress.update(1, reward=0.5)

    `file`: where text goes; standard error by default. `phase`: what the dashboard calls this work.
    """

    def __init__(
        self,
        total: int | None = None,
        desc: str | None = None,
        unit: str = "it",
        *,
        initial: int = 0,
        file: TextIO | None = None,
        phase: Phase = "work",
    ) -> None:
        self.n = initial
        self._begun = time.monotonic()
        self._closed = False
        self._told: dict[str, Any] = {"phase": phase, "desc": desc, "unit": unit}
        self.total = total
        self.postfix: dict[str, Any] = {}
        stream = file if file is not None else sys.stderr
        self._thread = threading.get_ident()
        self._loop = _running_loop()
        self._bar = None if desc is None or stream is None else _bar(total, desc, unit, initial, file, stream)

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Advance by `n`; `postfix` replaces the values of the same names at the end of the line."""
        self.n += n
        self.postfix.update(postfix)
        self._tell(closed=False)
        if self._bar is None:
            return
        if self._loop is not None and threading.get_ident() != self._thread and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._show)
        else:
            self._show()

    def _tell(self, *, closed: bool) -> None:
        if EVENTS:
            seconds = time.monotonic() - self._begun
            shown = dict(self.postfix)
            EVENTS.emit(
                "progress", **self._told, done=self.n, total=self.total, seconds=seconds, closed=closed, shown=shown
            )

    def set_total(self, total: int | None) -> None:
        """More, or less, is to be done than was thought."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total
            widget = getattr(self._bar, "container", None)
            if widget is not None and total:
                widget.children[1].max = total

    def close(self) -> None:
        """Show the last state and leave the line. Repeatable."""
        if not self._closed:
            self._closed = True
            self._tell(closed=True)
        if self._bar is None:
            return
        self._show()
        bar, self._bar = self._bar, None
        if bar is None:
            return
        try:
            bar.close()
            if (screen := getattr(bar, "screen", None)) is not None:
                screen.update(bar.container)  # a saved notebook shows the text of the last display, not the widget
        except (OSError, ValueError) as error:  # the stream is gone: there is nobody to show it to
            logger.debug("the last line of the progress bar was not shown: %r", error)

    def __enter__(self) -> Self:
        self._tell(closed=False)  # until the first item is done the dashboard would say that nothing runs
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _show(self) -> None:
        if self._bar is None:
            return
        try:
            self._bar.set_postfix({k: _format(v) for k, v in list(self.postfix.items())}, refresh=False)
            self._bar.update(self.n - self._bar.n)
        except (OSError, ValueError) as error:  # e.g. a closed pipe: the work goes on, without a bar
            self._bar.disable = True
            self._bar = None
            logger.debug("the progress bar is off, its stream failed: %r", error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _bar(total: int | None, desc: str, unit: str, initial: int, file: TextIO | None, stream: TextIO) -> Any:
    """A tqdm bar: the notebook's widget where one can be shown, otherwise text. tqdm is loaded here, not on import."""
    import tqdm.auto
    import tqdm.std

    isatty = getattr(stream, "isatty", None)
    on_screen = bool(isatty and isatty())
    options: dict[str, Any] = {"total": total, "desc": desc, "unit": unit, "initial": initial, "leave": True}
    if file is None and issubclass(tqdm.auto.tqdm, _notebook_class()):
        try:
            bar = _quiet(tqdm.auto.tqdm)(**options, display=False)
        except Exception as error:  # whatever a half-installed ipywidgets raises: text shows the same numbers
            logger.debug("no widget for the progress bar, using text: %r", error)
        else:
            if getattr(bar.container, "comm", None) is not None:
                from IPython.display import display

                bar.screen = display(bar.container, display_id=True)  # type: ignore[no-untyped-call]
                return bar
            bar.disable = True  # nobody listens: the widget would never be drawn
        on_screen = True  # a notebook's stream is no tty but handles "\r"
    return _quiet(tqdm.std.tqdm)(
        **options,
        file=stream,
        dynamic_ncols=on_screen,
        mininterval=SCREEN_INTERVAL_S if on_screen else PIPE_INTERVAL_S,
        miniters=1,
    )


def _quiet(kind: Any) -> Any:
    """The bar class without tqdm's monitor thread (the class attribute must not be changed for everybody)."""
    return type("Bar", (kind,), {"monitor_interval": 0})


def _notebook_class() -> tuple[type, ...]:
    """tqdm's widget class if it is loaded (tqdm.auto loads it in a notebook only), as a tuple for issubclass."""
    module = sys.modules.get("tqdm.notebook")
    return () if module is None else (module.tqdm_notebook,)
