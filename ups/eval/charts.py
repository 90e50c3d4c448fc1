"""Tables, charts as inline SVG, fields as inline PNG: no server, no network, light and dark.

A chart is drawn for a column of 330 to 520 pixels, so that its text is readable on a phone; colours
are the classes of the page's style sheet. Numbers show when the pointer rests on a point.
"""

import base64
import io
import math
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 270, 56, 12, 10, 40


def number(value, digits=3):
    """1.23e-2 rather than 1.230000e-02; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "&ndash;"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".") if value else "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def key(kind, label):
    return f'<span class=key><i class="{kind}"></i>{escape(label)}</span>'


def table(head, rows, kind=""):
    """Cells are HTML; the first column stays in sight where a phone has to scroll."""
    head = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th>{name}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
                   for name, *cells in rows)
    return (f'<div class=scroll><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}'
            "</tbody></table></div>")


def cell(score):
    if not score:
        return "&ndash;"
    low, high = map(number, score.get("interval", (None, None)))
    return number(score["all"]) + (f"<small>{low} to {high}</small>" if "interval" in score else "")


def chart(title, x, series, xlabel, ylabel, log=False, logx=False, line=None, bars=False):
    """`series`: {label: (class, values, low, high)}, low and high may be None; `line`: a level."""
    shown = [v for _, values, low, high in series.values() for part in (values, low, high)
             for v in part or () if v is not None and math.isfinite(v) and (v > 0 or not log)]
    if not shown:
        return ""
    floor = max(shown) * 1e-12 if log else -math.inf  # below it there is rounding alone
    shown = [max(v, floor) for v in shown] + ([line] if line is not None else [])
    shown += [0.0] if bars else []
    ypos, yticks = _scale(min(shown), max(shown), log, HEIGHT - BOTTOM, TOP)
    wide = 0.5 if bars else 0.0
    xpos, xticks = _scale(min(x) - wide, max(x) + wide, logx, LEFT, WIDTH - RIGHT, snug=True)
    parts = [f'<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={ypos(v):.1f} y2={ypos(v):.1f} />'
             f'<text x={LEFT - 6} y={ypos(v) + 4:.1f} text-anchor=end>{t}</text>'
             for v, t in yticks]
    parts += [f'<text x={xpos(v):.1f} y={HEIGHT - BOTTOM + 16} text-anchor=middle>{t}</text>'
              for v, t in xticks]
    if line is not None:
        parts.append(f'<line class=level x1={LEFT} x2={WIDTH - RIGHT} y1={ypos(line):.1f} '
                     f'y2={ypos(line):.1f} />')
    for label, (kind, values, low, high) in series.items():
        points = [(xpos(a), ypos(max(v, floor)), a, v) for a, v in zip(x, values, strict=True)
                  if v is not None and math.isfinite(v) and (v > 0 or not log)]
        if bars:
            half, base = 0.42 * (WIDTH - LEFT - RIGHT) / max(1, len(x)), ypos(0)
            parts += [f'<rect class="fill {kind}" x={a - half:.1f} width={2 * half:.1f} y={b:.1f} '
                      f'height={base - b:.1f}><title>{va:g}: {number(vb)}</title></rect>'
                      for a, b, va, vb in points]
            continue
        if low and len(points) > 1:
            ends = [(xpos(a), ypos(max(b, floor)), ypos(max(t, floor))) for a, b, t in
                    zip(x, low, high, strict=True) if b is not None and t is not None]
            edge = [(a, top) for a, _, top in ends] + [(a, bottom) for a, bottom, _ in ends][::-1]
            parts.append(f'<polygon class="band {kind}" points="{_path(edge)}" />')
        path = _path([(a, b) for a, b, *_ in points])
        parts.append(f'<polyline class="curve {kind}" points="{path}" />')
        size = 3 if len(points) == 1 else 0
        parts += [f'<circle class="dot {kind}" cx={a:.1f} cy={b:.1f} r={size or 7} '
                  f'{"" if size else "opacity=0"}><title>{escape(label)}, {va:g}: {number(vb)}'
                  '</title></circle>' for a, b, va, vb in points]
    parts.append(f'<text x={(WIDTH + LEFT) / 2:.0f} y={HEIGHT - 6} text-anchor=middle>'
                 f'{escape(xlabel)}</text>')
    keys = [key(kind, label) for label, (kind, *_) in series.items() if len(series) > 1]
    return (f'<figure><figcaption><b>{escape(title)}</b> <i>{escape(ylabel)}</i></figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{escape(title)}">'
            f'{"".join(parts)}</svg><div class=legend>{"".join(keys)}</div></figure>')


def _path(points):
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _scale(low, high, log, first, last, snug=False):
    """A map of values to pixels, and ticks (value, text); `snug` ends at the data."""
    if log:
        low, high = math.log10(low), math.log10(high)
        if not snug or high - low < 1e-9:
            low, high = low - 0.05, high + 0.05
        if high - low < 0.5:  # less than half a decade has no round power of ten for certain
            low, high = (low + high) / 2 - 0.25, (low + high) / 2 + 0.25
        step = max(1, math.ceil((high - low) / 7))
        powers = range(math.ceil(low), math.floor(high) + 1, step)
        ticks = [10.0**k for k in powers]
        if len(ticks) < 3:
            ticks = [m * 10.0**k for k in range(math.floor(low), math.ceil(high))
                     for m in (1, 2, 5) if low <= math.log10(m) + k <= high]

        def share(v):
            return (math.log10(v) - low) / (high - low)
    else:
        if high - low < 1e-12 * max(1, abs(high)):
            low, high = low - 0.5, high + 0.5
        step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
        if not snug:
            low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
        ticks = [k * step for k in
                 range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

        def share(v):
            return (v - low) / (high - low)
    texts = [f"{v:.6g}" if v == 0 or 0.01 <= abs(v) < 1e5 else number(v, 1) for v in ticks]
    return (lambda v: first + share(v) * (last - first)), list(zip(ticks, texts, strict=True))


def png(values, low, high, colours):
    """A field (rows, columns) as a data address of a PNG, one pixel a value."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, values, vmin=low, vmax=high, cmap=colours, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
