"""Plots as inline SVG whose colours are the page's CSS variables, so that one drawing serves light and dark.

matplotlib draws with placeholder colours; each placeholder is then replaced by `var(--name)`. Text stays text.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncguard.replay.scores import FloatArray

_PLACEHOLDERS: Final = {
    "ink": "#010203",
    "muted": "#040506",
    "line": "#070809",
    "series-a": "#0a0b0c",
    "series-b": "#0d0e0f",
    "series-c": "#101112",
    "bad": "#131415",
    "good": "#161718",
    "warn": "#191a1b",
}
_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "syncguard",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _PLACEHOLDERS["line"],
    "axes.labelcolor": _PLACEHOLDERS["muted"],
    "axes.titlecolor": _PLACEHOLDERS["ink"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _PLACEHOLDERS["line"],
    "grid.linewidth": 0.5,
    "xtick.color": _PLACEHOLDERS["muted"],
    "ytick.color": _PLACEHOLDERS["muted"],
    "text.color": _PLACEHOLDERS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_SIZE_INCHES: Final = (5.2, 3.1)  # 374 CSS pixels wide: its text is readable on a phone without zooming
WIDE_FROM: Final = 5
"""Steps above which the timeline takes the width of the page."""
_TICK_CHARACTERS: Final = 20
_FLOOR_NATS: Final = 1e-8  # where an exact zero is drawn on a logarithmic axis
PAIR_COLOURS: Final = {
    "A-B": "series-a",
    "B-C": "series-b",
    "A-C": "series-c",
    "B_new-C_new": "series-b",
    "B_new_warm-B_new": "series-a",
    "B_new-B_old": "series-c",
    "C_new-C_old": "muted",
}


def colour(name: str) -> str:
    """Return the placeholder that becomes `var(--name)`."""
    return _PLACEHOLDERS[name]


def _powers(value: float, _: int) -> str:
    """Label a logarithmic axis in plain text, such as 0.01 and 1e-06."""
    return f"{value:g}"


def _plain_ticks(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(_powers))
    axis.set_minor_locator(NullLocator())


def _svg(figure: Figure, label: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for name, placeholder in _PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var(--{name})")
    text = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", text)
    # The page decides the width; the title is what a screen reader says.
    head = re.sub(r'\s(?:width|height)="[^"]*pt"', "", text[: text.index(">")])
    return f'{head} role="img" aria-label="{label}"' + text[text.index(">") :]


def _axes(title: str, size: tuple[float, float] = _SIZE_INCHES, *, bottom_inches: float = 0.46) -> tuple[Figure, Any]:
    figure = Figure(figsize=size)
    # Margins in inches, not a tight box: that would draw everything twice.
    left, bottom, right, top = 0.62 / size[0], bottom_inches / size[1], 1 - 0.1 / size[0], 1 - 0.28 / size[1]
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    axes.set_title(title)
    axes.set_axisbelow(True)
    return figure, axes


def _lowest_shown(pairs: Sequence[tuple[str, FloatArray, FloatArray]]) -> float:
    """Return where a logarithmic axis begins: a token that agrees by chance must not stretch it."""
    typical = [float(np.quantile(np.abs(left - right), 0.05)) for _, left, right in pairs]
    return max(_FLOOR_NATS, min((value for value in typical if value > 0), default=_FLOOR_NATS) / 3)


def scatter(pairs: Sequence[tuple[str, FloatArray, FloatArray]]) -> str:
    """Return scores against scores: agreement is the diagonal.

    Args:
        pairs: Label `left-right`, [tokens] left, [tokens] right.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("Scores of the same tokens (nats)")
        low = min((float(min(left.min(), right.min())) for _, left, right in pairs), default=-1.0)
        axes.plot([low, 0], [low, 0], color=colour("line"), linewidth=1)
        for label, left, right in pairs:
            name = PAIR_COLOURS.get(label, "ink")
            axes.scatter(right, left, s=9, alpha=0.55, linewidths=0, color=colour(name), label=label)
        axes.set_xlabel("right-hand score")
        axes.set_ylabel("left-hand score")
        axes.legend(loc="upper left")
        return _svg(figure, "scatter of scores")


def error_by_position(pairs: Sequence[tuple[str, FloatArray, FloatArray]], positions: FloatArray, limit: float) -> str:
    """Return absolute errors by response position, the first one apart.

    Args:
        pairs: Label, [tokens] left, [tokens] right.
        positions: [tokens] response positions.
        limit: MAE limit, drawn as a line.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("|error| by response position")
        low = _lowest_shown(pairs)
        for label, left, right in pairs:
            error = np.maximum(np.abs(left - right), low)
            name = PAIR_COLOURS.get(label, "ink")
            axes.plot(positions, error, linewidth=0.9, color=colour(name), label=label, alpha=0.9)
            first = positions == 0
            axes.scatter(positions[first], error[first], s=22, color=colour(name), zorder=3)
        axes.axhline(limit, color=colour("bad"), linewidth=0.8, linestyle="--", label=f"limit {limit:.3g}")
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
        axes.set_xlabel("response position (position 0 is scored by prefill)")
        axes.set_ylabel("nats")
        axes.legend(loc="best", ncols=2)
        return _svg(figure, "absolute error by response position")


def tails(pairs: Sequence[tuple[str, FloatArray, FloatArray]]) -> str:
    """Return the share of tokens whose error exceeds a value: the tail at a glance, on two logarithmic axes."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("Tail: share of tokens with a larger |error|")
        low = _lowest_shown(pairs)
        for label, left, right in pairs:
            error = np.sort(np.maximum(np.abs(left - right), low))
            share = 1 - np.arange(error.size) / error.size
            axes.step(
                error, share, where="pre", linewidth=1.2, color=colour(PAIR_COLOURS.get(label, "ink")), label=label
            )
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
        axes.set_xlabel("|error|, nats")
        axes.set_ylabel("share of tokens")
        axes.legend(loc="lower left")
        return _svg(figure, "tail of the absolute error")


def histogram(pairs: Sequence[tuple[str, FloatArray, FloatArray]]) -> str:
    """Return histograms of the signed differences; counts are logarithmic, so that single tokens show."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes("Signed differences")
        reach = max((float(np.abs(left - right).max()) for _, left, right in pairs), default=0.0) or _FLOOR_NATS
        edges = np.linspace(-reach, reach, 61)
        for label, left, right in pairs:
            name = colour(PAIR_COLOURS.get(label, "ink"))
            axes.hist(left - right, bins=edges.tolist(), histtype="step", linewidth=1.2, color=name, label=label)
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
        axes.set_xlabel("left minus right, nats")
        axes.set_ylabel("tokens")
        axes.legend(loc="upper right")
        return _svg(figure, "histogram of signed differences")


def update_timeline(
    labels: Sequence[str], gaps: FloatArray, changes: FloatArray, limits: FloatArray, statuses: Sequence[str]
) -> str:
    """Return B_new-C_new per update beside its limit and the gap that a stale worker would show.

    Args:
        labels: Step of each verdict.
        gaps: [steps] MAE(B_new-C_new), NaN where not measured.
        changes: [steps] MAE(C_new-C_old), NaN where not measured.
        limits: [steps] limits used.
        statuses: [steps] status of the replay; what is neither PASS nor FAIL proves nothing.
    """
    with mpl.rc_context(_STYLE):
        size = (10.4, 3.5) if len(labels) > WIDE_FROM else (5.2, 3.5)
        figure, axes = _axes("Replay across updates (MAE, nats)", size, bottom_inches=1.2)
        at = np.arange(len(labels))
        floor = _FLOOR_NATS
        axes.plot(
            at,
            np.maximum(changes, floor),
            "_",
            markersize=16,
            color=colour("muted"),
            label="C_new-C_old: a stale worker",
        )
        axes.plot(at, limits, "_", markersize=16, color=colour("bad"), label="limit")
        groups = {"good": ("passed", {"PASS"}), "bad": ("failed", {"FAIL"})}
        decided = {"PASS", "FAIL"}
        for name, (word, wanted) in {**groups, "warn": ("no proof", set(statuses) - decided)}.items():
            chosen = np.array([status in wanted for status in statuses], dtype=bool)
            if chosen.any():
                dots = np.maximum(gaps, floor)[chosen]
                axes.plot(at[chosen], dots, "o", markersize=6, color=colour(name), label=f"B_new-C_new, {word}")
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
        axes.set_xticks(at, [label[:_TICK_CHARACTERS] for label in labels], rotation=20, ha="right")
        axes.margins(x=0.08, y=0.15)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -1.2 / (size[1] - 1.48)), ncols=2)
        return _svg(figure, "replay gap per update")
