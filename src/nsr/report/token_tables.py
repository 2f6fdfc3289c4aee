"""The paper's tables on token merging."""

from typing import Any

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.names import SEGMENTATION, name
from nsr.report.table import Cell, Row, Table, contest, gain, measured

MIOU = "miou"


def main_tables(book: Book) -> list[Table]:
    """Main results and further measures."""
    return [_main(book), _additional(book)]


def ablation_tables(book: Book) -> list[Table]:
    """The paper's three ablations, and the adapter."""
    return [
        _ablation(book, "tab:residual-ablation", "Post-merge refinement alone", ("original", "post-merge", "nsr")),
        _ablation(
            book, "tab:feature-spatial-ablation", "Feature and spatial path", ("original", "feature", "spatial", "nsr")
        ),
        _ablation(book, "tab:source-ablation", "Residual or raw member as source", ("original", "raw-source", "nsr")),
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
    columns = tuple({"original": "Base", "nsr": "Full NSR"}.get(variant, name(variant)) for variant in variants)
    return Table(label, title, ("Method", "Point"), columns, tuple(rows), "mIoU on VOC, from zero to one.")


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
