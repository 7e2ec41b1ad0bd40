"""Small charts as inline SVG, coloured by the page's own CSS so that they follow its light or dark scheme.

Classes a page must define: `axis`, `grid`, `tick`, `label`, and for each series `champion`,
`candidate`, `predicted` (as `stroke` of lines and `fill` of bars).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 240
NARROW = 330
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40


@dataclass(frozen=True, slots=True)
class Series:
    """A named line or set of bars; `style` is the CSS class that colours it."""

    name: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    start: float
    length: float
    """Pixels from `low` to `high`; negative for an axis that grows upwards."""

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1)
        return round(self.start + self.length * min(1.0, max(0.0, share)), 1)

    def ticks(self, count: int = 5) -> list[float]:
        step = _nice((self.high - self.low) / count or 1)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def ecdf(series: Sequence[Series], unit: str) -> Markup:
    """Share of requests at or below each value, one step line a series."""
    present = [s for s in series if s.values]
    if not present:
        return Markup("")
    everything = sorted(v for s in present for v in s.values)
    low, high = everything[0], everything[-1]
    low = 0.0 if low < 0.4 * high else low - 0.05 * (high - low)
    x, y = _x(low, high + 0.02 * (high - low)), _y(0, 1)
    lines = []
    for s in present:
        points, values = [f"{x.at(low)},{y.at(0)}"], sorted(s.values)
        for rank, value in enumerate(values):
            points += [
                f"{x.at(value)},{y.at(rank / len(values))}",
                f"{x.at(value)},{y.at((rank + 1) / len(values))}",
            ]
        points.append(f"{x.at(x.high)},{y.at(1)}")
        lines.append(_polyline(points, s.style))
    return _svg(
        _frame(x, y, unit, x_ticks=x.ticks(), y_ticks=[0, 0.25, 0.5, 0.75, 1], y_format=_percent),
        *lines,
        label="Share of requests by " + unit,
    )


def lines(series: Sequence[Series], steps: Sequence[float], x_label: str, width: int = WIDTH) -> Markup:
    """One line a series over the same steps."""
    present = [s for s in series if s.values]
    if not present or not steps:
        return Markup("")
    values = [v for s in present for v in s.values]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1
    x, y = _x(min(steps), max(steps), width), _y(low - margin, high + margin)
    drawn = []
    for s in present:
        points = [f"{x.at(step)},{y.at(value)}" for step, value in zip(steps, s.values, strict=True)]
        drawn.append(_polyline(points, s.style))
        drawn += [_dot(point, s.style) for point in points] if len(points) <= 30 else []
    frame = _frame(
        x, y, x_label, x_ticks=x.ticks(width // 90), y_ticks=y.ticks(), y_format=_plain, width=width
    )
    return _svg(frame, *drawn, label=" and ".join(s.name for s in present) + " by " + x_label, width=width)


def bars(series: Sequence[Series], groups: Sequence[str], x_label: str, width: int = WIDTH) -> Markup:
    """Shares from 0 to 1 as bars side by side, each with its value above it."""
    present = [s for s in series if s.values]
    if not present:
        return Markup("")
    top = max(v for s in present for v in s.values)
    x, y = _x(0, len(groups), width), _y(0, min(1.0, top * 1.15) or 1)
    bar = min(44.0, (x.at(1) - x.at(0)) * 0.78 / len(present))
    drawn = []
    for group, name in enumerate(groups):
        middle = x.at(group + 0.5)
        for number, s in enumerate(present):
            if group >= len(s.values):
                continue
            left = middle + (number - len(present) / 2) * bar
            height = y.at(0) - y.at(s.values[group])
            drawn.append(
                Markup('<rect class="bar {}" x="{}" y="{}" width="{}" height="{}" rx="2"/>').format(
                    s.style,
                    round(left + 1.5, 1),
                    y.at(s.values[group]),
                    round(bar - 3, 1),
                    round(height, 1),
                )
            )
            drawn.append(
                _text(left + bar / 2, y.at(s.values[group]) - 5, f"{100 * s.values[group]:.0f}", "label")
            )
        drawn.append(_text(middle, HEIGHT - BOTTOM + 16, name, "tick"))
    frame = _frame(x, y, x_label, x_ticks=[], y_ticks=y.ticks(4), y_format=_percent, width=width)
    return _svg(frame, *drawn, label="Bars by " + x_label, width=width)


def weights(times_s: Sequence[float], shares: Sequence[float], end_s: float) -> Markup:
    """The candidate's share of sessions over time, as a filled step line."""
    if not times_s:
        return Markup("")
    width, height = 2 * WIDTH + 20, 170
    x, y = _x(0, max(end_s, 1e-9), width), Axis(0, 1, height - BOTTOM, -(height - TOP - BOTTOM))
    points, last = [f"{x.at(0)},{y.at(0)}"], 0.0
    for time_s, share in zip(times_s, shares, strict=True):
        points += [f"{x.at(time_s)},{y.at(last)}", f"{x.at(time_s)},{y.at(share)}"]
        last = share
    points.append(f"{x.at(end_s)},{y.at(last)}")
    area = [*points, f"{x.at(end_s)},{y.at(0)}"]
    frame = _frame(
        x, y, "seconds since the rollout began", x_ticks=x.ticks(8), y_ticks=[0, 0.5, 1], y_format=_percent,
        width=width, height=height,
    )  # fmt: skip
    shape = Markup('<polygon class="area candidate" points="{}"/>').format(" ".join(area))
    return _svg(
        frame, shape, _polyline(points, "candidate"), label="Candidate's share of sessions over time",
        width=width, height=height,
    )  # fmt: skip


def interval(low: float, ratio: float, high: float, reach: float, verdict: str) -> Markup:
    """A ratio with its interval on a log scale from 1/reach to reach, 1 in the middle; for a table cell."""
    x = Axis(-math.log(reach), math.log(reach), 4, 152)
    ends = [x.at(math.log(v)) for v in (low, ratio, high)]
    return Markup(
        '<svg class="interval {}" viewBox="0 0 160 18" width="160" height="18" role="img" aria-label="{}">'
        '<line class="axis" x1="80" x2="80" y1="1" y2="17"/>'
        '<line class="whisker" x1="{}" x2="{}" y1="9" y2="9"/><circle cx="{}" cy="9" r="3.5"/></svg>'
    ).format(verdict, f"{ratio:.3f}, from {low:.3f} to {high:.3f}", ends[0], ends[2], ends[1])


def bounded_interval(
    low: float | None, value: float, high: float | None, bound: float, at_most: bool, verdict: str
) -> Markup:
    """An interval against its bound, the side beyond it shaded; an end that is None runs off the edge."""
    ends = [v for v in (low, value, high, bound) if v is not None]
    margin = 0.12 * (max(ends) - min(ends)) or 1.0
    x = Axis(min(ends) - margin, max(ends) + margin, 4, 152)
    at = x.at(bound)
    beyond = (at, 156 - at) if at_most else (4, at - 4)
    shade = Markup('<rect class="beyond" x="{}" y="1" width="{}" height="16"/>').format(
        round(beyond[0], 1), round(beyond[1], 1)
    )
    line = Markup('<line class="bound" x1="{}" x2="{}" y1="1" y2="17"/>').format(at, at)
    return _small(low, value, high, x, verdict, shade + line)


def scaled_interval(
    low: float | None, value: float, high: float | None, scale: tuple[float, float], neutral: float | None,
    verdict: str,
) -> Markup:  # fmt: skip
    """An interval on a scale that several share, with a line where nothing differs."""
    margin = 0.04 * (scale[1] - scale[0]) or 1.0
    x = Axis(scale[0] - margin, scale[1] + margin, 4, 152)
    line = Markup("")
    if neutral is not None:
        line = Markup('<line class="axis" x1="{}" x2="{}" y1="1" y2="17"/>').format(
            x.at(neutral), x.at(neutral)
        )
    return _small(low, value, high, x, verdict, line)


def _small(
    low: float | None, value: float, high: float | None, x: Axis, verdict: str, behind: Markup
) -> Markup:
    left, right = 0 if low is None else x.at(low), 160 if high is None else x.at(high)
    words = " to ".join("open" if end is None else f"{end:.4g}" for end in (low, high))
    opening = Markup(
        '<svg class="interval {}" viewBox="0 0 160 18" width="160" height="18" role="img" aria-label="{}">'
    ).format(verdict, f"{value:.4g}, from {words}")
    mark = Markup(
        '<line class="whisker" x1="{}" x2="{}" y1="9" y2="9"/><circle cx="{}" cy="9" r="3.5"/></svg>'
    )
    return opening + behind + mark.format(left, right, x.at(value))


def _x(low: float, high: float, width: int = WIDTH) -> Axis:
    return Axis(low, high, LEFT, width - LEFT - RIGHT)


def _y(low: float, high: float) -> Axis:
    return Axis(low, high, HEIGHT - BOTTOM, -(HEIGHT - TOP - BOTTOM))


def _frame(
    x: Axis, y: Axis, x_label: str, x_ticks: Sequence[float], y_ticks: Sequence[float], y_format,
    width: int = WIDTH, height: int = HEIGHT,
) -> Markup:  # fmt: skip
    parts = [
        Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, width - RIGHT, y.at(t), y.at(t)
        )
        for t in y_ticks
    ]
    parts += [_text(LEFT - 8, y.at(t) + 4, y_format(t), "tick end") for t in y_ticks]
    parts += [_text(x.at(t), height - BOTTOM + 16, _plain(t), "tick") for t in x_ticks]
    parts.append(
        Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, width - RIGHT, height - BOTTOM, height - BOTTOM
        )
    )
    parts.append(_text((LEFT + width - RIGHT) / 2, height - 6, x_label, "label"))
    return Markup("").join(parts)


def _svg(*parts: Markup, label: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    opening = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        width, height, label
    )
    return opening + Markup("").join(parts) + Markup("</svg>")


def _polyline(points: Sequence[str], style: str) -> Markup:
    return Markup('<polyline class="line {}" points="{}"/>').format(style, " ".join(points))


def _dot(point: str, style: str) -> Markup:
    cx, cy = point.split(",")
    return Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.5"/>').format(style, cx, cy)


def _text(x: float, y: float, text: str, style: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
        style, round(x, 1), round(y, 1), escape(text)
    )


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten (Heckbert, Nice Numbers for Graph Labels, 1990)."""
    power = 10 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= step * (1 - 1e-9))


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
