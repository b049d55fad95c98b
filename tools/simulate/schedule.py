"""Pictures of the scheduled backend: what its degrees bring by the model, and what streams did."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import MAX_DEGREE
from flashmoe_megatron.schedule.fit import LEVELS, Fit, read_fit
from flashmoe_megatron.separate.degree import passes_of
from flashmoe_megatron.separate.model import Pass, Stage, time_of
from tools.weak_scaling.style import ACCENT, FUSED, NEUTRAL, UNFUSED, new_figure, save

WAYS = ("one degree", "a degree each way", "and between beside within hosts")
COLORS = {
    "dispatch": ACCENT,
    "dispatch within": ACCENT,
    "experts": FUSED,
    "weights": "#2f4858",
    "combine": UNFUSED,
    "combine within": UNFUSED,
    "probabilities": NEUTRAL,
}
STREAMS = ("between", "within", "compute")


def read_levels(between: Path, within: Path | None) -> Fit:
    """A fit of several hosts of several ranks, of its own or put together from two.

    Args:
        between: Measured on the hosts.
        within: Measured on one of them, if ``between`` has one rank on each.
    """
    fit = read_fit(between, None)
    if within is None:
        if LEVELS[0] not in fit.lines:
            raise ConfigError(f"fit {between} has no exchange within hosts: wanted --within")
        return fit
    levels = dict(zip(LEVELS, (read_fit(within, None), fit), strict=True))
    lines = {name: of.lines["all_to_all"] for name, of in levels.items()}
    beside = {name: of.beside["all_to_all"] for name, of in levels.items()}
    return replace(fit, lines={**fit.lines, **lines}, beside={**fit.beside, **beside})


def read_trace(path: Path) -> dict[str, Any]:
    """What ``python -m flashmoe_megatron.schedule trace`` has written.

    Raises:
        ConfigError: The file cannot be read, or is none of it.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _ = found["layers"], found["config"], found["machine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"trace {path}: {error!r}; wanted a file of python -m flashmoe_megatron.schedule trace"
        ) from error
    return found


def speedups(config: MoEConfig, fit: Fit) -> list[float]:
    """What each of ``WAYS`` brings over one part, forward and backward together."""
    apart = passes_of(config, fit, "2dh", "all")
    merged = tuple(_on_one_stream(one) for one in apart)
    degrees = range(1, MAX_DEGREE + 1)
    times = {
        passes: [[time_of(one, degree) for degree in degrees] for one in passes]
        for passes in (merged, apart)
    }
    both = [sum(pair) for pair in zip(*times[merged], strict=True)]
    best = [min(both), sum(map(min, times[merged])), sum(map(min, times[apart]))]
    return [both[0] / one for one in best]


def _on_one_stream(one: Pass) -> Pass:
    """The same pass if a part's exchanges between and within hosts were one."""

    def joined(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        travel = [stage for stage in stages if stage.stream != "compute"]
        alpha_s, whole_s = (
            sum(getattr(s, name) for s in travel) for name in ("alpha_s", "whole_s")
        )
        products = (stage for stage in stages if stage.stream == "compute")
        return *products, Stage("exchange", "between", alpha_s, whole_s)

    return replace(one, there=joined(one.there), back=joined(one.back))


def draw_ablation(by_layer: dict[str, list[float]], machine: str, path: Path) -> list[Path]:
    """Bars of speedups for each layer and their geometric mean."""
    columns = list(zip(*by_layer.values(), strict=True))
    mean = [math.exp(sum(map(math.log, one)) / len(one)) for one in columns]
    rows = {**by_layer, "geometric mean": mean}
    with new_figure(9, 4) as figure:
        ax = figure.subplots()
        for i, (way, color) in enumerate(zip(WAYS, (NEUTRAL, ACCENT, FUSED), strict=True)):
            at = [place + 0.27 * (i - 1) for place in range(len(rows))]
            bars = ax.bar(at, [one[i] for one in rows.values()], 0.25, label=way, color=color)
            ax.bar_label(bars, fmt="%.2f", fontsize=8)
        ax.set_xticks(range(len(rows)), list(rows), rotation=15)
        ax.set_ylabel("times as fast as one part")
        ax.set_title(f"modelled with constants measured on {machine}", loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=len(WAYS))
        return save(figure, path)


def draw_streams(found: dict[str, Any], path: Path) -> list[Path]:
    """Time stamps of a layer in one part and at its degree, each pass with its streams."""
    layers = found["layers"]
    panels = [(layer, way) for way in ("forward", "backward") for layer in layers]
    with new_figure(10, 1.5 * len(panels) + 1) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, (layer, way) in zip(axes, panels, strict=True):
            spans = layer[way]
            used = [stream for stream in STREAMS if any(s["stream"] == stream for s in spans)]
            for span in spans:
                begin, length = span["begin_us"], span["end_us"] - span["begin_us"]
                row = used.index(span["stream"])
                color = COLORS[span["name"]]
                ax.barh(row, length, 0.8, begin, color=color, edgecolor="white", label=span["name"])
            ax.set_yticks(range(len(used)), used)
            ax.invert_yaxis()
            last = max(s["end_us"] for other in layers for s in other[way])
            ax.set_xlim(0, last)
            degree = layer["degrees"][way == "backward"]
            ax.set_title(f"{way}, degree {degree}", loc="left", fontsize=11)
        axes[-1].set_xlabel("µs since the pass began")
        handles = {h.get_label(): h for ax in axes for h in ax.containers}
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles)
        )
        c = found["config"]
        figure.suptitle(
            f"{found['machine']}: {c['max_tokens']} tokens a rank, H={c['hidden']}, "
            f"F={c['intermediate']}, {c['num_experts']} experts, top-{c['topk']}"
        )
        return save(figure, path)
