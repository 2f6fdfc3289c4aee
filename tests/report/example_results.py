"""A plausible tree of results, written as the experiments write it, for tests of what reads them."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsr.report import paper

HOME = {"commit": "1f2e3d4c5b6a7980", "torch": "2.13.0", "device": "NVIDIA H200"}
ELSEWHERE = {"commit": "00aa11bb22cc33dd", "torch": "2.13.0", "device": "CPU, 2 cores"}


def document(experiment: str, cell: dict[str, Any], metrics: dict[str, Any], **changes: Any) -> dict[str, Any]:
    options = " ".join(f"--{key} {value}" for key, value in cell.items())
    return {
        "schema": 1,
        "experiment": experiment,
        "status": "done",
        "cell": cell,
        "metrics": metrics,
        "config": {"epochs": 100},
        "command": f"nsr run {experiment} {options}",
        "environment": HOME,
        "seconds": 12.5,
        **changes,
    }


def write(folder: Path, result: dict[str, Any], name: str = "") -> Path:
    name = name or "_".join(str(value) for value in result["cell"].values())
    path = folder / result["experiment"] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return path


def write_example(folder: Path) -> int:
    """Results near the paper's numbers for all that this project can run; returns how many files."""
    count = 0
    for result in documents():
        write(folder, result)
        count += 1
    return count


def documents() -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    yield from _segmentation(draw)
    yield from _heterophily(draw)
    yield from _zinc(draw)
    yield from _tree(draw)
    yield from _diagnostic(draw)
    yield from _numerics(draw)
    yield from _bench()


def _segmentation(draw: random.Random) -> Iterator[dict[str, Any]]:
    size = {
        (row["merger"], row["point"], row["variant"]): row
        for row in paper.rows("tab:token-additional")
        if row["experiment"] == "voc"
    }
    for row in paper.rows("tab:token-main"):
        if row["experiment"] != "voc":
            continue
        cell = {key: row[key] for key in ("merger", "point", "variant")}
        more = size[row["merger"], row["point"], row["variant"]]
        for seed in range(3 if row["point"] == "3.4x" else 1):
            metrics = {
                "miou": row["miou"] / 100 + draw.gauss(-0.01, 0.004),
                "pixel_accuracy": more["pixel_accuracy"] + draw.gauss(0, 0.002),
                "gflops_paper": row["gflops_paper"],
                "gflops_executed": 0.97 * row["gflops_paper"],
                "params": more["params"],
                "achieved": 1.254 / row["gflops_paper"],
                "merged_share": [0.1] * 12,
                "class_iou": [0.5, None],
            }
            changes = {"environment": ELSEWHERE} if row["merger"] == "mpm" and row["point"] == "2.4x" else {}
            yield document("voc", {**cell, "seed": seed}, metrics, **changes)
    for label in ("tab:residual-ablation", "tab:feature-spatial-ablation", "tab:source-ablation"):
        for row in paper.rows(label):
            if row["variant"] not in ("original", "nsr"):
                cell = {key: row[key] for key in ("merger", "point", "variant")} | {"seed": 0}
                yield document("voc", cell, {"miou": row["miou"] + draw.gauss(-0.01, 0.004)})


def _heterophily(draw: random.Random) -> Iterator[dict[str, Any]]:
    centre = {
        (row["dataset"], row["backbone"], row["variant"]): row["test"] / 100
        for row in paper.rows("tab:heterophily-main")
    }
    for dataset in ("minesweeper", "tolokers", "actor"):
        for backbone in ("gcn", "gin", "sage"):
            for variant in ("original", "nsr", "matched", "raw-source", "post-aggregation"):
                level = centre.get((dataset, backbone, variant), 0.36 if dataset == "actor" else 0.88)
                for split in range(10):
                    cell = {"dataset": dataset, "backbone": backbone, "variant": variant, "split": split}
                    score = level + draw.gauss(0.005, 0.004)
                    yield document("heterophily", cell, {"val": score + 0.003, "test": score})


def _zinc(draw: random.Random) -> Iterator[dict[str, Any]]:
    for row in paper.rows("tab:zinc-results"):
        for seed in range(10):
            cell = {"backbone": row["backbone"], "variant": row["variant"], "seed": seed}
            error = row["test_mae"] + draw.gauss(0, row["test_mae_std"])
            yield document("zinc", cell, {"val_mae": error + 0.01, "test_mae": error})


def _tree(draw: random.Random) -> Iterator[dict[str, Any]]:
    for backbone, shift in (("gcn", 0.0), ("gin", 0.1), ("sage", 0.05)):
        for depth in range(2, 9):
            for variant in ("original", "nsr"):
                for seed in (11, 12, 13) if variant == "nsr" else (11,):
                    original = 1.0 if depth < 4 else 0.7 / 2 ** (depth - 4) + shift
                    fit = (1.0 if depth < 7 else 0.9 - 0.1 * (depth - 7)) if variant == "nsr" else original
                    cell = {"depth": depth, "backbone": backbone, "variant": variant, "seed": seed}
                    metrics = {"train_accuracy": fit, "test_accuracy": fit * 0.99, "fresh_accuracy": fit * 0.9}
                    config = {"samples": 32000, "layers": depth + 1, "batch": 1024}
                    yield document("tree", cell, metrics, config=config)


def _diagnostic(draw: random.Random) -> Iterator[dict[str, Any]]:
    for dataset in ("minesweeper", "actor"):
        for backbone in ("gcn", "gin", "sage"):
            for split in range(10):
                for variant, slope in (("original", -0.02), ("nsr", -0.002)):
                    cell = {"dataset": dataset, "backbone": backbone, "variant": variant, "split": split}
                    bins: list[float | None] = [0.85 + slope * i + draw.gauss(0, 0.01) for i in range(10)]
                    if split == 3:
                        bins[9] = None  # an empty bin
                    yield document("diagnostic", cell, {"accuracy_by_bin": bins, "count_by_bin": [100] * 10})
            scores = {"mean_score": 0.7, "deciles": [i / 10 for i in range(11)], "zero_share": 0.01}
            yield document("diagnostic", {"dataset": dataset, "backbone": backbone, "variant": "scores"}, scores)


def _numerics(draw: random.Random) -> Iterator[dict[str, Any]]:
    for merger in ("tome", "pitome", "mpm"):
        label = f"tab:{merger}-compression-configurations"
        for row in (row for row in paper.rows(label) if row["dataset"] == "voc"):
            cell = {"dataset": "voc", "merger": merger, "point": row["point"]}
            share = 0.2 + 0.1 * float(row["point"][:-1]) + draw.gauss(0, 0.01)
            metrics = {"null_violation": 6e-7, "residual_share": share, "residual_share_std": 0.05}
            yield document("numerics", {**cell, "seed": 0}, metrics)
            merged = [0.15 * 0.8**block for block in range(12)]
            point = {"merged_share": merged, "gflops_paper": row["gflops_paper"]}
            if merger == "mpm":
                point |= {"blocks": [0, 1, 2, 5], "search": row["search"], "blocks_found": [0, 3, 4]}
            else:
                point |= {key: row[key] for key in ("r", "keep", "achieved") if key in row}
            yield document("operating-points", cell, point)


def _bench() -> Iterator[dict[str, Any]]:
    speeds = {
        "full, eager": 34600,
        "full, compiled and captured": 60900,
        "free drop, compiled and captured": 110000,
        "literal ToMe, eager": 17300,
        "merged, compiled and captured": 92000,
        "merged + NSR, compiled and captured": 82000,
    }
    arms = {name: _arm(256, rate, rate / 60900) for name, rate in speeds.items()}
    metrics = {"224x224 batch 256": {**arms, "stages": {"matching": 0.4}}, "512x512 batch 32": arms}
    yield document("bench", {"bench": "tokens", "machine": "h200"}, metrics)
    steps = {
        "GCN, eager": 15.2,
        "GCN, compiled": 3.9,
        "NSR as worded, eager": 113.8,
        "NSR as worded, compiled": 33.5,
        "NSR, captured, TF32": 7.6,
        "NSR, compiled and captured, TF32": 7.1,
    }
    graph: dict[str, Any] = {name: {"milliseconds": _times(time), "peak_bytes": None} for name, time in steps.items()}
    errors = {"path": "fused", "fp32": {"out": 1e-6}}
    yield document("bench", {"bench": "graph", "machine": "h200"}, {"tolokers": {**graph, "kernel errors": errors}})
    growth = {
        f"{members:,} members": {
            name: {"milliseconds": _times(factor * members / 1e6 + 0.1), "nanoseconds_per_member": factor}
            for name, factor in (("GCN", 2.0), ("NSR", 6.0))
        }
        for members in (10**4, 10**5, 10**6, 10**7)
    }
    yield document("bench", {"bench": "scale", "machine": "h200"}, growth)


def _times(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.98 * median, "high": 1.04 * median}


def _arm(batch: int, rate: float, speed_up: float) -> dict[str, Any]:
    time = 1e3 * batch / rate
    return {
        "images_per_second": rate,
        "speed_up": speed_up,
        "peak_bytes": 2**30,
        "milliseconds": _times(time),
    }
