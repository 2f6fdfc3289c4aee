"""The paper's tables on token merging."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.names import MERGERS, SEGMENTATION, name
from nsr.report.statistics import mean
from nsr.report.table import NOT_RUN, Cell, Row, Table, contest, gain, measured

MIOU = "miou"
ABLATIONS = {
    "tab:residual-ablation": ("Post-merge refinement alone", ("original", "post-merge", "nsr")),
    "tab:feature-spatial-ablation": ("Feature and spatial path", ("original", "feature", "spatial", "nsr")),
    "tab:source-ablation": ("Residual or raw member as source", ("original", "raw-source", "nsr")),
}
FIRST = "seed 0"  # which run of a cell counts where only some cells have several


def main_tables(book: Book) -> list[Table]:
    """Main results and further measures."""
    return [_main(book), _additional(book)]


def ablation_tables(book: Book) -> list[Table]:
    """The paper's three ablations, their means over operating points, and the adapter."""
    return [
        *(_ablation(book, label, title, variants) for label, (title, variants) in ABLATIONS.items()),
        _ablation_means(book),
        _adapter(book),
    ]


def _points(label: str) -> list[dict[str, Any]]:
    """Each (experiment, merger, point) that the paper's table has, once and in its order."""
    keys = [(row["experiment"], row["merger"], row["point"]) for row in paper.rows(label)]
    return [dict(zip(("experiment", "merger", "point"), key, strict=True)) for key in dict.fromkeys(keys)]


def _main(book: Book) -> Table:
    label = "tab:token-main"
    rows = []
    for at in _points(label):
        experiment, where = at["experiment"], {"merger": at["merger"], "point": at["point"]}
        variants = ("original",) if at["merger"] == "none" else ("original", "nsr")
        miou = [
            measured(book, label, experiment, {**where, "variant": variant}, MIOU, scale=100) for variant in variants
        ]
        gflops = [
            measured(book, label, experiment, {**where, "variant": variant}, "gflops_paper", style=".3f")
            for variant in variants
        ]
        if len(variants) == 1:
            cells: tuple[Cell, ...] = (*gflops, *miou, Cell(), Cell(), Cell())
        else:
            printed, _ = paper.value(label, {**at, "variant": "nsr"}, "delta")
            delta = gain(miou[0], miou[1], printed)
            miou = list(contest(miou))
            cells = (gflops[0], miou[0], gflops[1], miou[1], delta)
        rows.append(Row((SEGMENTATION[experiment], name(at["merger"]), name(at["point"])), cells))
    return Table(
        label,
        "Semantic segmentation across mergers and operating points",
        ("Data set", "Method", "Point"),
        ("GFLOPs ↓", "mIoU ↑", "GFLOPs + NSR ↓", "mIoU + NSR ↑", "Δ NSR ↑"),
        tuple(rows),
        "mIoU in per cent. GFLOPs in the paper's convention, one multiply-accumulate is one.",
    )


def _additional(book: Book) -> Table:
    label = "tab:token-additional"
    rows = []
    for at in _points(label):
        experiment, where = at["experiment"], {"merger": at["merger"], "point": at["point"]}
        variants = ("original",) if at["merger"] == "none" else ("original", "nsr")
        accuracy = [
            measured(book, label, experiment, {**where, "variant": variant}, "pixel_accuracy", style=".4f")
            for variant in variants
        ]
        params = [
            measured(book, label, experiment, {**where, "variant": variant}, "params", style=",.0f")
            for variant in variants
        ]
        if len(variants) == 1:
            cells: tuple[Cell, ...] = (accuracy[0], Cell(), params[0], Cell(), Cell())
        else:
            cells = (*contest(accuracy), *params, gap_closure(book, experiment, where))
        rows.append(Row((SEGMENTATION[experiment], name(at["merger"]), name(at["point"])), cells))
    return Table(
        label,
        "Pixel accuracy, parameters, gap closure",
        ("Data set", "Method", "Point"),
        ("Pixel acc. ↑", "Pixel acc. + NSR ↑", "Params", "Params + NSR", "Gap closure % ↑"),
        tuple(rows),
        "Gap closure = (NSR − base) / (full − base) in mIoU; sensitive where full and base are close.",
    )


def gap_closure(book: Book, experiment: str, where: dict[str, Any]) -> Cell:
    """How much of the mIoU lost by merging comes back, in per cent, from the means over seeds."""
    full = measured(book, "", experiment, {"merger": "none", "point": "1.0x", "variant": "original"}, MIOU)
    base = measured(book, "", experiment, {**where, "variant": "original"}, MIOU)
    nsr = measured(book, "", experiment, {**where, "variant": "nsr"}, MIOU)
    label = "tab:token-additional"
    printed, _ = paper.value(label, {"experiment": experiment, **where, "variant": "nsr"}, "gap_closure")
    if full.value is None or base.value is None or nsr.value is None:
        missing = next(cell.note for cell in (nsr, base, full) if cell.value is None)
        return Cell(paper=printed, style=".1f", note=missing)
    if full.value <= base.value:
        return Cell(paper=printed, style=".1f", note="no gap: the merged model is as good as the full one")
    closed = 100 * (nsr.value - base.value) / (full.value - base.value)
    runs = full.runs + base.runs + nsr.runs
    return Cell(closed, runs=runs, paper=printed, style=".1f", count=min(full.count, base.count, nsr.count))


def _ablation(book: Book, label: str, title: str, variants: tuple[str, ...]) -> Table:
    rows = []
    for at in _points(label):
        where = {"merger": at["merger"], "point": at["point"]}
        cells = [
            measured(book, label, at["experiment"], {**where, "variant": variant}, MIOU, style=".4f")
            for variant in variants
        ]
        rows.append(Row((name(at["merger"]), name(at["point"])), contest(cells)))
    return Table(label, title, ("Method", "Point"), _titles(variants), tuple(rows), "mIoU on VOC, from zero to one.")


def _titles(variants: Sequence[str]) -> tuple[str, ...]:
    return tuple({"original": "Base", "nsr": "Full NSR"}.get(variant, name(variant)) for variant in variants)


def _ablation_means(book: Book) -> Table:
    """Ours: one point and seed decides little, the mean over a merger's points more."""
    label_of = {variant: label for label, (_, variants) in ABLATIONS.items() for variant in variants}
    variants = ("original", "post-merge", "feature", "spatial", "raw-source", "nsr")
    points = _points("tab:source-ablation")
    rows = []
    for mergers in [*([at] for at in dict.fromkeys(at["merger"] for at in points)), list(MERGERS)]:
        cells = [
            _mean_of_points(
                [
                    measured(
                        book,
                        label_of[variant],
                        at["experiment"],
                        {"merger": at["merger"], "point": at["point"], "variant": variant},
                        MIOU,
                        style=".4f",
                    )
                    for at in points
                    if at["merger"] in mergers
                ]
            )
            for variant in variants
        ]
        rows.append(Row((name(mergers[0]) if len(mergers) == 1 else "all",), contest(cells)))
    return Table(
        "ours:ablation-means",
        "Ablations, means over operating points",
        ("Method",),
        _titles(variants),
        tuple(rows),
        f"mIoU on VOC, from zero to one; {FIRST} of each point, because not every cell has more.",
        ours=True,
    )


def _mean_of_points(cells: Sequence[Cell]) -> Cell:
    printed = [cell.paper for cell in cells if cell.paper is not None]
    known = Cell(paper=mean(printed) if len(printed) == len(cells) else None, style=cells[0].style)
    numbers = [cell.replicates[FIRST] for cell in cells if FIRST in cell.replicates]
    if len(numbers) < len(cells):
        return replace(known, note=next(cell.note for cell in cells if FIRST not in cell.replicates) or NOT_RUN)
    runs = tuple(run for cell in cells for run in cell.runs if run.replicate == FIRST)
    return replace(known, value=mean(numbers), runs=runs, count=len(numbers))


def _adapter(book: Book) -> Table:
    """Ours: the branch and the head alone, trained on a frozen backbone."""
    rows = []
    for at in _points("tab:token-main"):
        if at["experiment"] != "voc" or at["merger"] == "none":
            continue
        where = {"merger": at["merger"], "point": at["point"]}
        adapter = {**where, "variant": "adapter"}
        untrained = measured(book, "", "voc", adapter, "miou_untrained", scale=100)
        trained = [
            measured(book, "", "voc", {**where, "variant": variant}, MIOU, scale=100)
            for variant in ("adapter", "original", "nsr")
        ]
        cells = contest([untrained, *trained])
        if cells[1].value is not None or at["merger"] == "tome":
            rows.append(Row((name(at["merger"]), name(at["point"])), cells))
    return Table(
        "ours:adapter",
        "A frozen backbone: NSR and head alone are trained",
        ("Method", "Point"),
        ("Compressed, not trained", "Adapter", "Base, fully trained", "+ NSR, fully trained"),
        tuple(rows),
        "Not in the paper: a finished full model, merged as it is, then with NSR and head trained. mIoU on VOC in %.",
        ours=True,
    )
