"""The paper's tables on graph aggregation."""

from dataclasses import replace

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.dropout_table import dropout_table
from nsr.report.names import BACKBONES, FURTHER_HETEROPHILOUS, HETEROPHILOUS, ROC_AUC, name
from nsr.report.table import NOT_RUN, Cell, Row, Table, contest, gain, measured

DEPTHS = range(2, 9)


def graph_tables(book: Book) -> list[Table]:
    """Tree fit, heterophilous nodes with controls, ZINC, dropout, data statistics."""
    return [
        _tree(book),
        _tree_training(book),
        _heterophily(book),
        _graph_source(book),
        _controls(book),
        _diagnostic_scores(book),
        _zinc(book),
        *(table for table in [dropout_table(book)] if table.rows),
        _statistics(book),
    ]


def _tree(book: Book) -> Table:
    rows = []
    for backbone in BACKBONES:
        for depth in DEPTHS:
            where = {"depth": depth, "backbone": backbone}
            fit = [  # to one answer in 100,000, because one wrong answer is no fit
                measured(book, "", "tree", {**where, "variant": variant}, "train_accuracy", style=".3f", scale=100)
                for variant in ("original", "nsr")
            ]
            fresh = measured(book, "", "tree", {**where, "variant": "nsr"}, "fresh_accuracy", scale=100)
            if depth == 2:  # the data has all 24 permutations
                fresh = Cell(note="no permutation is fresh")
            rows.append(Row((name(backbone), str(depth)), (*contest(fit), gain(fit[0], fit[1]), fresh)))
    return Table(
        "fig:tree-depth",
        "Tree-NeighborsMatch, accuracy by depth",
        ("Backbone", "Depth"),
        ("Training accuracy ↑", "Training accuracy + NSR ↑", "Δ NSR ↑", "Fresh permutations + NSR ↑"),
        tuple(rows),
        "In per cent. The paper draws this as a figure and prints one number: 100 for every NSR model at depths 2–6.",
    )


def _tree_training(book: Book) -> Table:
    """What the runs say they trained with, over all backbones and variants."""
    label = "tab:tree-training-config"
    columns = {"samples": "Generated samples", "layers": "Layers", "batch": "Batch size"}
    rows = []
    for depth in DEPTHS:
        runs = [run for run in book.experiment("tree") if run.cell.get("depth") == depth]
        cells = []
        for key in columns:
            printed, _ = paper.value(label, {"depth": depth}, key)
            used = sorted({run.config[key] for run in runs if isinstance(run.config.get(key), int)})
            note = "" if used else f"no `{key}` in the results" if runs else NOT_RUN
            cell = Cell(paper=printed, style=",.0f", note=note)
            if len(used) == 1:
                cell = replace(cell, value=used[0], runs=tuple(runs), count=len(runs))
            elif used:
                cell = replace(cell, text=" or ".join(map(str, used)), runs=tuple(runs), count=len(runs))
            cells.append(cell)
        rows.append(Row((str(depth),), tuple(cells)))
    return Table(label, "Tree-NeighborsMatch, training set-up", ("Depth",), tuple(columns.values()), tuple(rows))


def _heterophily(book: Book) -> Table:
    label = "tab:heterophily-main"
    rows = []
    for dataset in HETEROPHILOUS | FURTHER_HETEROPHILOUS:
        for backbone in BACKBONES:
            where = {"dataset": dataset, "backbone": backbone}
            pair = [
                measured(book, label, "heterophily", {**where, "variant": variant}, "test", scale=100)
                for variant in ("original", "nsr")
            ]
            metric = "ROC-AUC" if dataset in ROC_AUC else "accuracy"
            rows.append(Row((name(dataset), metric, name(backbone)), (*contest(pair), gain(pair[0], pair[1]))))
    return Table(
        label,
        "Heterophilous node classification",
        ("Data set", "Measure", "Backbone"),
        ("Original ↑", "+ NSR ↑", "Δ NSR ↑"),
        tuple(rows),
        "In per cent, mean and sample standard deviation over the ten official splits. Actor and Chameleon are not in "
        "the paper. Splits share nodes, so the paired tests treat as independent what is not quite.",
    )


def _graph_source(book: Book) -> Table:
    label = "tab:graph-source-ablation"
    variants = ("original", "post-aggregation", "raw-source", "nsr")
    rows = [
        Row(
            (name(backbone),),
            contest(
                [
                    measured(
                        book,
                        label,
                        "heterophily",
                        {"dataset": "roman-empire", "backbone": backbone, "variant": variant},
                        "test",
                        scale=100,
                    )
                    for variant in variants
                ]
            ),
        )
        for backbone in BACKBONES
    ]
    columns = ("Base", "Post-aggregation only", "RawSource", "Full NSR")
    return Table(label, "Source ablation on Roman-empire", ("Backbone",), columns, tuple(rows), "Accuracy in per cent.")


def _controls(book: Book) -> Table:
    """Ours: the paper's ablation and a parameter-matched baseline on the data sets at hand."""
    variants = ("original", "matched", "post-aggregation", "raw-source", "nsr")
    rows = []
    for dataset in ("minesweeper", "tolokers", *FURTHER_HETEROPHILOUS):
        for backbone in BACKBONES:
            where = {"dataset": dataset, "backbone": backbone}
            cells = [
                measured(book, "", "heterophily", {**where, "variant": variant}, "test", scale=100)
                for variant in variants
            ]
            rows.append(Row((name(dataset), name(backbone)), (*contest(cells), gain(cells[1], cells[-1]))))
    return Table(
        "ours:graph-controls",
        "Controls on the data sets at hand",
        ("Data set", "Backbone"),
        ("Original", "Original, wider", "Post-aggregation only", "RawSource", "Full NSR", "NSR − wider"),
        tuple(rows),
        "Not in the paper. “Wider” has as many parameters as NSR and no residual: only against it is a gain NSR's own.",
        ours=True,
    )


def _diagnostic_scores(book: Book) -> Table:
    """Ours: how much label structure each backbone's aggregations make invisible, before any training."""
    found = {(run.cell.get("dataset"), run.cell.get("backbone")) for run in book.experiment("diagnostic")}
    datasets = sorted({str(dataset) for dataset, _ in found}) or ["roman-empire"]
    rows = [
        Row(
            (name(dataset), name(backbone)),
            tuple(
                measured(
                    book,
                    "",
                    "diagnostic",
                    {"dataset": dataset, "backbone": backbone, "variant": "scores"},
                    metric,
                    style=style,
                )
                for metric, style in (("mean_score", ".5f"), ("zero_share", ".4f"))
            ),
        )
        for dataset in datasets
        for backbone in BACKBONES
    ]
    return Table(
        "ours:diagnostic-scores",
        "Label-based null-space score",
        ("Data set", "Backbone"),
        ("Mean over nodes", "Share of nodes at 0"),
        tuple(rows),
        "Not in the paper, which draws accuracy by this score. Needs topology and labels alone, no trained model.",
        ours=True,
    )


def _zinc(book: Book) -> Table:
    label = "tab:zinc-results"
    rows = []
    for backbone in BACKBONES:
        cells = [
            measured(book, label, "zinc", {"backbone": backbone, "variant": variant}, "test_mae", style=".4f")
            for variant in ("original", "nsr", "matched")
        ]
        rows.append(
            Row((name(backbone),), (*contest(cells, "lower"), gain(cells[0], cells[1]), gain(cells[2], cells[1])))
        )
    return Table(
        label,
        "ZINC, molecular regression without bond types",
        ("Backbone",),
        ("Original ↓", "+ NSR ↓", "Original, wider ↓", "NSR − original", "NSR − wider"),
        tuple(rows),
        "Test MAE, mean and sample standard deviation over ten seeds. The wider original is a control of ours.",
    )


STATISTICS = {
    "nodes": (",.0f", "Nodes"),
    "edges": (",.0f", "Edges"),
    "average_degree": (".2f", "Avg. degree"),
    "global_clustering": (".2f", "Global clustering"),
    "average_local_clustering": (".2f", "Avg. local clustering"),
    "diameter": (",.0f", "Diameter"),
    "features": (",.0f", "Features"),
    "classes": (",.0f", "Classes"),
    "edge_homophily": (".2f", "Edge homophily"),
    "adjusted_homophily": (".2f", "Adjusted homophily"),
    "label_informativeness": (".2f", "Label informativeness"),
}


def _statistics(book: Book) -> Table:
    label = "tab:heterophily-statistics"
    rows = [
        Row(
            (name(row["dataset"]),),
            tuple(
                measured(book, label, "statistics", {"dataset": row["dataset"]}, metric, style=style)
                for metric, (style, _) in STATISTICS.items()
            ),
        )
        for row in paper.rows(label)
    ]
    columns = tuple(title for _, title in STATISTICS.values())
    return Table(label, "The heterophilous graphs", ("Data set",), columns, tuple(rows))
